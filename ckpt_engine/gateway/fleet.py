"""The replicas as a gateway knows them, from the manager's news and their own answers. Pure; callers pass the time.

The manager's last news stays in force while the manager is away. In addition the gateway shuns a replica that refused
or did not answer, whatever the manager reports of it, for a time that grows with each failure.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field, replace
from enum import Enum
from types import MappingProxyType

from ckpt_engine.core.adapters import asked_version
from ckpt_engine.core.version_bounds import VersionBounds
from ckpt_engine.gateway import refusals
from ckpt_engine.gateway.refusals import RefusedError
from ckpt_engine.gateway.versions import KEPT, RECOMPUTED, UNKNOWN, GatewayVersion, Span

HISTORY = 64
"""How many versions are remembered of a replica."""

SHUN_SECONDS, MOST_SHUN_SECONDS = 0.25, 4.0
"""How long a replica that failed gets no requests: twice as long with each failure in a row."""


class FleetState(Enum):
    SERVING = "serving"
    DRAINING = "draining"
    ASLEEP = "asleep"
    CLOSED = "closed"
    AWAY = "away"


TAKES = (FleetState.SERVING, FleetState.DRAINING)
"""States in which a gate takes requests: while it drains it keeps them until its weights are whole again."""

ABORT = "abort"
IN_PLACE = "in_place"
ENDS = (ABORT, "wait")
"""Pause modes in which a request that has a token ends before its replica takes another version."""


@dataclass(frozen=True)
class ReplicaNews:
    """The state of a replica, as the manager or a probe reports it."""

    name: str
    url: str  # empty: unknown
    engine: str  # its kind
    state: FleetState
    reason: str = ""
    identity: GatewayVersion | None = None
    next: GatewayVersion | None = None
    mode: str = ""  # the pause mode of the running update, as the wire names it; empty: none runs
    mislabels: bool = False  # its engine may label its tokens with a wrong version


@dataclass(frozen=True)
class ShelfNews:
    """The state of one adapter in one engine, as the manager reports it: to the manager it is a replica."""

    name: str
    url: str  # of its engine; empty: unknown
    adapter: str
    serves: bool  # whether the manager says that it serves a version
    identity: GatewayVersion | None = None  # the one that it was given last


@dataclass
class FleetShelf:
    """What a gateway process knows of one adapter in one engine."""

    news: ShelfNews
    versions: OrderedDict[int, None] = field(default_factory=OrderedDict)  # that it had; it may have dropped old ones


NONE: Mapping[str, ReplicaNews] = MappingProxyType({})


class Visit:
    """One request of this process inside a replica, and the versions that the replica can have held meanwhile."""

    def __init__(self, member: FleetReplica, resumed: bool = False) -> None:
        """Begins it. resumed: it continues another leg, so its whole prompt is computed before its first token."""
        self._member, self._prefills = member, resumed
        self.has_token = False  # whether a token has come
        self._aborts: set[GatewayVersion | None] = set()  # what updates in pause mode abort were to install meanwhile
        self._admitted: GatewayVersion | None = None  # that the gate named when it let the request in
        self._accepted = VersionBounds()
        self._rollback_versions: set[GatewayVersion] = set()  # that the replica went back to, or is about to
        # Other versions in the replica's news. One older than the gate's, or of the run before, was overtaken.
        self._news_versions: set[GatewayVersion] = set()
        self._modes: dict[int, set[str]] = {}  # of the updates in the news meanwhile, by version
        member.visits.add(self)
        member.prefills += resumed
        self.hear(member.news, None)

    def begin(self) -> None:
        """Notes that a token has come."""
        self.has_token = True
        self._member.prefills -= self._prefills
        self._prefills = False

    def end(self) -> None:
        """Ends the visit. `bounds` do not change after this."""
        self.begin()
        self._member.visits.discard(self)

    def let_in(self, admitted: GatewayVersion | None, accepted: VersionBounds) -> None:
        """Notes under which version the gate let it in; None: it named none. accepted: the versions that the gate was
        asked for, and ends the request at others."""
        self._admitted, self._accepted = admitted, accepted

    def hear(self, news: ReplicaNews, before: GatewayVersion | None) -> None:
        """Takes in news of the replica. before: the version in the last news."""
        if news.mode == ABORT:
            self._aborts.add(news.next)
        if news.next is not None and news.mode:
            self._modes.setdefault(news.next.version, set()).add(news.mode)
        stays = self.has_token and news.mode in ENDS
        for each in (news.identity, None if stays else news.next):
            if each is not None:
                lower = _goes_back(before, each) or _goes_back(news.identity, each)
                (self._rollback_versions if lower else self._news_versions).add(each)

    @property
    def cut(self) -> bool:
        """Whether an update may have ended the request early. One that installed the version that the gate named came
        before the request was let in."""
        first = self._admitted
        return any(first is None or each is None or each.version != first.version for each in self._aborts)

    def caches(self, number: int) -> str:
        """What happened to its caches when the replica installed the version of this number. It may have done so more
        than once, as after a rollback: then it is known only if all were in one mode."""
        modes = self._modes_of(number)
        mode = next(iter(modes)) if len(modes) == 1 else ""
        return {IN_PLACE: KEPT, "keep": RECOMPUTED, "unspecified": RECOMPUTED}.get(mode, UNKNOWN)

    def _modes_of(self, number: int) -> set[str]:
        """The pause modes of the installs of a version, by the news."""
        return self._modes.get(number) or self._member.modes.get(number, set())

    def entry(self, number: int) -> str:
        """What its caches were when the version of this number made its first token. A request that the gate let in
        under another version ran over the install, if only in a queue: it may have found caches of before."""
        admitted = self._admitted
        if admitted is None or admitted.version == number:
            return RECOMPUTED
        modes = self._modes_of(number)
        if IN_PLACE in modes:
            return KEPT if len(modes) == 1 else UNKNOWN
        return RECOMPUTED if modes else UNKNOWN

    def bounds(self) -> tuple[GatewayVersion | None, GatewayVersion | None]:
        """The lowest and the highest version that the replica can have held meanwhile, and its gate let tokens of."""
        first, accepted = self._admitted, self._accepted
        if first is not None and accepted.version is not None:
            return first, first
        versions = {each for each in self._news_versions if first is None or not _goes_back(first, each)}
        versions |= self._rollback_versions
        if first is not None:
            versions.add(first)
            if accepted.gate_headers():
                least = accepted.min_version or 0
                versions = {each for each in versions if each.version >= least and not _other_run(first, each)}
        rooted = sorted(versions, key=_root, reverse=True)  # of two entries for one version, the one with a root first
        return min(rooted, key=_place, default=None), max(rooted, key=_place, default=None)


@dataclass
class FleetReplica:
    """What one gateway process knows of one replica."""

    news: ReplicaNews
    history: OrderedDict[int, GatewayVersion] = field(default_factory=OrderedDict)
    visits: set[Visit] = field(default_factory=set)  # requests of this process inside it
    reported: int = 0  # all requests inside it, when it last reported them
    own_then: int = 0  # requests of this process inside it, at the same time
    prefills: int = 0  # requests of this process that were resumed there and have no token yet
    failures: int = 0
    shunned_until: float = 0.0
    last_failure: str = ""
    modes: dict[int, set[str]] = field(default_factory=dict)  # of the updates in its news, by version
    life: int = 0  # how often its engine was seen dead
    down: bool = False  # its engine was seen dead and has not answered since

    @property
    def name(self) -> str:
        return self.news.name

    @property
    def own(self) -> int:
        """Requests of this process inside it."""
        return len(self.visits)

    @property
    def load(self) -> int:
        """Requests inside it, of all gateways and callers."""
        return max(self.own, self.reported + self.own - self.own_then)

    def died(self) -> None:
        """Notes that nothing listens at its address. Whatever answers there next is another engine."""
        self.life += not self.down
        self.down = True

    def answers(self) -> None:
        """Notes that its engine takes connections."""
        self.down = False

    def identify(self, label: GatewayVersion) -> GatewayVersion:
        """Completes an engine's label with lineage and root; a bare number is its newest version of that number."""
        recorded = self.history.get(label.version)
        same = recorded is not None and label.lineage in ("", recorded.lineage) and recorded.root.startswith(label.root)
        return recorded if same and recorded is not None else label

    def whole(self, identity: GatewayVersion) -> GatewayVersion:
        """Completes the version that its gate named with the lineage, if that is known."""
        recorded = self.history.get(identity.version)
        if recorded is None or (identity.root and recorded.root and recorded.root != identity.root):
            return identity
        return recorded

    def tell(self, news: ReplicaNews) -> None:
        """Takes in news of it."""
        before, self.news = self.news.identity, news
        for visit in self.visits:
            visit.hear(news, before)


