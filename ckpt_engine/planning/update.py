"""Plans one update as the manager would: every edge with its bytes and its transport, relays, and what is impossible.

Everything is decided by the manager's own planner and rules, for tables and needs that are made up from a layout. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple, TypeAlias

from ckpt_engine.core.complete import check_complete
from ckpt_engine.core.plan import PlanRequest, Plans, compile_plans
from ckpt_engine.core.prediction import Memory, PredictedEdge
from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.core.reach import Distance
from ckpt_engine.core.relay_layout import SLOTS, check_memory
from ckpt_engine.core.sizes import human_bytes
from ckpt_engine.core.topology import Choice, choose_transport
from ckpt_engine.core.transports import (
    FILES,
    GPU_MEMORY,
    HOST_MEMORY,
    is_of_gpus,
    lending,
    reading_kinds,
    relay_transport,
)
from ckpt_engine.planning.model import Model
from ckpt_engine.planning.offered import PlannedOffer, planned_offer
from ckpt_engine.planning.places import Cluster, Spot
from ckpt_engine.planning.relays import Relay, Relays, decide, relay_name
from ckpt_engine.planning.splits import Split
from ckpt_engine.v1 import manager_pb2
from ckpt_engine.v1.weights_pb2 import WorkerPlan

Holding: TypeAlias = Literal["gpu", "host", "files"]
"""Where the trainer's weights lie."""

LENT = {"gpu": GPU_MEMORY, "host": HOST_MEMORY, "files": FILES}


@dataclass(frozen=True)
class PlanQuestion:
    """The update to plan."""

    model: Model
    trainer: Split
    replica: Split
    replicas: int
    cluster: Cluster
    holding: Holding  # where the trainer's weights lie
    readers: Memory  # where the workers' weights lie
    relays: bool = True  # whether each host has one
    everything: bool = False  # relays hold the whole model
    prefetch: manager_pb2.Prefetch = manager_pb2.PREFETCH_AUTO
    until: manager_pb2.Until = manager_pb2.UNTIL_INSTALLED
    relay_memory: int | None = None  # bytes of each relay; None: no limit
    host_memory: int | None = None  # bytes of each host; None: no limit
    stage_memory: int | None = 0  # bytes of each worker; None: as much as a version wants

    @property
    def names(self) -> list[str]:
        """The names of the replicas."""
        return [f"replica-{number}" for number in range(self.replicas)]


class Line(NamedTuple):
    """An edge and its reader."""

    edge: PredictedEdge
    choice: Choice  # the transport and why
    replica: str = ""  # empty: a relay reads
    worker: int = 0  # its rank in the replica


@dataclass(frozen=True)
class PlanAnswer:
    """What would happen."""

    question: PlanQuestion
    offered: PlannedOffer | None  # None: the model cannot be split so
    installs: tuple[Line, ...]  # into workers
    fills: tuple[Line, ...]  # into relays, all at once
    relays: Relays
    impossible: tuple[str, ...]  # sentences; the rest of the answer has what is possible nevertheless


def plan_update(question: PlanQuestion) -> PlanAnswer:
    """Plans an update. The answer says what is impossible."""
    trainer, replica, model = question.trainer, question.replica, question.model
    reasons = [*trainer.impossible(model), *replica.impossible(model)]
    if reasons:
        return PlanAnswer(question, None, (), (), Relays({}, {}, {}), tuple(dict.fromkeys(reasons)))
    return _Planning(question).answer()


