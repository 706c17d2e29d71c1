"""Predicts the seconds of an update's stages by its bytes and by rates, and compares them with the real ones. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from ckpt_engine.core.prediction import (
    FILL,
    SEAL,
    STAGES,
    Expected,
    Memory,
    PredictedEdge,
    ProcessWork,
    Rates,
    before_the_pause,
    predict,
)
from ckpt_engine.core.transports import GPU_MEMORY, HOST_MEMORY, is_of_gpus, lending, passing_transport
from ckpt_engine.report import stage_seconds
from ckpt_engine.timeline.drawing import draw
from ckpt_engine.timeline.plausible import believable
from ckpt_engine.timeline.tracks import Timeline, TrackSlice
from ckpt_engine.v1 import manager_pb2

PROCESS = "prediction"

_SLICE_NAMES = {
    "plan": ("preparing", "planning"),
    SEAL: ("copy", "digest"),
    FILL: ("read and digest",),
    "ready": ("workers get ready",),
}
"""Names of the slices of a stage, where they are not called like the stage."""


@dataclass(frozen=True)
class Whereabouts:
    """Where workers are, as far as the manager knows."""

    hosts: Mapping[str, str] = field(default_factory=dict)  # of replicas, by name
    gpus: Collection[tuple[str, int]] = frozenset()  # workers with weights on GPUs, by replica and rank

    @classmethod
    def of(cls, status: manager_pb2.GetStatusResponse) -> Whereabouts:
        """The places by the manager's status; replicas may have left since the update."""
        return cls(
            {replica.name: replica.host.name or replica.name for replica in status.replicas},
            {(replica.name, worker.rank) for replica in status.replicas for worker in replica.gpus if worker.gpus},
        )


@dataclass(frozen=True)
class StageComparison:
    """One stage: what it should have taken, and what it took."""

    stage: str
    expected: Expected | None  # None: no rate predicts it
    fact: float | None  # seconds; None: it did not happen, or was not reported


def draw_with_prediction(
    report: manager_pb2.UpdateReport, rates: Rates, places: Whereabouts
) -> tuple[Timeline, list[StageComparison]]:
    """An update that has ended, with what its stages should have taken beside it; and those stages."""
    timeline, stages = draw(report), compare_stages(report, rates, places)
    add_prediction(timeline, stages)
    return timeline, stages


def compare_stages(report: manager_pb2.UpdateReport, rates: Rates, places: Whereabouts) -> list[StageComparison]:
    """The stages with a prediction or a fact, in order. Facts are of the slowest source, relay, replica or worker."""
    report, _ = believable(report)
    model = _model_bytes(report)
    early, installs = before_the_pause(
        [edge for outcome in report.replicas for edge in _edges(outcome, places)],
        {
            _reader(outcome, worker.rank): worker.early_bytes
            for outcome in report.replicas
            for worker in outcome.workers
        },
    )
    expected = predict(
        rates,
        sealed=_sealed(report, model),
        copied=_sealed(report, sum(each.bytes for each in report.copied) or model * bool(report.source_copies)),
        fills=_fills(report),
        early=early,
        installs=installs,
        verified=_verified(report, places),
    )
    facts = _facts(report)
    found = [StageComparison(stage, expected.get(stage), facts.get(stage)) for stage in STAGES]
    return [each for each in found if each.expected is not None or each.fact is not None]


def add_prediction(timeline: Timeline, stages: Sequence[StageComparison]) -> None:
    """Adds two threads for each predicted stage: what it took and what it should have taken, from the same begin."""
    ends = [each.end for each in _wholes(timeline)]
    for each in stages:
        if each.expected is None:
            continue
        begin = _begin_of(timeline, each.stage)
        begin = max(ends, default=0.0) if begin is None else begin
        fact, seconds = each.fact or 0.0, each.expected.seconds
        timeline.track(PROCESS, f"{each.stage}: took").slice(each.stage, begin, begin + fact, {"seconds": fact})
        args = {"seconds": seconds, "because": each.expected.because}
        timeline.track(PROCESS, f"{each.stage}: predicted").slice(each.stage, begin, begin + seconds, args)