@dataclass(frozen=True)
class VersionWant(VersionBounds):
    """The replicas that a request may go to. All but `model` means the version of the base."""

    engines: frozenset[str] = frozenset()  # kinds that speak its dialect; empty: any
    model: str = ""  # the request's, which may name an adapter, or a version of one

    def against(self, span: Span) -> RefusedError | None:
        """The refusal if a span's tokens may be of a version that the request does not accept. A span that is not exact
        is judged by the lowest and the highest version that the replica can have held."""
        change = f"the replica {'went' if span.exact else 'may have gone'} over to"
        low, high = span.lowest, span.highest
        runs = {each.lineage for each in (low, high) if each} - {"", self.lineage}
        if self.lineage and runs:
            return RefusedError(409, refusals.LINEAGE_CHANGED, f"{change} another run ({', '.join(sorted(runs))})")
        if self.version is not None and not (low and high and low.version == self.version == high.version):
            other = next((each.version for each in (high, low) if each and each.version != self.version), "none")
            mismatch = f"version {other}, and version {self.version} was asked for"
            return RefusedError(409, refusals.VERSION_CHANGED, f"{change} {mismatch}")
        if self.min_version is not None and (low is None or low.version < self.min_version):
            mismatch = f"version {low.version if low else 'none'}, and {self.min_version} or a later one was asked for"
            return RefusedError(409, refusals.ROLLED_BACK, f"{change} {mismatch}")
        return None


