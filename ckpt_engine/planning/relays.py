"""What relays would do in an update: the manager's own rules, applied to planned relays. Pure.

Other modules decide whether a relay is filled (machines/manager/relay_or_collective.py), from what
(core/relay_routes.py), and which relay passes on to which (machines/manager/relay_filling.py). This one counts the
bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

from ckpt_engine.core.manifest import blob_digest, canonical
from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.core.reach import Distance
from ckpt_engine.core.relay_reach import Origin, Station, as_reader
from ckpt_engine.core.relay_routes import RelayRoutes, Route, relay_routes
from ckpt_engine.core.topology import Choice, choose_transport
from ckpt_engine.core.transports import passing_transport, reading_kinds, relay_transport
from ckpt_engine.core.version import Fence
from ckpt_engine.machines.events import Peer
from ckpt_engine.machines.manager.members import Holder
from ckpt_engine.machines.manager.relay_filling import PlannedFilling, SharedFilling, filled_together
from ckpt_engine.machines.manager.relay_or_collective import by_way_of, in_between, prefetch_decision
from ckpt_engine.planning.offered import PlannedOffer
from ckpt_engine.planning.places import Cluster
from ckpt_engine.planning.slots import Slot, bytes_by_source, slot_of
from ckpt_engine.v1 import manager_pb2, weights_pb2


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
    wave: int  # 0: it begins at once
    ahead: bool  # it reads its own sources in the first wave
    reads: tuple[RelayRead, ...]


@dataclass(frozen=True)
class Relays:
    """What all relays would do."""

    filled: Mapping[str, Relay]  # by name
    why: Mapping[str, str]  # for each relay a sentence: why it is filled, or not
    unreached: Mapping[str, str]  # why relays that replicas wait for cannot be filled
    trees: Mapping[str, Sequence[tuple[str, float]]] = field(default_factory=dict)
    """Of relays that are filled together: in each tree the peer that a relay asks, as `_Deciding._trees` returns it,
    and its share of the bytes."""


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
    fillings: dict[str, PlannedFilling] = {}
    for host, name in enumerate(names):
        near = {replica: distances[replica] for replica, hosts in workers.items() if host in hosts}
        decision = prefetch_decision(name, prefetch, until, near)
        why[name] = decision.why
        if decision.replicas:
            fillings[name] = PlannedFilling(name, decision.replicas)
    deciding = _Deciding(offer, cluster, names, fillings, workers, everything)
    return deciding.relays(why)


class _Deciding:
    def __init__(
        self,
        offer: PlannedOffer,
        cluster: Cluster,
        names: Sequence[str],
        fillings: dict[str, PlannedFilling],
        workers: Mapping[str, Sequence[int]],
        everything: bool,
    ) -> None:
        self._offered = offer
        self._cluster = cluster
        self._host = {name: host for host, name in enumerate(names)}
        self._fillings = fillings
        self._workers = workers
        self._everything = everything
        self._tables = {table.id: table for table in offer.publication.tables}
        self._slot = cache(self._slot_of)
        self._choice = cache(self._choice_of)

    def relays(self, why: dict[str, str]) -> Relays:
        """Decides for all relays. why: the reasons so far, which are extended."""
        routes = self._routes()
        for name, route in routes.by_relay.items():
            filling = self._fillings.setdefault(name, PlannedFilling(name, ()))
            filling.route = route
            if not filling.replicas:
                why[name] = in_between(name, route.children, "the trainer")
            elif route.upstream:
                why[name] += "; " + by_way_of(route.upstream, "the trainer", bool(route.sources))
        filled = {name: self._fillings[name] for name in routes.by_relay}
        shared = self._shared_filling(filled)
        for name, words in shared.why.items():
            why[name] += f"; {words}"
        near = {name: self._near(filling) for name, filling in filled.items()}
        trees = {name: self._trees(name, order) for name, order in shared.orders.items()}
        found = {}
        for name, filling in filled.items():
            reads = self._reads(name, filling.route, near, trees.get(name))
            route = filling.route
            slot = self._slot(self._needs(name, route), route.within)
            host = self._host[name]
            found[name] = Relay(name, host, filling.replicas, slot, route.stage, route.ahead, tuple(reads))
        return Relays(found, why, routes.unreached, trees)

    # -- the manager's rules

    def _routes(self) -> RelayRoutes:
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
        transport = passing_transport()
        lends = frozenset({relay_transport(), transport})
        stations = [
            Station(name, self._cluster.relay_host(host), (*reading_kinds(), transport), lends)
            for name, host in self._host.items()
        ]
        targets = [name for name, filling in self._fillings.items() if filling.replicas]
        return relay_routes(origins, parts, stations, targets, {})

    def _shared_filling(self, filled: Mapping[str, PlannedFilling]) -> SharedFilling:
        """Plans relays that are filled together, as if all of a stage got their orders at one time."""
        holders = {name: self._holder(name) for name in filled}
        stages = sorted({filling.route.stage for filling in filled.values()})
        orders: dict[str, manager_pb2.FanOut] = {}
        why: dict[str, str] = {}
        for stage in stages:
            due = [filling for filling in filled.values() if filling.route.stage == stage]
            found = filled_together(due, holders, self._command, Fence())
            orders |= found.orders
            why |= found.why
        return SharedFilling(orders, why)

    def _holder(self, name: str) -> Holder:
        host = self._cluster.relay_host(self._host[name])
        filling = manager_pb2.Filling(
            everything=self._everything, passes_on=weights_pb2.Region(transport=passing_transport())
        )
        return Holder("relay", host.name, "", host, Peer(name), 0.0, (), filling)

    def _command(self, filling: PlannedFilling) -> manager_pb2.FillRelay:
        needs = [self._offered.needs[worker] for worker in self._needs(filling.relay, filling.route)]
        refs = [
            manager_pb2.BlobRef(digest=digest) for digest in sorted({blob_digest(canonical(each)) for each in needs})
        ]
        return manager_pb2.FillRelay(needs=refs, everything=self._everything)

    # -- bytes

    def _needs(self, name: str, route: Route) -> tuple[int, ...]:
        """The workers, by number in a replica, whose needs a relay holds."""
        hosts = {self._host[each] for each in (name, *route.feeds)}
        found = {worker for own in self._workers.values() for worker, host in enumerate(own) if host in hosts}
        return tuple(sorted(found))

    def _slot_of(self, workers: tuple[int, ...], within: tuple[str, ...]) -> Slot:
        return slot_of(self._offered, workers, self._everything, within)

    def _near(self, filling: PlannedFilling) -> tuple[Counter[str], Counter[frozenset[str]]]:
        name, sources = filling.relay, set(filling.route.sources)

        def distance(source: str) -> int | None:
            if source not in sources:
                return None
            found = self._choice(source, name).distance
            # Files that another host may have are read last of all.
            return None if found >= Distance.SHARED_FILE and filling.route.upstream else found

        return bytes_by_source(
            self._offered, self._slot(self._needs(name, filling.route), filling.route.within), distance
        )

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

    def _trees(self, name: str, order: manager_pb2.FanOut) -> list[tuple[str, float]]:
        """In each tree the peer that a relay asks (empty: the version's holders), and its share of the bytes."""
        whole = sum(tree.share for tree in order.trees)
        peers = [order.peers[tree.ask[0]].relay if tree.ask else "" for tree in order.trees]
        return [(peer, tree.share / whole) for peer, tree in zip(peers, order.trees, strict=True)]

    def _reads(
        self,
        name: str,
        route: Route,
        near: Mapping[str, tuple[Counter[str], Counter[frozenset[str]]]],
        trees: Sequence[tuple[str, float]] | None,
    ) -> list[RelayRead]:
        own, far = near[name]
        reads = [RelayRead(source, self._choice(source, name), size) for source, size in own.items()]
        upstream: Counter[str] = Counter()
        for holders, size in far.items():
            has = (each for each in route.upstream if holders & near[each][0].keys())
            lender = next(has, route.upstream[0] if route.upstream else "")
            upstream[lender] += size
        lacking = upstream.pop("", 0)
        total = sum(upstream.values())
        assert not lacking or route.lacks
        found: Counter[str] = Counter()
        remaining = total
        for peer, share in (trees or ())[1:]:
            size = round(total * share)
            remaining -= size
            _deal(found, size, peer, upstream)
        _deal(found, remaining, trees[0][0] if trees else "", upstream)
        return reads + [
            RelayRead(other, self._passing_choice(other, name), size) for other, size in found.items() if size
        ]


def _deal(found: Counter[str], size: int, peer: str, upstream: Mapping[str, int]) -> None:
    """Counts bytes that come from a peer; empty: from the upstream relays, each by its part."""
    if peer:
        found[peer] += size
        return
    total, remaining = sum(upstream.values()), size
    for number, (name, own) in enumerate(sorted(upstream.items())):
        part = remaining if number + 1 == len(upstream) else size * own // max(total, 1)
        found[name] += part
        remaining -= part