def _begin_of(timeline: Timeline, stage: str) -> float | None:
    """The earliest begin of a stage's slices; None: there are none."""
    names = _SLICE_NAMES.get(stage, (stage,))
    begins = [part.begin for whole in _wholes(timeline) for part in whole.parts if part.name in names]
    return min(begins, default=None)


def _wholes(timeline: Timeline) -> list[TrackSlice]:
    return [each for track in timeline.tracks if track.process != PROCESS for each in track.slices]


def _model_bytes(report: manager_pb2.UpdateReport) -> int:
    """Bytes that were sealed. They are not reported; the most that one relay or replica brought is a lower bound."""
    relay_bytes = [relay.filled.bytes for relay in report.relays]
    return max([*relay_bytes, *(outcome.bytes for outcome in report.replicas)], default=0)


def _sealed(report: manager_pb2.UpdateReport, total: int) -> list[ProcessWork]:
    """The sealing work: an even share for each source."""
    sources = report.timeline.sources
    share = total // len(sources) if sources else 0
    return [
        ProcessWork(source.source, share, source.host or source.source, "gpu" if source.gpu else "host")
        for source in sources
    ]


def _fills(report: manager_pb2.UpdateReport) -> list[list[PredictedEdge]]:
    """Edges of relays' fillings, which go on at once. Relays ask other relays over the network, all else is read on
    their host."""
    found = []
    gpus = {source.source for source in report.timeline.sources if source.gpu}
    for relay in report.relays:
        for amount in relay.filled.brought:
            transport_on_host = lending(GPU_MEMORY if amount.source in gpus else HOST_MEMORY, None)[0].name
            transport = passing_transport() if amount.source.startswith("relay ") else transport_on_host
            hosts = (amount.source.removeprefix("relay "), relay.relay.removeprefix("relay "))
            edge = PredictedEdge(amount.source, relay.relay, transport, amount.bytes, *hosts)
            found.append(edge)
    return [found] if found else []


def _reader(outcome: manager_pb2.ReplicaOutcome, rank: int) -> str:
    return f"{outcome.replica}, worker {rank}"


def _edges(outcome: manager_pb2.ReplicaOutcome, places: Whereabouts) -> list[PredictedEdge]:
    host = places.hosts.get(outcome.replica, outcome.replica)
    found = []
    for edge in outcome.edges:
        memory = _memory(outcome, edge.worker_rank, places)
        same = "share GPU" in edge.reason
        reader = _reader(outcome, edge.worker_rank)
        found.append(PredictedEdge(edge.source, reader, edge.transport, edge.bytes, edge.source, host, memory, same))
    return found


def _verified(report: manager_pb2.UpdateReport, places: Whereabouts) -> list[ProcessWork]:
    found = []
    for outcome in report.replicas:
        host = places.hosts.get(outcome.replica, outcome.replica)
        for worker in outcome.workers:
            memory = _memory(outcome, worker.rank, places)
            found.append(ProcessWork(_reader(outcome, worker.rank), worker.bytes, host, memory))
    return found


def _memory(outcome: manager_pb2.ReplicaOutcome, rank: int, places: Whereabouts) -> Memory:
    """Where a worker's weights lie. A transport that reaches only GPUs tells it for a replica that has left."""
    reads = {edge.transport for edge in outcome.edges if edge.worker_rank == rank}
    on_gpu = (outcome.replica, rank) in places.gpus or any(map(is_of_gpus, reads))
    return "gpu" if on_gpu else "host"


def _facts(report: manager_pb2.UpdateReport) -> dict[str, float]:
    """Seconds of the slowest by stage."""
    slowest = stage_seconds(report.stages)
    facts = {stage: seconds for stage, seconds in slowest.items() if stage in STAGES and stage != "plan"}
    phases = report.timeline.phases
    ends = [phase.after for phase in phases[1:]] + [report.seconds]
    spent: dict[str, float] = {}
    for phase, end in zip(phases, ends, strict=False):
        spent[phase.name] = spent.get(phase.name, 0.0) + end - phase.after
    if phases:
        facts["plan"] = spent.get("preparing", 0.0) + spent.get("planning", 0.0)
    sealed = [source.copy_seconds + source.digest_seconds for source in report.timeline.sources]
    if sealed:
        facts[SEAL] = max(sealed)
    if report.relays:
        facts[FILL] = max(relay.filled.fill_seconds for relay in report.relays)
    return facts
