"""Decides which relays bring a version to the hosts of replicas: each from sources of its host, and from other relays.

For each relay that replicas wait for it says which sources that reads, and which relays have what these lack. A relay
that no replica waits for is an origin too if others need what only it reaches. Which relay asks which one for a chunk
is decided by each relay (chunk_order.py); so there are no stages, and all are told at once. Pure; it knows hosts and
transports, but neither boxes nor time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from ckpt_engine.core.problems import CkptEngineError, precondition
from ckpt_engine.core.reach import Distance, same_host
from ckpt_engine.core.relay_remedy import name_of, relay_remedy
from ckpt_engine.core.topology import Choice, choose_transport
from ckpt_engine.core.transports import passing_transport, transport_kinds
from ckpt_engine.v1.weights_pb2 import Host

Name = TypeVar("Name")

Choose = Callable[[Host, str, Host, Sequence[str]], Choice]
"""As in core.plan."""


@dataclass(frozen=True)
class Origin:
    """A source that has the version."""

    name: str
    host: Host
    ways: tuple[frozenset[str], ...]  # the transports of each region, equal sets once; a reader needs one of each set


@dataclass(frozen=True)
class Station:
    """A relay."""

    name: str
    host: Host
    reads: tuple[str, ...]  # the transports with which it reads sources
    lends: bool  # relays of other hosts can ask it for chunks


@dataclass(frozen=True)
class Placement:
    """One relay's part in placing a version."""

    sources: tuple[str, ...] = ()  # within its reach, the nearest first
    origins: tuple[str, ...] = ()  # relays that have what its sources lack; it asks these, and others that want it
    children: tuple[str, ...] = ()  # relays that ask it as an origin: it holds what they need, too
    lacks: tuple[str, ...] = ()  # sources of which it gets nothing, and no other source has the same
    within: tuple[str, ...] = ()  # as an origin it has only these sources' boxes; none: all that it wants


@dataclass(frozen=True)
class Placements:
    """How all relays are filled."""

    by_relay: Mapping[str, Placement]  # of the relays that are filled
    held: Mapping[str, tuple[str, ...]]  # relays that hold it and are asked: by name, `within`
    unreached: Mapping[str, str]  # why others, which replicas wait for, cannot be filled


def placements(
    origins: Sequence[Origin],
    parts: Collection[frozenset[str]],
    relays: Sequence[Station],
    targets: Collection[str],
    holding: Mapping[str, frozenset[str]],
    choose: Choose | None = None,
) -> Placements:
    """Decides for all relays that replicas wait for.

    parts: sets of sources, such that one source of each set together have the version. targets: names of the relays
    that replicas wait for. holding: by relay that holds the version, the sources whose parts it has; such relays are
    asked and not filled.
    """
    return _PlacementSearch(origins, parts, relays, targets, holding, choose).found()


