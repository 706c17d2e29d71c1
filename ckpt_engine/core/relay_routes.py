"""Decides from where each relay is filled: from the publication's own sources where it reaches them, else from relays.

For each relay that replicas wait for it decides what that reads, and its stage: it is filled once the relays that it
reads hold the version. A relay that no replica waits for is filled too if it is a step in between. Pure; it knows
hosts and transports, but neither boxes nor time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.core.reach import Distance, same_host
from ckpt_engine.core.relay_reach import Choose, Origin, RelayReach, Station
from ckpt_engine.core.relay_remedy import name_of, relay_remedy

Name = TypeVar("Name")


@dataclass(frozen=True)
class Route:
    """How one relay is filled."""

    stage: int  # 0: from sources only; else one more than the last stage of the relays that it reads
    sources: tuple[str, ...]  # within its reach
    upstream: tuple[str, ...] = ()  # relays that it waits for, and reads
    others: tuple[str, ...] = ()  # relays of earlier stages that it can read as well, nearest and least loaded first
    children: tuple[str, ...] = ()  # relays that read it
    feeds: tuple[str, ...] = ()  # relays whose needs it must hold besides those of its own host
    lacks: tuple[str, ...] = ()  # sources of which it gets nothing, and no other source has the same
    ahead: bool = False  # it brings first what its own sources have, since others wait for that
    early: tuple[str, ...] = ()  # those of its upstream that it reads once they have brought that much
    transports: tuple[str, ...] = ()  # by which it reads its upstream; none if it reads a part from sources
    within: tuple[str, ...] = ()  # it holds only these sources' boxes: a step in between that cannot get all


@dataclass(frozen=True)
class RelayRoutes:
    """How all relays are filled."""

    by_relay: Mapping[str, Route]  # of the relays that are filled
    unreached: Mapping[str, str]  # why others, which replicas wait for, cannot be filled


def relay_routes(
    origins: Sequence[Origin],
    parts: Collection[frozenset[str]],
    relays: Sequence[Station],
    targets: Collection[str],
    holding: Mapping[str, frozenset[str]],
    choose: Choose | None = None,
) -> RelayRoutes:
    """Finds routes for all relays that replicas wait for.

    parts: sets of sources, such that one source of each set together have the version. targets: names of the relays
    that replicas wait for. holding: by relay that holds the version, the sources whose parts it has; such relays are
    read and not filled.
    """
    return _Routing(origins, parts, relays, targets, holding, choose).routes()


@dataclass
class _Chosen:
    """What was chosen so far for a relay that is filled."""

    upstream: list[str] = field(default_factory=list)
    others: list[str] = field(default_factory=list)
    children: list[str] = field(default_factory=list)
    early: list[str] = field(default_factory=list)
    ahead: bool = False


class _Routing:
    def __init__(
        self,
        origins: Sequence[Origin],
        parts: Collection[frozenset[str]],
        relays: Sequence[Station],
        targets: Collection[str],
        holding: Mapping[str, frozenset[str]],
        choose: Choose | None,
    ) -> None:
        self._origins = {origin.name: origin for origin in origins}
        self._parts = sorted(set(parts), key=sorted)
        self._all = frozenset(range(len(self._parts)))
        self._relays = {relay.name: relay for relay in sorted(relays, key=lambda relay: relay.name)}
        self._targets = {name for name in targets if name in self._relays and name not in holding}
        self._holding = holding
        self._reach = RelayReach(self._origins, self._relays, choose)
        self._sources = {
            name: [origin for origin in self._origins if origin != name and self._reach.reads(name, origin)]
            for name in self._relays
        }
        # Files that another host may or may not have are no reason to do without a relay that surely has them.
        self._direct = {
            name: self._made_of(
                [origin for origin in found if self._reach.distance(origin, name) < Distance.SHARED_FILE]
            )
            for name, found in self._sources.items()
        }
        # What each relay has once it is filled, and its stage.
        self._has = {name: self._made_of(sources) for name, sources in holding.items() if name in self._relays}
        self._stage = dict.fromkeys(self._has, -1)
        self._ahead: dict[str, int] = {}  # the stage at which targets have what their own sources bring

    def routes(self) -> RelayRoutes:
        self._order()
        chosen = self._choose_upstream()
        self._choose_others(chosen)
        unreached = {name: self._why_unreached(name) for name in sorted(self._targets - self._stage.keys())}
        return RelayRoutes({name: self._route(name, chosen) for name in sorted(chosen)}, unreached)

    # -- stages

    def _order(self) -> None:
        """Finds the stage of each relay, as if all were filled."""
        pending = [name for name in self._relays if name not in self._stage]
        stage = 0
        while pending and not self._targets <= self._stage.keys():
            reachable = {name: self._within_reach(name) for name in pending}
            ready = self._ready(reachable)
            if not ready:
                if not self._trust(pending):
                    return
                continue
            ahead = [
                name for name in ready if name in self._targets and reachable[name] != self._all and self._direct[name]
            ]
            ahead = [name for name in ahead if name not in self._ahead]
            if ahead:
                self._ahead |= dict.fromkeys(ahead, stage)
                stage += 1
                continue
            for name in ready:
                self._has[name], self._stage[name] = reachable[name], stage
            pending = [name for name in pending if name not in self._stage]
            stage += 1

    def _ready(self, reachable: Mapping[str, frozenset[int]]) -> list[str]:
        """The relays that can be filled now. Those that get all of the version go first; then steps in between that get
        a part, so that others may get the rest. A target waits for the rest as long as more may come."""
        reached = [name for name, parts in reachable.items() if parts]
        for ready in (
            [name for name in reached if reachable[name] == self._all],
            [name for name in reached if name not in self._targets and self._direct[name]],
            [name for name in reached if name in self._targets],
        ):
            if ready:
                return ready
        return reached

    def _trust(self, names: Iterable[str]) -> bool:
        """Counts the files that may lie in a directory of these relays' hosts; true if that is more."""
        before = dict(self._direct)
        self._direct |= {name: self._made_of(self._sources[name]) for name in names}
        return self._direct != before

    def _within_reach(self, name: str) -> frozenset[int]:
        parts = [self._has[other] for other in self._has if other != name and self._reach.reads(name, other)]
        parts += [self._direct[other] for other in self._ahead if other != name and self._reach.reads(name, other)]
        return self._direct[name].union(*parts)

    # -- which relay reads which

    def _choose_upstream(self) -> dict[str, _Chosen]:
        """Chooses from the last stage to the first, so that a step in between is filled only if another relay reads
        it."""
        chosen = {name: _Chosen() for name in self._relays if name in self._targets and name in self._stage}
        load: dict[str, int] = {}
        done: set[str] = set()
        while pending := [name for name in chosen if name not in done]:
            last = max(self._stage[name] for name in pending)
            for name in [name for name in pending if self._stage[name] == last]:
                done.add(name)
                for other in self._upstream_of(name, chosen, load):
                    load[other] = load.get(other, 0) + 1
                    chosen[name].upstream.append(other)
                    if self._is_early(other, name):
                        chosen[name].early.append(other)
                        chosen.setdefault(other, _Chosen()).ahead = True
                    if other not in self._holding:
                        chosen.setdefault(other, _Chosen()).children.append(name)
        self._load = load
        return chosen

    def _upstream_of(self, name: str, chosen: Mapping[str, _Chosen], load: Mapping[str, int]) -> list[str]:
        """The fewest relays that have what its sources do not bring; of equal ones, those with the fewest children."""
        missing = set(self._has[name] - self._direct[name])
        early = [other for other in self._ahead if self._is_early(other, name)]
        lenders = [other for other in (*self._before(name), *early) if self._reach.reads(name, other)]
        parts = {other: self._direct[other] if other in early else self._has[other] for other in lenders}
        found = []
        while missing:
            best = min(
                (other for other in lenders if parts[other] & missing),
                key=lambda other: (
                    other not in chosen and other not in self._holding,  # a copy more
                    -len(parts[other] & missing),
                    self._reach.distance(other, name),
                    self._stage.get(other, len(self._relays)),
                    load.get(other, 0),
                    other,
                ),
            )
            found.append(best)
            missing -= parts[best]
        return found

    def _is_early(self, name: str, reader: str) -> bool:
        """Whether a relay is read before it has all that it will have."""
        ahead = self._ahead.get(name)
        filled_later = name not in self._stage or self._stage[name] >= self._stage[reader]
        return name != reader and ahead is not None and ahead < self._stage[reader] and filled_later

    def _choose_others(self, chosen: Mapping[str, _Chosen]) -> None:
        for name, each in chosen.items():
            if not each.upstream:
                continue
            lenders = (
                other
                for other in self._before(name)
                if (other in chosen or other in self._holding)
                and other not in each.upstream
                and self._has[other] - self._direct[name]
                and self._reach.reads(name, other)
            )
            each.others = sorted(
                lenders, key=lambda other: (self._reach.distance(other, name), self._load.get(other, 0), other)
            )

    def _before(self, name: str) -> list[str]:
        return [other for other, stage in self._stage.items() if stage < self._stage[name] and other != name]

    def _route(self, name: str, chosen: Mapping[str, _Chosen]) -> Route:
        each = chosen[name]
        stages = [0 if other in each.early else self._stage_of(other, chosen) for other in each.upstream]
        lacking = [self._parts[part] for part in sorted(self._all - self._has[name])]
        return Route(
            stage=max(stages, default=-1) + 1,
            sources=tuple(sorted(self._sources[name], key=lambda origin: (self._reach.distance(origin, name), origin))),
            upstream=tuple(each.upstream),
            others=tuple(each.others),
            children=tuple(sorted(each.children)),
            feeds=tuple(sorted(self._readers_of(name, chosen, {name}) - {name})),
            ahead=each.ahead,
            early=tuple(each.early),
            transports=self._transports(name, each.upstream),
            lacks=_once(min(part) for part in lacking),
            within=() if name in self._targets or not lacking else self._origins_within(self._has[name]),
        )

    def _stage_of(self, name: str, chosen: Mapping[str, _Chosen]) -> int:
        if name in self._holding:
            return 0
        each = chosen[name]
        stages = (0 if other in each.early else self._stage_of(other, chosen) for other in each.upstream)
        return max(stages, default=-1) + 1

    def _readers_of(self, name: str, chosen: Mapping[str, _Chosen], found: set[str]) -> set[str]:
        """The relays whose needs a relay must hold. A step in between holds the needs of all relays that can read it,
        since one of them may lose its upstream."""
        for other, each in chosen.items():
            reads = name in each.upstream or (name not in self._targets and name in each.others)
            if reads and other not in found:
                found.add(other)
                self._readers_of(other, chosen, found)
        return found

    # -- reach

    def _made_of(self, sources: Collection[str]) -> frozenset[int]:
        """The parts that these sources have."""
        return frozenset(number for number, part in enumerate(self._parts) if not part.isdisjoint(sources))

    def _origins_within(self, parts: frozenset[int]) -> tuple[str, ...]:
        """The sources of these parts: those that have no other part, and for a part without such a source all that have
        it."""
        others = frozenset[str]().union(*(self._parts[part] for part in self._all - parts))
        found = {source for part in parts for source in self._parts[part]} - others
        return tuple(sorted(found.union(*(each for part in parts if (each := self._parts[part]).isdisjoint(found)))))

    def _transports(self, name: str, upstream: Sequence[str]) -> tuple[str, ...]:
        if self._direct[name]:
            return ()
        edges = (self._reach.edge(other, name) for other in upstream)
        return tuple(sorted({edge.transport for edge in edges if not isinstance(edge, CkptEngineError)}))

    def _why_unreached(self, name: str) -> str:
        """Why a relay cannot be filled, and what to start where, for people."""
        relay = self._relays[name]
        hosts = sorted((origin.host for origin in self._origins.values()), key=name_of)
        lenders = [other for other in self._relays if other != name and (self._direct[other] or other in self._holding)]
        if lenders:
            edge = self._reach.edge(lenders[0], name)
            problem = edge.problem.message if isinstance(edge, CkptEngineError) else "it has none of it"
            return f"it reads no relay that can have the version; {lenders[0]}: {problem}"
        if not self._origins.keys() - {name}:
            return "no other source holds the version"
        reasons = _once(
            edge.problem.message
            for origin in self._origins.keys() - {name}
            if isinstance(edge := self._reach.edge(origin, name), CkptEngineError)
        )
        failures = {
            other: edge.problem.message
            for other in sorted(self._relays, key=lambda each: (each != name, each))
            for origin in self._origins.values()
            if same_host(self._relays[other].host, origin.host)
            and isinstance(edge := self._reach.edge(origin.name, other), CkptEngineError)
        }
        if failures:
            other, why = next(iter(failures.items()))
            which = "it" if other == name else f"it reaches none of the sources; {other}"
            return f"{which} runs on the host of the weights and cannot read them: {why}"
        running = frozenset(each.host.boot_id for each in self._relays.values())
        return (
            f"it runs on host {name_of(relay.host)} and reaches none of the sources, and no relay does: "
            f"{relay_remedy(hosts, running)}, where the weights are; {reasons[0]}"
        )


def _once(names: Iterable[Name]) -> tuple[Name, ...]:
    return tuple(dict.fromkeys(names))
