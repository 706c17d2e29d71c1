"""What relays would do in an update: the manager's own rules, applied to planned relays. Pure.

Other modules decide whether a relay is filled (machines/manager/relay_or_collective.py), from what
(core/placements.py), and which relay asks which for a chunk (core/chunk_order.py). This one counts the bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

from ckpt_engine.core.chunk_order import ChunkOrder, ChunkRelay
from ckpt_engine.core.placements import Origin, Placement, Placements, Station, as_reader, placements
from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.core.reach import Distance
from ckpt_engine.core.topology import Choice, choose_transport
from ckpt_engine.core.transports import passing_transport, reading_kinds
from ckpt_engine.machines.manager.relay_or_collective import by_way_of, in_between, prefetch_decision
from ckpt_engine.planning.offered import PlannedOffer
from ckpt_engine.planning.places import Cluster
from ckpt_engine.planning.slots import Slot, bytes_by_source, slot_of
from ckpt_engine.v1 import manager_pb2

SHARES = 64
"""Parts of all bytes, of which the order of relays is asked as if they were chunks."""


@dataclass(frozen=True)
class RelayRead:
    """Bytes that a relay reads from one source."""

    source: str  # a rank's id, or another relay
    choice: Choice
    bytes: int


@dataclass(frozen=True)
class Relay:
    """A relay that is filled."""

    name: str
    host: int
    replicas: tuple[str, ...]  # that install from it
    slot: Slot
    reads: tuple[RelayRead, ...]


@dataclass(frozen=True)
class Relays:
    """What all relays would do."""

    filled: Mapping[str, Relay]  # by name
    why: Mapping[str, str]  # for each relay a sentence: why it is filled, or not
    unreached: Mapping[str, str]  # why relays that replicas wait for cannot be filled
    asks: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """By relay that is filled together with others, the share of its bytes by the relay that it asks (empty: an
    origin)."""


def relay_name(host: str) -> str:
    """The relay's name, as the manager calls it."""
    return f"relay {host}"


def decide(
    offer: PlannedOffer,
    cluster: Cluster,
    distances: Mapping[str, int | None],
    workers: Mapping[str, Sequence[int]],
    prefetch: manager_pb2.Prefetch,
    until: manager_pb2.Until,
    everything: bool,
) -> Relays:
    """Decides which relays are filled, if there is one on each host.

    distances: of each replica, to the farthest source that it reads by itself; None: it does not reach one. workers: by
    replica, the host of each of its workers.
    """
    names = [relay_name(host) for host in cluster.hosts]
    why: dict[str, str] = {}
    replicas: dict[str, tuple[str, ...]] = {}
    for host, name in enumerate(names):
        near = {replica: distances[replica] for replica, hosts in workers.items() if host in hosts}
        decision = prefetch_decision(name, prefetch, until, near)
        why[name] = decision.why
        if decision.replicas:
            replicas[name] = decision.replicas
    deciding = _Deciding(offer, cluster, names, replicas, workers, everything)
    return deciding.relays(why)