class _PlacementSearch:
    def __init__(
        self,
        origins: Sequence[Origin],
        parts: Collection[frozenset[str]],
        relays: Sequence[Station],
        targets: Collection[str],
        holding: Mapping[str, frozenset[str]],
        choose: Choose | None,
    ) -> None:
        self._sources = {origin.name: origin for origin in origins}
        self._parts = sorted(set(parts), key=sorted)
        self._all = frozenset(range(len(self._parts)))
        self._relays = {relay.name: relay for relay in sorted(relays, key=lambda relay: relay.name)}
        self._targets = sorted(name for name in targets if name in self._relays and name not in holding)
        running = frozenset(relay.host.boot_id for relay in relays)
        self._choose = choose or partial(choose_transport, relays=running)
        self._source_edges: dict[tuple[str, str], Choice | CkptEngineError] = {}
        self._reached = {
            name: [origin for origin in self._sources if origin != name and self._reads(name, origin)]
            for name in self._relays
        }
        # Files that another host may or may not have are no reason to do without a relay that surely has them.
        self._direct = {
            name: self._made_of([origin for origin in found if self._distance(origin, name) < Distance.SHARED_FILE])
            for name, found in self._reached.items()
        }
        self._held = {name: self._made_of(sources) for name, sources in holding.items() if name in self._relays}
        both = ((name, self._held.get(name, frozenset[int]()) | self._direct[name]) for name in self._relays)
        self._has = {name: parts for name, parts in both if parts}  # few relays have any of it

    def found(self) -> Placements:
        chosen: set[str] = set()
        origins: dict[str, list[str]] = {}
        has: dict[str, frozenset[int]] = {}
        load: dict[str, int] = {}
        for name in self._targets:
            origins[name] = self._origins_of(name, chosen, load)
            chosen |= {other for other in origins[name] if other not in self._held}
            for other in origins[name]:
                load[other] = load.get(other, 0) + 1
            has[name] = self._direct[name].union(*(self._has[other] for other in origins[name]))
        unreached = {}
        for name in self._targets:
            if not has[name]:
                has[name] = self._made_of(self._reached[name])
            if not has[name]:
                unreached[name] = self._why_unreached(name)
        filled = {name for name in {*self._targets, *chosen} if name not in unreached}
        children_of: dict[str, list[str]] = {}
        for name in self._targets:
            for other in origins[name]:
                children_of.setdefault(other, []).append(name)
        by_relay = {}
        for name in sorted(filled):
            children = tuple(children_of.get(name, ()))
            lacking = self._all - has[name] if name in has else frozenset[int]()
            by_relay[name] = Placement(
                sources=tuple(sorted(self._reached[name], key=lambda each: (self._distance(each, name), each))),
                origins=tuple(origins.get(name, ())),
                children=children,
                lacks=_once(min(self._parts[part]) for part in sorted(lacking)),
                within=self._within(self._direct[name]) if children else (),
            )
        held = {name: self._within(parts) for name, parts in sorted(self._held.items()) if self._relays[name].lends}
        return Placements(by_relay, held, unreached)

    def _origins_of(self, name: str, chosen: Collection[str], load: Mapping[str, int]) -> list[str]:
        """The relays that a target asks for what its sources lack: all that hold it, and the fewest of those that reach
        it themselves; of equal ones those that are filled anyway, then the near ones with the fewest children."""
        missing = set(self._all - self._direct[name])
        useful = [other for other, parts in self._has.items() if other != name and parts & missing]
        lenders = [other for other in useful if self._asks(name, other)]
        found = [other for other in lenders if self._held.get(other, frozenset()) & missing]
        for other in found:
            missing -= self._held[other]
        able = [other for other in lenders if other not in self._held]
        while missing:
            helpful = [other for other in able if self._direct[other] & missing]
            if not helpful:
                break
            best = min(
                helpful,
                key=lambda other: (
                    other not in chosen and other not in self._targets,  # a copy more
                    -len(self._direct[other] & missing),
                    load.get(other, 0),
                    other,
                ),
            )
            found.append(best)
            missing -= self._direct[best]
        return found

    def _made_of(self, sources: Collection[str]) -> frozenset[int]:
        """The parts that these sources have."""
        return frozenset(number for number, part in enumerate(self._parts) if not part.isdisjoint(sources))

    def _within(self, parts: frozenset[int]) -> tuple[str, ...]:
        """The sources of these parts: those that have no other part, and for a part without such a source all that have
        it. None if these are all parts."""
        if parts == self._all:
            return ()
        others = frozenset[str]().union(*(self._parts[part] for part in self._all - parts))
        found = {source for part in parts for source in self._parts[part]} - others
        return tuple(sorted(found.union(*(each for part in parts if (each := self._parts[part]).isdisjoint(found)))))

    # -- reach

    def _asks(self, relay: str, other: str) -> bool:
        """Whether a relay can ask another one for chunks."""
        return not isinstance(self._ask_edge(relay, other), CkptEngineError)

    def _ask_edge(self, relay: str, other: str) -> Choice | CkptEngineError:
        lender, reader = self._relays[other], self._relays[relay]
        if not lender.lends:
            return precondition(
                f"{other} lends nothing to relays of other hosts: start it with --listen HOST:PORT, and bring all "
                "relays to one version"
            )
        transport = passing_transport()
        try:
            return self._choose(lender.host, transport, reader.host, (transport,))
        except CkptEngineError as error:
            return error

    def _reads(self, relay: str, source: str) -> bool:
        return not isinstance(self._edge(source, relay), CkptEngineError)

    def _distance(self, source: str, relay: str) -> int:
        edge = self._edge(source, relay)
        return 0 if isinstance(edge, CkptEngineError) else edge.distance

    def _edge(self, source: str, relay: str) -> Choice | CkptEngineError:
        """How a relay reads a source: the worst of the best ways into its regions; or why not."""
        key = source, relay
        if key not in self._source_edges:
            origin = self._sources[source]
            self._source_edges[key] = self._worst_way(origin.host, origin.ways, self._relays[relay])
        return self._source_edges[key]

    def _worst_way(self, host: Host, ways: Iterable[frozenset[str]], relay: Station) -> Choice | CkptEngineError:
        reader = as_reader(relay.host, host)
        worst = Choice("", "it has nothing to read")
        for transports in ways:
            found: list[Choice] = []
            failures: list[str] = []
            for transport in sorted(transports, key=_preference):
                if transport not in relay.reads:
                    failures.append(
                        f"{relay.name} cannot read over {transport} (it can over {', '.join(relay.reads) or 'none'}); "
                        f"run `ckpt-engine doctor` on host {name_of(relay.host)} to see why"
                    )
                    continue
                try:
                    found.append(self._choose(host, transport, reader, relay.reads))
                except CkptEngineError as error:
                    failures.append(error.problem.message)
            if failures and not found:
                return precondition("; and ".join(dict.fromkeys(failures)))
            best = min(found, key=lambda choice: choice.distance, default=worst)
            worst = max(worst, best, key=lambda choice: choice.distance)
        return worst

    def _why_unreached(self, name: str) -> str:
        """Why a relay cannot be filled, and what to start where, for people."""
        relay = self._relays[name]
        lenders = [other for other in self._relays if other != name and (self._direct[other] or other in self._held)]
        if lenders:
            edge = self._ask_edge(name, lenders[0])
            problem = edge.problem.message if isinstance(edge, CkptEngineError) else "it has none of it"
            return f"it can ask no relay that can have the version; {lenders[0]}: {problem}"
        if not self._sources.keys() - {name}:
            return "no other source holds the version"
        reasons = _once(
            edge.problem.message
            for origin in self._sources.keys() - {name}
            if isinstance(edge := self._edge(origin, name), CkptEngineError)
        )
        failures = {
            other: edge.problem.message
            for other in sorted(self._relays, key=lambda each: (each != name, each))
            for origin in self._sources.values()
            if same_host(self._relays[other].host, origin.host)
            and isinstance(edge := self._edge(origin.name, other), CkptEngineError)
        }
        if failures:
            other, why = next(iter(failures.items()))
            which = "it" if other == name else f"it reaches none of the sources; {other}"
            return f"{which} runs on the host of the weights and cannot read them: {why}"
        hosts = sorted((origin.host for origin in self._sources.values()), key=name_of)
        running = frozenset(each.host.boot_id for each in self._relays.values())
        return (
            f"it runs on host {name_of(relay.host)} and reaches none of the sources, and no relay does: "
            f"{relay_remedy(hosts, running)}, where the weights are; {reasons[0]}"
        )


def as_reader(relay: Host, source: Host) -> Host:
    """A relay's host as it reads this source: on its own host it uses the GPUs that the weights lie on."""
    if not source.gpus or not same_host(relay, source):
        return relay
    found = Host()
    found.CopyFrom(relay)
    del found.gpus[:]
    found.gpus.extend(source.gpus)
    return found


def _preference(transport: str) -> tuple[int, str]:
    """The sort key of transports: of equally near ways planners and readers take the first."""
    kinds = list(transport_kinds())
    return kinds.index(transport) if transport in kinds else len(kinds), transport


def _once(names: Iterable[Name]) -> tuple[Name, ...]:
    return tuple(dict.fromkeys(names))