class _Planning:
    def __init__(self, question: PlanQuestion) -> None:
        self._question = question
        cluster = self._cluster = question.cluster
        kinds = [kind for kind in lending(LENT[question.holding], None) if not kind.collective]
        hosts = [cluster.host(place) for place in cluster.ranks]
        sealed = question.holding == "files"
        transports = [kind.name for kind in kinds]
        self._offered = planned_offer(question.model, question.trainer, question.replica, hosts, transports, sealed)
        self._reads = [name for name in reading_kinds() if question.readers == "gpu" or not is_of_gpus(name)]
        self._workers = {
            (name, worker): place
            for name, places in zip(question.names, cluster.workers, strict=True)
            for worker, place in enumerate(places)
        }
        self._places: dict[str, Spot] = {
            table.id: place for table, place in zip(self._offered.publication.tables, cluster.ranks, strict=True)
        }

    def answer(self) -> PlanAnswer:
        """Makes the whole plan."""
        question, impossible = self._question, list[str]()
        refused: dict[object, CkptEngineError] = {}
        plans = self._compile(refused)
        unfit = self._unfit(refused)
        relays = self._relays(plans) if question.relays else Relays({}, {}, {})
        by_relay = {name for relay in relays.filled.values() for name in relay.replicas}
        installs = []
        for (name, worker), place in self._workers.items():
            if name in by_relay:
                installs.append(self._from_relay(name, worker, place))
            elif name not in unfit:
                installs += self._direct(name, worker, place, plans.workers[name, worker])
        for relay, why in relays.unreached.items():
            impossible.append(f"{relay} cannot be filled: {why}")
        unserved = {unfit[name] for name in question.names if name in unfit and name not in by_relay}
        never = question.relays and question.prefetch == manager_pb2.PREFETCH_NEVER
        note = "; relays are there, and bring nothing, since prefetch is 'never'" if never else ""
        impossible += [] if relays.unreached else [words + note for words in sorted(unserved)]
        impossible += self._too_large(relays)
        fills = self._fills(relays)
        return PlanAnswer(question, self._offered, tuple(installs), fills, relays, tuple(dict.fromkeys(impossible)))

    def _compile(self, refused: dict[object, CkptEngineError]) -> Plans:
        """Compiles, as the manager does, plans for workers that read the trainer without relays.

        refused: receives, by worker, why it cannot."""
        offers = self._offered
        check_complete(offers.publication.manifest, offers.needs, "replica-0")
        requests = [
            PlanRequest(key, offers.needs[key[1]], self._cluster.host(place), self._reads)
            for key, place in self._workers.items()
        ]
        hosts = range(len(self._cluster.hosts)) if self._question.relays else ()
        running = frozenset(self._cluster.relay_host(host).boot_id for host in hosts)
        choose = partial(choose_transport, relays=running)
        return compile_plans(offers.publication, offers.publication.table_digests, requests, choose, refused=refused)

    def _unfit(self, refused: Mapping[object, CkptEngineError]) -> dict[str, str]:
        """Why replicas cannot read the trainer by themselves."""
        found: dict[str, str] = {}
        for key in self._workers:
            if key in refused:
                words = refused[key].problem.message.split(": ", 1)[-1]
                found.setdefault(key[0], f"workers cannot read the trainer's weights: {words}")
        return found

    def _relays(self, plans: Plans) -> Relays:
        question = self._question
        distances: dict[str, int | None] = {}
        hosts: dict[str, list[int]] = {}
        for key, place in self._workers.items():
            own, farthest = plans.distances.get(key), distances.get(key[0], 0)
            distances[key[0]] = None if own is None or farthest is None else max(own, farthest)
            hosts.setdefault(key[0], []).append(place.host)
        return decide(
            self._offered, self._cluster, distances, hosts, question.prefetch, question.until, question.everything
        )

    def _direct(self, name: str, worker: int, place: Spot, plan: WorkerPlan) -> list[Line]:
        """The edges of one worker that reads the trainer itself. A piece of the plan stands for all tensors that are
        split like it, so its bytes are multiplied."""
        offers = self._offered
        sizes = Counter[int]()
        needs = offers.needed_boxes[worker]
        for piece in plan.pieces:
            kind, _ = needs[piece.need]
            volume = 1
            for start, stop in zip(piece.start, piece.stop, strict=True):
                volume *= stop - start
            sizes[piece.source] += volume * offers.weight(kind)
        found = []
        for number, source in enumerate(plan.sources):
            at = self._places[source.source]
            choice = choose_transport(source.host, source.transport, self._cluster.host(place), self._reads)
            found.append(self._line(source.source, at.host, name, worker, place, choice, sizes[number]))
        return found

    def _from_relay(self, name: str, worker: int, place: Spot) -> Line:
        host = self._cluster.relay_host(place.host)
        choice = choose_transport(host, relay_transport(), self._cluster.host(place), self._reads)
        size = self._offered.needed(worker)
        source = relay_name(self._cluster.hosts[place.host])
        return self._line(source, place.host, name, worker, place, choice, size)

    def _line(self, source: str, host: int, name: str, worker: int, place: Spot, choice: Choice, size: int) -> Line:
        hosts, question = self._cluster.hosts, self._question
        edge = PredictedEdge(
            source=source,
            reader=f"{name} worker {worker}",
            transport=choice.transport,
            bytes=size,
            source_host=hosts[host],
            reader_host=hosts[place.host],
            memory=question.readers,
            same_gpu=choice.distance == Distance.SAME_GPU,
        )
        return Line(edge, choice, name, worker)

    def _fills(self, relays: Relays) -> tuple[Line, ...]:
        hosts = self._cluster.hosts
        found = []
        for relay in relays.filled.values():
            for read in relay.reads:
                rank = self._places.get(read.source)
                host = rank.host if rank is not None else relays.filled[read.source].host
                edge = PredictedEdge(
                    read.source, relay.name, read.choice.transport, read.bytes, hosts[host], hosts[relay.host]
                )
                found.append(Line(edge, read.choice))
        return tuple(found)

    def _too_large(self, relays: Relays) -> list[str]:
        """Relays that have no room for two versions."""
        question, found = self._question, list[str]()
        for relay in relays.filled.values():
            found += self._no_room(relay)
        if question.host_memory is not None and question.holding == "host":
            found += self._too_much_published(relays)
        return found

    def _no_room(self, relay: Relay) -> list[str]:
        question, name = self._question, self._cluster.hosts[relay.host]
        memory = SLOTS * relay.slot.size
        if question.relay_memory is not None:
            try:
                check_memory(relay.slot.size, question.relay_memory // SLOTS, "a version")
            except CkptEngineError as error:
                return [f"{relay.name}: {error.problem.message}"]
        if question.host_memory is not None and memory > question.host_memory:
            advice = ", or spread each replica over several (--hosts)"
            if any(place.host == relay.host for place in self._cluster.ranks):
                advice = ", or spread the trainer over more (--trainer): it passes on what ranks there have"
                if relay.replicas:
                    advice = ", or name hosts of the replicas' own (--hosts)"
            return [
                f"{relay.name} keeps two versions, {human_bytes(memory)}, and host {name} has "
                f"{human_bytes(question.host_memory)} (--host-memory): give hosts more{advice}"
            ]
        return []

    def _too_much_published(self, relays: Relays) -> list[str]:
        """Hosts on which a trainer's weights in memory and a relay's do not fit together."""
        question, sizes = self._question, Counter[int]()
        assert question.host_memory is not None
        for rank, place in enumerate(self._cluster.ranks):
            sizes[place.host] += self._offered.held(rank)
        for relay in relays.filled.values():
            sizes[relay.host] += SLOTS * relay.slot.size
        return [
            f"host {self._cluster.hosts[host]}: its trainer ranks' weights and its relay's two versions are "
            f"{human_bytes(size)}, and it has {human_bytes(question.host_memory)} (--host-memory): give hosts more, or "
            "spread the trainer over more ranks and hosts (--trainer, --trainer-hosts)"
            for host, size in sorted(sizes.items())
            if size > question.host_memory
        ]


def traffic(answer: PlanAnswer) -> dict[str, Counter[str]]:
    """Bytes that each host sends, receives, and moves within itself: by host, then "network out", "network in", "same
    GPU" or "TRANSPORT on the host"."""
    found: dict[str, Counter[str]] = {host: Counter() for host in answer.question.cluster.hosts}
    lines: Sequence[Line] = [*answer.installs, *answer.fills]
    for edge, choice, *_ in lines:
        if edge.source_host == edge.reader_host:
            way = "same GPU" if edge.same_gpu else f"{choice.transport} on the host"
            found[edge.reader_host][way] += edge.bytes
        else:
            found[edge.source_host]["network out"] += edge.bytes
            found[edge.reader_host]["network in"] += edge.bytes
    return found