class Fleet:
    """All replicas that a gateway knows."""

    def __init__(self) -> None:
        self.members: dict[str, FleetReplica] = {}  # by name
        self.shelves: dict[str, FleetShelf] = {}  # by name
        self.latest: dict[str, GatewayVersion] = {}  # the last version of each lineage, in the manager's news
        self.heard = False  # whether any news has come
        self._highest: dict[str, int] = {}  # the highest number that `latest` had, by lineage

    # -- news

    def tell(self, news: Iterable[ReplicaNews], removed: Iterable[str] = (), whole: bool = False) -> None:
        """Takes in news of replicas. whole: the news names all replicas, so that others are removed too."""
        news = list(news)
        self.heard = True
        for each in news:
            member = self.members.get(each.name)
            if member is None:
                member = self.members[each.name] = FleetReplica(each)
            elif (each.url, each.state) != (member.news.url, member.news.state) and each.state in TAKES:
                member.failures, member.shunned_until = 0, 0.0
            member.tell(each)
            if each.next is not None and each.mode:
                member.modes.setdefault(each.next.version, set()).add(each.mode)
                while len(member.modes) > HISTORY:
                    del member.modes[next(iter(member.modes))]
            self._remember(member, each.identity)
            self._remember(member, each.next)
        for name in [*removed, *(set(self.members) - {each.name for each in news} if whole else ())]:
            member = self.members.get(name)
            if member is not None and member.own == 0:
                del self.members[name]
            elif member is not None:
                member.news = replace(member.news, state=FleetState.CLOSED, reason="it was taken out")

    def tell_shelves(self, news: Iterable[ShelfNews], removed: Iterable[str] = ()) -> None:
        """Takes in news of adapters."""
        for each in news:
            shelf = self.shelves.setdefault(each.name, FleetShelf(each))
            if shelf.news.url != each.url:
                shelf.versions.clear()  # another engine
            shelf.news = each
            if each.identity is not None:
                shelf.versions[each.identity.version] = None
                shelf.versions.move_to_end(each.identity.version)
                while len(shelf.versions) > HISTORY:
                    shelf.versions.popitem(last=False)
        for name in removed:
            self.shelves.pop(name, None)

    def tell_latest(self, latest: Iterable[GatewayVersion]) -> None:
        """Takes in the last version of every lineage."""
        self.latest = {each.lineage: each for each in latest}
        for each in self.latest.values():
            self._highest[each.lineage] = max(each.version, self._highest.get(each.lineage, each.version))

    def _remember(self, member: FleetReplica, identity: GatewayVersion | None) -> None:
        if identity is not None:
            member.history[identity.version] = identity
            member.history.move_to_end(identity.version)
            while len(member.history) > HISTORY:
                member.history.popitem(last=False)

    # -- observations

    def failed(self, member: FleetReplica, now: float, why: str, wait: float = 0.0) -> None:
        """Notes that a replica did not answer, or refused. wait: seconds in its Retry-After."""
        member.failures += 1
        most = min(MOST_SHUN_SECONDS, SHUN_SECONDS * 2 ** min(member.failures - 1, 8))
        member.shunned_until = now + max(most, min(wait, MOST_SHUN_SECONDS))
        member.last_failure = why

    def answered(self, member: FleetReplica, admitted: GatewayVersion | None) -> GatewayVersion | None:
        """Notes that a replica let a request in. Returns the version that its gate named, with the lineage if known."""
        member.failures, member.shunned_until, member.last_failure = 0, 0.0, ""
        member.answers()
        if admitted is None:
            return None
        identity = member.whole(admitted)
        if identity is admitted:
            self._remember(member, admitted)
        return identity

    # -- choice

    def candidates(
        self, want: VersionWant, now: float, unsuited: Mapping[str, ReplicaNews] = NONE
    ) -> list[FleetReplica]:
        """Replicas that a request may go to now: those that take requests, or else those that are away.

        unsuited: replicas whose gates let the request in under a version that it does not accept, with their news at
        that time; they are left out until there is newer news. Raises RefusedError where waiting cannot help.
        """
        able = [member for member in self.members.values() if member.news.url and self._speaks(member, want)]
        if self.heard and self.members and not any(self._speaks(member, want) for member in self.members.values()):
            kinds = ", ".join(sorted({member.news.engine for member in self.members.values()}))
            raise RefusedError(501, refusals.NO_DIALECT, f"no replica speaks this route: there are engines of {kinds}")
        self._hopeless(want)
        able = [
            member
            for member in able
            if now >= member.shunned_until and self._fits(member, want) and unsuited.get(member.name) is not member.news
        ]
        for states in (TAKES, (FleetState.AWAY,)):
            if candidates := self._with_adapter([each for each in able if each.news.state in states], want):
                return candidates
        return []

    def _with_adapter(self, members: list[FleetReplica], want: VersionWant) -> list[FleetReplica]:
        """Of these the replicas that have the adapter of a request: best those that had the version that it names, or
        else those that serve one, or else any that may be given it. All, if the request is for none that is known."""
        adapter, version = asked_version(want.model)
        shelves = {shelf.news.url: shelf for shelf in self.shelves.values() if shelf.news.adapter == adapter}
        if not any(member.news.url in shelves for member in self.members.values()):
            return members
        able = [(member, shelves[member.news.url]) for member in members if member.news.url in shelves]
        serving = [(member, shelf) for member, shelf in able if shelf.news.serves]
        exact = [(member, shelf) for member, shelf in serving if version in shelf.versions]
        return [member for member, _ in exact or serving or able]

    def why_unplaced(self, want: VersionWant, now: float) -> str:
        """Why no replica can serve: one clause a replica."""
        if not self.members:
            return "no replica is known" if self.heard else "the manager has not told of any replica yet"
        parts = []
        for name, member in sorted(self.members.items()):
            if member.news.state not in (*TAKES, FleetState.AWAY):
                parts.append(f"{name} is {member.news.state.value} ({member.news.reason or 'no reason was told'})")
            elif now < member.shunned_until:
                parts.append(f"{name}: {member.last_failure}")
            elif not self._with_adapter([member], want):
                parts.append(f"{name} has no adapter {asked_version(want.model)[0]}")
            elif not self._fits(member, want):
                identity = member.news.identity
                run = f" of {identity.lineage!r}" if identity is not None and identity.lineage and want.lineage else ""
                parts.append(f"{name} holds {'no version' if identity is None else f'version {identity.version}{run}'}")
        return "; ".join(parts) or "all are taken"

    def all_in(self, names: Set[str], want: VersionWant) -> bool:
        """Whether every replica that speaks the route of a request, and has its adapter, is one of `names`."""
        others = [each for each in self.members.values() if each.name not in names and self._speaks(each, want)]
        return not self._with_adapter(others, want)

    def could_serve(self, now: float) -> bool:
        """Whether any replica takes or keeps requests."""
        return any(
            member.news.url and member.news.state in (*TAKES, FleetState.AWAY) and now >= member.shunned_until
            for member in self.members.values()
        )

    def _speaks(self, member: FleetReplica, want: VersionWant) -> bool:
        return not want.engines or not member.news.engine or member.news.engine in want.engines

    def _fits(self, member: FleetReplica, want: VersionWant) -> bool:
        identity, after = member.news.identity, member.news.next
        if identity is None or (want.lineage and not identity.lineage):
            return want.any_version
        if not self._meets(identity, want):
            return False
        if member.news.state is not FleetState.DRAINING or want.any_version:
            return True
        # Its gate lets nothing in before it holds the next version, which a rollback may make an older one.
        return want.version is None and not (want.min_version and after and after.version < want.min_version)

    def _meets(self, identity: GatewayVersion, want: VersionWant) -> bool:
        if want.lineage and identity.lineage and identity.lineage != want.lineage:
            return False
        if want.version is not None and identity.version != want.version:
            return False
        if want.min_version is not None and identity.version < want.min_version:
            return False
        last = self.latest.get(identity.lineage)
        return want.max_lag is None or last is None or last.version - identity.version <= want.max_lag

    def suits(self, want: VersionWant, admitted: GatewayVersion | None) -> bool:
        """Whether a request accepts the version under which a gate let it in; None: the gate named none."""
        return want.any_version if admitted is None else self._meets(admitted, want)

    def _hopeless(self, want: VersionWant) -> None:
        """Raises RefusedError if no replica will serve the version: it was replaced everywhere, or rolled back."""
        latest = [each for name, each in self.latest.items() if want.lineage in ("", name)]
        if not latest:
            return
        newest = max(each.version for each in latest)
        highest = max(self._highest[each.lineage] for each in latest)
        if want.min_version is not None and newest < want.min_version <= highest:
            detail = f"version {want.min_version} was taken back: the last one is {newest} now"
            raise RefusedError(409, refusals.ROLLED_BACK, detail)
        identities = [member.news.identity for member in self.members.values()]
        if (
            want.version is not None
            and want.version < newest
            and not any(each is not None and each.version == want.version for each in identities)
        ):
            detail = f"no replica holds version {want.version} any more; the last one is {newest}"
            raise RefusedError(409, refusals.VERSION_GONE, detail)


def _root(identity: GatewayVersion) -> str:
    return identity.root


def _place(identity: GatewayVersion) -> tuple[int, str]:
    return identity.version, identity.lineage


def _goes_back(before: GatewayVersion | None, after: GatewayVersion) -> bool:
    """Whether a replica that held `before` goes to an older version, or to another run, when it installs `after`."""
    return before is not None and (_other_run(before, after) or after.version < before.version)


def _other_run(before: GatewayVersion, after: GatewayVersion) -> bool:
    return bool(before.lineage and before.lineage != after.lineage)
