"""The replicas as a gateway knows them: what the manager tells, and what their answers show. Pure; the time goes in.

What the manager told last stays true while it is away. Beside it stands what this gateway saw by itself: a replica that
refused or did not answer is left alone for a moment that grows, however well it is spoken of.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from types import MappingProxyType

from ckpt_engine.gateway import refusals
from ckpt_engine.gateway.refusals import RefusedError
from ckpt_engine.gateway.versions import KEPT, RECOMPUTED, UNKNOWN, GatewayVersion, Span

HISTORY = 64
"""Versions of a replica whose numbers are remembered."""

SHUN_SECONDS, MOST_SHUN_SECONDS = 0.25, 4.0
"""How long a replica that failed is left alone: twice as long with each failure in a row."""


class FleetState(Enum):
    SERVING = "serving"
    DRAINING = "draining"
    ASLEEP = "asleep"
    CLOSED = "closed"
    AWAY = "away"


TAKES = (FleetState.SERVING, FleetState.DRAINING)
"""The states in which requests are sent to a replica. While it drains, its gate holds them until weights are whole."""

ENDS = ("abort", "wait")
"""Pause modes in which a request that has a token ends before its replica takes another version."""


@dataclass(frozen=True)
class ReplicaNews:
    """The state of a replica, from the manager or a probe."""

    name: str
    url: str  # empty: unknown
    engine: str  # its kind
    state: FleetState
    reason: str = ""  # of the state
    identity: GatewayVersion | None = None  # the version that it serves
    next: GatewayVersion | None = None  # the version that a running update brings
    mode: str = ""  # the pause mode of a running update, as the protocol names it; empty: none runs
    mislabels: bool = False  # its engine may attribute tokens to a wrong version


NONE: Mapping[str, ReplicaNews] = MappingProxyType({})


class Visit:
    """One request of this process inside a replica, and the versions that the replica can have held meanwhile."""

    def __init__(self, member: FleetReplica, resumed: bool = False) -> None:
        """resumed: it continues another leg, so a long prompt is computed before its first token."""
        self._member, self._prefills = member, resumed
        self._begun = False  # whether a token has come
        self._admitted: GatewayVersion | None = None  # that the gate named when it let the request in
        self._taken: set[GatewayVersion] = set()  # to which the replica was, or is about to be, rolled back
        # All others that were reported for the replica. One that is older than `_admitted`, or of the run before, is
        # outdated news.
        self._named: set[GatewayVersion] = set()
        member.visits.add(self)
        member.prefills += resumed
        self.hear(member.told, None)

    def begin(self) -> None:
        """Notes that the first token has come."""
        self._begun = True
        self._member.prefills -= self._prefills
        self._prefills = False

    def end(self) -> None:
        """Ends the visit: `held` does not change from now on."""
        self.begin()
        self._member.visits.discard(self)

    def let_in(self, admitted: GatewayVersion | None) -> None:
        """Notes under which version the gate let it in; None: it named none."""
        self._admitted = admitted

    def hear(self, told: ReplicaNews, before: GatewayVersion | None) -> None:
        """Takes new state of the replica. before: the version in its former state."""
        stays = self._begun and told.mode in ENDS
        for each in (told.identity, None if stays else told.next):
            if each is not None:
                lower = _goes_back(before, each) or _goes_back(told.identity, each)
                (self._taken if lower else self._named).add(each)

    def see(self, served: GatewayVersion | None) -> None:
        """Notes the version that the replica itself reports as served."""
        if served is not None:
            self._taken.add(self._member.whole(served))

    def held(self) -> tuple[GatewayVersion | None, GatewayVersion | None]:
        """The lowest and the highest version that the replica can have held during the visit; None: unknown."""
        first = self._admitted
        known = self._taken | {each for each in self._named if first is None or not _goes_back(first, each)}
        if first is not None:
            known.add(first)
        rooted = sorted(known, key=_root, reverse=True)  # of two words for one version the one that says more
        return min(rooted, key=_place, default=None), max(rooted, key=_place, default=None)


@dataclass
class FleetReplica:
    """What one gateway process knows of one replica."""

    told: ReplicaNews  # the latest
    history: OrderedDict[int, GatewayVersion] = field(default_factory=OrderedDict)  # its latest versions, by number
    visits: set[Visit] = field(default_factory=set)  # requests of this process inside it
    reported: int = 0  # all requests inside it, when it last reported them
    own_then: int = 0  # requests of this process inside it, at the same time
    prefills: int = 0  # requests of this process that were resumed there and have no token yet
    failures: int = 0  # in succession
    shunned_until: float = 0.0  # monotonic seconds; no request goes there before
    seen: str = ""  # why it is shunned
    modes: dict[int, str] = field(default_factory=dict)  # the pause mode of its latest updates, by version number
    life: int = 0  # how often its engine was seen dead
    down: bool = False  # its engine was seen dead and has not answered since

    @property
    def name(self) -> str:
        return self.told.name

    @property
    def own(self) -> int:
        """Requests of this process inside it."""
        return len(self.visits)

    @property
    def load(self) -> int:
        """Requests inside it, those of other processes included."""
        return max(self.own, self.reported + self.own - self.own_then)

    def died(self) -> None:
        """Notes that nothing accepts connections there, so what answers next is another engine."""
        self.life += not self.down
        self.down = True

    def answers(self) -> None:
        """Notes that connections are accepted there."""
        self.down = False

    def identify(self, said: GatewayVersion) -> GatewayVersion:
        """Completes the version in a label of its engine. For a bare number, the last version with it that was seen
        there."""
        known = self.history.get(said.version)
        same = known is not None and said.lineage in ("", known.lineage) and known.root.startswith(said.root)
        return known if same and known is not None else said

    def whole(self, named: GatewayVersion) -> GatewayVersion:
        """Completes the version that its gate names, as far as it is known."""
        known = self.history.get(named.version)
        return named if known is None or (named.root and known.root and known.root != named.root) else known

    def tell(self, told: ReplicaNews) -> None:
        """Takes its new state."""
        before, self.told = self.told.identity, told
        for visit in self.visits:
            visit.hear(told, before)

    def caches(self, number: int) -> str:
        """What became of the caches of running requests when it took the version with this number."""
        return {"in_place": KEPT, "keep": RECOMPUTED, "unspecified": RECOMPUTED}.get(
            self.modes.get(number, ""), UNKNOWN
        )


@dataclass(frozen=True)
class VersionWant:
    """Which replicas a request may go to."""

    engines: frozenset[str] = frozenset()  # kinds of engines that speak its dialect
    lineage: str = ""  # empty: any
    version: int | None = None  # exactly this one
    min_version: int | None = None  # this one or a later one
    max_lag: int | None = None  # by how many versions it may be older than the lineage's last

    @property
    def any_version(self) -> bool:
        """Whether any version will do."""
        return self.version is None and self.min_version is None and self.max_lag is None

    def against(self, span: Span) -> RefusedError | None:
        """Why tokens of this span do not have the wanted version; None: they do.

        A span that is not exact is refused if it can have tokens of another version than `version`, or of an older
        one than `min_version`."""
        said = f"the replica {'went' if span.exact else 'may have gone'} over to"
        low, high = span.lowest, span.highest
        runs = {each.lineage for each in (low, high) if each} - {"", self.lineage}
        if self.lineage and runs:
            return RefusedError(409, refusals.LINEAGE_CHANGED, f"{said} another run ({', '.join(sorted(runs))})")
        if self.version is not None and not (low and high and low.version == self.version == high.version):
            other = next((each.version for each in (high, low) if each and each.version != self.version), "none")
            asked = f"version {other}, and version {self.version} was asked for"
            return RefusedError(409, refusals.VERSION_CHANGED, f"{said} {asked}")
        if self.min_version is not None and (low is None or low.version < self.min_version):
            asked = f"version {low.version if low else 'none'}, and {self.min_version} or a later one was asked for"
            return RefusedError(409, refusals.ROLLED_BACK, f"{said} {asked}")
        return None


class Fleet:
    """All replicas that a gateway knows.

    members: by name. latest: the last version of each lineage, as told. heard: whether anybody has told anything.
    """

    def __init__(self) -> None:
        self.members: dict[str, FleetReplica] = {}
        self.latest: dict[str, GatewayVersion] = {}
        self.heard = False
        self._highest: dict[str, int] = {}

    # -- what is told

    def tell(self, told: Iterable[ReplicaNews], gone: Iterable[str] = (), whole: bool = False) -> None:
        """Takes in what is told of replicas. whole: whoever is not named is gone."""
        told = list(told)
        self.heard = True
        for each in told:
            member = self.members.get(each.name)
            if member is None:
                member = self.members[each.name] = FleetReplica(each)
            elif (each.url, each.state) != (member.told.url, member.told.state) and each.state in TAKES:
                member.failures, member.shunned_until = 0, 0.0
            member.tell(each)
            if each.next is not None and each.mode:
                member.modes[each.next.version] = each.mode
                while len(member.modes) > HISTORY:
                    del member.modes[next(iter(member.modes))]
            self._remember(member, each.identity)
            self._remember(member, each.next)
        for name in [*gone, *(set(self.members) - {each.name for each in told} if whole else ())]:
            member = self.members.get(name)
            if member is not None and member.own == 0:
                del self.members[name]
            elif member is not None:
                member.told = replace(member.told, state=FleetState.CLOSED, reason="it was taken out")

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

    # -- what is seen

    def failed(self, member: FleetReplica, now: float, why: str, wait: float = 0.0) -> None:
        """Notes that a replica did not answer, or refused. wait: seconds that it named."""
        member.failures += 1
        most = min(MOST_SHUN_SECONDS, SHUN_SECONDS * 2 ** min(member.failures - 1, 8))
        member.shunned_until = now + max(most, min(wait, MOST_SHUN_SECONDS))
        member.seen = why

    def answered(self, member: FleetReplica, admitted: GatewayVersion | None) -> GatewayVersion | None:
        """Notes that a replica let a request in. Returns the version under which it did, with the lineage if that is
        known."""
        member.failures, member.shunned_until, member.seen = 0, 0.0, ""
        member.answers()
        if admitted is None:
            return None
        known = member.whole(admitted)
        if known is admitted:
            self._remember(member, admitted)
        return known

    # -- who may

    def candidates(
        self, want: VersionWant, now: float, unsuited: Mapping[str, ReplicaNews] = NONE
    ) -> list[FleetReplica]:
        """Who may be asked now, of the best kind that there is. unsuited: replicas whose gates let the request in under
        a version that it does not want, with what was told of them then. Raises RefusedError where waiting cannot
        help."""
        able = [member for member in self.members.values() if member.told.url and self._speaks(member, want)]
        if self.heard and self.members and not any(self._speaks(member, want) for member in self.members.values()):
            kinds = ", ".join(sorted({member.told.engine for member in self.members.values()}))
            raise RefusedError(501, refusals.NO_DIALECT, f"no replica speaks this route: there are engines of {kinds}")
        self._hopeless(want)
        able = [
            member
            for member in able
            if now >= member.shunned_until and self._fits(member, want) and unsuited.get(member.name) is not member.told
        ]
        for states in (TAKES, (FleetState.AWAY,)):
            found = [member for member in able if member.told.state in states]
            if found:
                return found
        return []

    def why_nobody(self, want: VersionWant, now: float) -> str:
        """Why nobody can serve: in words, one part a replica."""
        if not self.members:
            return "no replica is known" if self.heard else "the manager has not told of any replica yet"
        parts = []
        for name, member in sorted(self.members.items()):
            if member.told.state not in (*TAKES, FleetState.AWAY):
                parts.append(f"{name} is {member.told.state.value} ({member.told.reason or 'no reason was told'})")
            elif now < member.shunned_until:
                parts.append(f"{name}: {member.seen}")
            elif not self._fits(member, want):
                held = member.told.identity
                run = f" of {held.lineage!r}" if held is not None and held.lineage and want.lineage else ""
                parts.append(f"{name} holds {'no version' if held is None else f'version {held.version}{run}'}")
        return "; ".join(parts) or "all are taken"

    def could_serve(self, now: float) -> bool:
        """Whether anybody takes or keeps requests."""
        return any(
            member.told.url and member.told.state in (*TAKES, FleetState.AWAY) and now >= member.shunned_until
            for member in self.members.values()
        )

    def _speaks(self, member: FleetReplica, want: VersionWant) -> bool:
        return not want.engines or not member.told.engine or member.told.engine in want.engines

    def _fits(self, member: FleetReplica, want: VersionWant) -> bool:
        held, after = member.told.identity, member.told.next
        if held is None or (want.lineage and not held.lineage):
            return want.any_version
        if not self._meets(held, want):
            return False
        if member.told.state is not FleetState.DRAINING or want.any_version:
            return True
        # Its gate lets nothing in before it holds the next version, and a rollback may make that an older one.
        return want.version is None and not (want.min_version and after and after.version < want.min_version)

    def _meets(self, held: GatewayVersion, want: VersionWant) -> bool:
        if want.lineage and held.lineage and held.lineage != want.lineage:
            return False
        if want.version is not None and held.version != want.version:
            return False
        if want.min_version is not None and held.version < want.min_version:
            return False
        last = self.latest.get(held.lineage)
        return want.max_lag is None or last is None or last.version - held.version <= want.max_lag

    def suits(self, want: VersionWant, admitted: GatewayVersion | None) -> bool:
        """Whether a request may go on that a gate let in under this version; None: it named none."""
        return want.any_version if admitted is None else self._meets(admitted, want)

    def _hopeless(self, want: VersionWant) -> None:
        """A version that is not waited for: it is over, or was taken back."""
        latest = [each for name, each in self.latest.items() if want.lineage in ("", name)]
        if not latest:
            return
        newest = max(each.version for each in latest)
        highest = max(self._highest[each.lineage] for each in latest)
        if want.min_version is not None and newest < want.min_version <= highest:
            said = f"version {want.min_version} was taken back: the last one is {newest} now"
            raise RefusedError(409, refusals.ROLLED_BACK, said)
        held = [member.told.identity for member in self.members.values()]
        if (
            want.version is not None
            and want.version < newest
            and not any(each is not None and each.version == want.version for each in held)
        ):
            said = f"no replica holds version {want.version} any more; the last one is {newest}"
            raise RefusedError(409, refusals.VERSION_GONE, said)


def _root(identity: GatewayVersion) -> str:
    return identity.root


def _place(identity: GatewayVersion) -> tuple[int, str]:
    return identity.version, identity.lineage


def _goes_back(before: GatewayVersion | None, after: GatewayVersion) -> bool:
    """Whether a replica that held `before` goes back, or over to another run, when it takes `after`."""
    if before is None:
        return False
    return bool(before.lineage and before.lineage != after.lineage) or after.version < before.version