class _Deciding:
    def __init__(
        self,
        offer: PlannedOffer,
        cluster: Cluster,
        names: Sequence[str],
        replicas: Mapping[str, tuple[str, ...]],
        workers: Mapping[str, Sequence[int]],
        everything: bool,
    ) -> None:
        self._offered = offer
        self._cluster = cluster
        self._host = {name: host for host, name in enumerate(names)}
        self._replicas = replicas
        self._workers = workers
        self._everything = everything
        self._tables = {table.id: table for table in offer.publication.tables}
        self._slot = cache(self._slot_of)
        self._choice = cache(self._choice_of)

    def relays(self, why: dict[str, str]) -> Relays:
        """Decides for all relays. why: the reasons so far, which are extended."""
        found = self._placements()
        for name, place in found.by_relay.items():
            if name not in self._replicas:
                why[name] = in_between(name, place.children, "the trainer")
            elif place.origins:
                why[name] += "; " + by_way_of(place.origins, "the trainer", bool(place.sources))
        asks = self._asks(found.by_relay)
        for name in asks:
            why[name] += f"; it is filled along with {len(asks) - 1} other{'s' * (len(asks) > 2)}"
        near = {name: self._near(name, place) for name, place in found.by_relay.items()}
        relays = {}
        for name, place in found.by_relay.items():
            slot = self._slot(self._needs(name, place), self._within(name, place))
            reads = self._reads(name, place, near, asks.get(name, {"": 1.0}))
            relays[name] = Relay(name, self._host[name], self._replicas.get(name, ()), slot, tuple(reads))
        return Relays(relays, why, found.unreached, asks)

    # -- the manager's rules

    def _placements(self) -> Placements:
        publication = self._offered.publication
        origins = [
            Origin(
                table.id,
                table.host,
                tuple({frozenset(offer.transport for offer in region.offers): 0 for region in table.regions}),
            )
            for table in publication.tables
            if table.shards
        ]
        sets = {frozenset(holder.source for holder in part.holders) for parts in publication.parts for part in parts}
        parts = frozenset(frozenset(publication.tables[source].id for source in each) for each in sets)
        stations = [
            Station(name, self._cluster.relay_host(host), tuple(reading_kinds()), True)
            for name, host in self._host.items()
        ]
        return placements(origins, parts, stations, self._replicas, {})

    def _asks(self, placed: Mapping[str, Placement]) -> dict[str, dict[str, float]]:
        """Of relays that are filled together, the share of the bytes that each asks of each other. Those that want the
        same are counted as sharing it; what others share with them is not."""
        groups: dict[tuple[int, ...], list[str]] = {}
        for name, place in placed.items():
            if place.origins:
                groups.setdefault(self._needs(name, place), []).append(name)
        found: dict[str, dict[str, float]] = {}
        for names in groups.values():
            if len(names) > 1:
                order = ChunkOrder([1] * SHARES, [range(SHARES)], [ChunkRelay(name, 0) for name in names])
                for name in names:
                    first = Counter(next(iter(order.before(name, share)), "") for share in range(SHARES))
                    found[name] = {other: count / SHARES for other, count in first.items()}
        return found

    # -- bytes

    def _within(self, name: str, place: Placement) -> tuple[str, ...]:
        return () if name in self._replicas else place.within

    def _needs(self, name: str, place: Placement) -> tuple[int, ...]:
        """The workers, by number in a replica, whose needs a relay holds."""
        hosts = {self._host[each] for each in (name, *place.children)}
        found = {worker for own in self._workers.values() for worker, host in enumerate(own) if host in hosts}
        return tuple(sorted(found))

    def _slot_of(self, workers: tuple[int, ...], within: tuple[str, ...]) -> Slot:
        return slot_of(self._offered, workers, self._everything, within)

    def _near(self, name: str, place: Placement) -> tuple[Counter[str], Counter[frozenset[str]]]:
        sources = set(place.sources)

        def distance(source: str) -> int | None:
            if source not in sources:
                return None
            found = self._choice(source, name).distance
            # Files that another host may have are read last of all.
            return None if found >= Distance.SHARED_FILE and place.origins else found

        slot = self._slot(self._needs(name, place), self._within(name, place))
        return bytes_by_source(self._offered, slot, distance)

    def _choice_of(self, source: str, relay: str) -> Choice:
        """The nearest way from a source to a relay."""
        table, host = self._tables[source], self._cluster.relay_host(self._host[relay])
        found = []
        for offer in table.regions[0].offers:
            try:
                found.append(
                    choose_transport(table.host, offer.transport, as_reader(host, table.host), reading_kinds())
                )
            except CkptEngineError:
                continue  # another way leads there, or this would not be among the relay's sources
        best = min(found, key=lambda choice: choice.distance)
        return best._replace(reason="the relay copies from the GPUs of its host") if table.host.gpus else best

    def _passing_choice(self, upstream: str, relay: str) -> Choice:
        source, reader = (self._cluster.relay_host(self._host[each]) for each in (upstream, relay))
        transport = passing_transport()
        return choose_transport(source, transport, reader, [transport])

    def _reads(
        self,
        name: str,
        place: Placement,
        near: Mapping[str, tuple[Counter[str], Counter[frozenset[str]]]],
        asks: Mapping[str, float],
    ) -> list[RelayRead]:
        own, far = near[name]
        reads = [RelayRead(source, self._choice(source, name), size) for source, size in own.items()]
        origins: Counter[str] = Counter()
        for holders, size in far.items():
            has = (each for each in place.origins if holders & near[each][0].keys())
            origins[next(has, place.origins[0] if place.origins else "")] += size
        lacking = origins.pop("", 0)
        assert not lacking or place.lacks
        total = sum(origins.values())
        found = Counter({other: round(total * share) for other, share in asks.items() if other})
        remaining = total - found.total()
        for number, (origin, size) in enumerate(sorted(origins.items())):
            part = remaining if number + 1 == len(origins) else (total - found.total()) * size // max(total, 1)
            part = min(part, remaining)
            found[origin] += part
            remaining -= part
        return reads + [
            RelayRead(other, self._passing_choice(other, name), size) for other, size in found.items() if size
        ]
