"""How long a planned update would take: its bytes over measured rates (core/prediction.py). Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ckpt_engine.core.prediction import (
    FILL,
    SEAL,
    Expected,
    Memory,
    ProcessWork,
    Rates,
    before_the_pause,
    measured,
    pause,
    predict,
)
from ckpt_engine.core.transports import transport_kinds
from ckpt_engine.engine.kinds import engine_kind
from ckpt_engine.planning.update import PlanAnswer

SOURCE = "H200 and two processors of an EPYC, docs/performance.md"


CONTROL, CONTROL_REPLICA = 0.009, 0.0036
"""Seconds of an update without weights, and more for each replica (benchmarks/results/control_plane.json)."""


@dataclass(frozen=True)
class Forecast:
    """Predicted seconds of a planned update, for any update but the first."""

    stages: Mapping[str, Expected]  # in their order; none if no worker is reached
    pause: float | None  # of the slowest replica; None: it cannot be predicted
    call: float | None  # from the last rank's call to its return; None: it cannot be predicted
    unknown: tuple[str, ...] = ()  # transports of unknown rate, because of which pause and call are None
    unmeasured: str = ""  # an engine of which only bytes can be predicted, because of which pause and call are None


def rates_of(content: object | None, engine: str, network: float | None, replicas: int) -> Rates:
    """The measured rates, changed by those of a file. content: the file's JSON; None: there is none. network: bytes a
    second of each host's network card; None: unknown."""
    seconds, own = {"plan": CONTROL + CONTROL_REPLICA * replicas}, engine_kind(engine).seconds
    if own is not None:
        seconds |= {"quiesce": own.quiesce, "resume": own.resume}
    rates = replace(measured(), seconds=seconds)
    if network is not None:
        cards = {name: {"host": network} for name, kind in transport_kinds().items() if kind.over_network}
        rates = replace(rates, links={**rates.links, **cards})
    return rates if content is None else Rates.of(content, rates)


def foresee(answer: PlanAnswer, rates: Rates, engine: str, until_held: bool) -> Forecast:
    """Predicts a planned update. until_held: the call returns when relays hold the version."""
    question, offers = answer.question, answer.offered
    if offers is None or not answer.installs:
        return Forecast({}, None, None)
    memory: Memory = "gpu" if question.holding == "gpu" else "host"
    hosts = question.cluster.hosts
    sealed = [
        ProcessWork(f"rank {rank}", offers.held(rank), hosts[place.host], memory)
        for rank, place in enumerate(question.cluster.ranks)
    ]
    needs = [offers.needed(worker) for worker in range(question.replica.count)]
    served = {(line.replica, line.worker) for line in answer.installs}
    verified = [
        ProcessWork(f"{name} worker {worker}", needs[worker], hosts[place.host], question.readers)
        for name, places in zip(question.names, question.cluster.workers, strict=True)
        for worker, place in enumerate(places)
        if (name, worker) in served
    ]
    fills = [line.edge for line in answer.fills]
    installs = [line.edge for line in answer.installs]
    room = question.stage_memory
    early, rest = before_the_pause(installs, None if room is None else {edge.reader: room for edge in installs})
    waves = [fills] if fills else []
    stages = predict(rates, sealed=sealed, fills=waves, early=early, installs=rest, verified=verified)
    unknown = tuple(sorted({edge.transport for edge in (*installs, *fills) if rates.link(edge) is None}))
    own = engine_kind(engine).seconds
    if unknown or own is None:
        return Forecast(stages, None, None, unknown, engine if own is None else "")
    paused = pause(stages) + own.calls
    before = own.around + sum(stages[stage].seconds for stage in ("plan", SEAL, FILL) if stage in stages)
    ready = stages["ready"].seconds if "ready" in stages else 0.0
    return Forecast(stages, paused, before if until_held else before + ready + paused)
