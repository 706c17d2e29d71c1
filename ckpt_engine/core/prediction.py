"""How long the stages of an update take at least: the time to carry their bytes. Pure.

Everything that carries bytes is a *lane*: the sending side of a host's network card, the memory of a host, one GPU. All
edges of a stage run at once, so a stage takes as long as its busiest lane. What no lane explains (compiling a plan,
calls, an engine's own pause) is a measured number of seconds, or left out.

Rates are ceilings, so a prediction is the shortest possible time. A file of rates, for `Rates.of`, has GB/s (10^9
bytes) and seconds:

    {"links": {"shared_memory": {"host": 16.0, "gpu": 55.3}, "tcp": {"host": 12.0}},
     "copy": {"host": 16.0, "gpu": 2099.0}, "digest": {"host": 18.5, "gpu": 4230.0}, "verify": {"host": 9.8},
     "seconds": {"plan": 0.01, "quiesce": 0.02, "resume": 0.01}}
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Literal, NamedTuple, TypeAlias

from ckpt_engine.core.problems import invalid
from ckpt_engine.core.transports import is_collective, is_of_gpus, is_over_network, transport_kinds

Memory: TypeAlias = Literal["host", "gpu"]
"""Where weights lie at the end of an edge, or where they are digested."""

MEMORIES: tuple[Memory, ...] = ("host", "gpu")

SEAL = "seal"
FILL = "fill"
"""The stage before an engine pauses. The other names are those of the protocol's stages, in lower case."""

STAGES = ("plan", SEAL, FILL, "ready", "quiesce", "transfer", "install", "verify", "resume")
"""All stages, in their order."""

PAUSED = ("quiesce", "transfer", "install", "verify", "resume")
"""Stages in which a replica produces no token."""

SAME_GPU = "same gpu"
"""Stands in place of "gpu" among the links of a transport, for a source and a reader on one GPU."""


class PredictedEdge(NamedTuple):
    """Bytes that one reader reads from one source."""

    source: str  # a name, one for each process
    reader: str  # likewise
    transport: str
    bytes: int
    source_host: str = ""  # a name, one for each host
    reader_host: str = ""  # likewise
    memory: Memory = "host"  # where the reader puts the bytes
    same_gpu: bool = False  # the bytes do not leave the GPU


class ProcessWork(NamedTuple):
    """Bytes that one process copies or digests where they lie."""

    process: str
    bytes: int
    host: str = ""
    memory: Memory = "host"


class Expected(NamedTuple):
    """The predicted time of one stage."""

    seconds: float
    because: str = ""  # its busiest lane, for people; empty: the seconds were measured


@dataclass(frozen=True)
class Rates:
    """Rates in bytes a second, by the memory that the bytes are put into or lie in ("host", "gpu")."""

    links: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # by transport, then memory or SAME_GPU
    copy: Mapping[str, float] = field(default_factory=dict)  # of all processes of a host together, or of one GPU
    digest: Mapping[str, float] = field(default_factory=dict)  # likewise
    seconds: Mapping[str, float] = field(default_factory=dict)  # of stages, whatever their bytes
    verify: Mapping[str, float] = field(default_factory=dict)  # digests of workers, where other than `digest`

    @classmethod
    def of(cls, value: object, defaults: Rates | None = None) -> Rates:
        """Reads rates from JSON of the module's form. defaults: for what it does not have; None: nothing. Raises
        INVALID_ARGUMENT, naming what is wrong."""
        table = _table(value, "rates")
        _only(table, ("links", "copy", "digest", "verify", "seconds"), "rates")
        base = defaults or cls()
        links = {name: dict(each) for name, each in base.links.items()}
        for name, each in _table(table.get("links", {}), "links").items():
            links[name] = links.get(name, {}) | _rates(each, f"links, {name}", (*MEMORIES, SAME_GPU))
        return cls(
            links=links,
            copy={**base.copy, **_rates(table.get("copy", {}), "copy", MEMORIES)},
            digest={**base.digest, **_rates(table.get("digest", {}), "digest", MEMORIES)},
            seconds={**base.seconds, **_numbers(table.get("seconds", {}), "seconds", STAGES, zero=True)},
            verify={**base.verify, **_rates(table.get("verify", {}), "verify", MEMORIES)},
        )

    def link(self, edge: PredictedEdge) -> float | None:
        """The rate of an edge alone; None: unknown."""
        rates = self.links.get(edge.transport, {})
        if edge.same_gpu and SAME_GPU in rates:
            return rates[SAME_GPU]
        return rates.get(edge.memory)


def measured() -> Rates:
    """The measured rates: for copies and digests the medians of docs/performance.md, of two EPYC processors and an
    H200; for links each transport's own. None is of a network card: give the rate of yours."""
    return Rates(
        links={name: kind.rates for name, kind in transport_kinds().items() if kind.rates},
        copy={"host": 16.0e9, "gpu": 2099e9},
        digest={"host": 18.5e9, "gpu": 4230e9},
    )


def over_lanes(edges: Iterable[PredictedEdge], rates: Rates) -> Expected | None:
    """The time of edges that all begin at once; None if there is nothing to carry, or a rate is unknown."""
    lanes: dict[str, float] = {}
    for edge in edges:
        rate = rates.link(edge)
        if edge.bytes <= 0:
            continue
        if rate is None:
            return None
        for lane in _lanes(edge):
            lanes[lane] = lanes.get(lane, 0.0) + edge.bytes / rate
    return _busiest(lanes)


def of_work(work: Iterable[ProcessWork], rates: Mapping[str, float], verb: str) -> Expected | None:
    """The time of copies or digests that all begin at once: those of a host share its processors and its memory. None
    if there is nothing to do, or a rate is unknown. verb: for people."""
    lanes: dict[str, float] = {}
    for each in work:
        if each.bytes <= 0:
            continue
        rate = rates.get(each.memory)
        if rate is None:
            return None
        where = f"host {each.host}" if each.memory == "host" else f"the GPU of {each.process}"
        lane = f"{verb} {where}"
        lanes[lane] = lanes.get(lane, 0.0) + each.bytes / rate
    return _busiest(lanes)


def before_the_pause(
    installs: Iterable[PredictedEdge], rooms: Mapping[str, int] | None
) -> tuple[list[PredictedEdge], list[PredictedEdge]]:
    """Splits the edges of workers into what is brought into stage memory before the pause and what is read in it.

    rooms: bytes of stage memory, by reader; None: enough for all. Slower links come first; what lies on the worker's
    own GPU is read in the pause, as fast as from stage memory.
    """
    early: list[PredictedEdge] = []
    rest: list[PredictedEdge] = []
    room = dict(rooms or {})
    for edge in sorted(installs, key=lambda edge: is_of_gpus(edge.transport)):
        free = edge.bytes if rooms is None else room.get(edge.reader, 0)
        size = 0 if edge.same_gpu or is_collective(edge.transport) else min(edge.bytes, free)
        room[edge.reader] = free - size
        early += [edge._replace(bytes=size)] if size else []
        rest += [edge._replace(bytes=edge.bytes - size)] if size < edge.bytes else []
    return early, rest


def predict(
    rates: Rates,
    *,
    sealed: Sequence[ProcessWork] = (),
    copied: Sequence[ProcessWork] = (),
    fills: Sequence[Sequence[PredictedEdge]] = (),
    early: Sequence[PredictedEdge] = (),
    installs: Sequence[PredictedEdge] = (),
    verified: Sequence[ProcessWork] = (),
) -> dict[str, Expected]:
    """Predicts each stage of which something is known, in the order of STAGES.

    sealed: what sources digest; copied: what they copy before. fills: the edges of relays, wave by wave: each wave
    begins when the one before has ended. early: what workers bring into stage memory, and copy from there in the
    pause. installs: what they read in the pause. verified: what they digest then.
    """
    staged = [ProcessWork(edge.reader, edge.bytes, edge.reader_host, edge.memory) for edge in early]
    found: dict[str, Expected | None] = {
        SEAL: _after(of_work(copied, rates.copy, "copies on"), of_work(sealed, rates.digest, "digests on")),
        FILL: _after(*(over_lanes(wave, rates) for wave in fills)),
        "ready": over_lanes(early, rates),
        "transfer": _after(over_lanes(installs, rates), of_work(staged, rates.copy, "copies on")),
        "verify": of_work(verified, {**rates.digest, **rates.verify}, "digests on"),
    }
    for stage, seconds in rates.seconds.items():
        carried = found.get(stage)
        found[stage] = Expected(seconds) if carried is None else Expected(carried.seconds + seconds, carried.because)
    return {stage: expected for stage in STAGES if (expected := found.get(stage)) is not None}


def pause(stages: Mapping[str, Expected]) -> float:
    """Seconds in which the slowest replica produces no token."""
    return sum(stages[stage].seconds for stage in PAUSED if stage in stages)


def _lanes(edge: PredictedEdge) -> tuple[str, ...]:
    if is_over_network(edge.transport):
        sender, receiver = edge.source_host or edge.source, edge.reader_host or edge.reader
        return (f"{edge.transport} from host {sender}", f"{edge.transport} into host {receiver}")
    if edge.memory == "gpu":
        into = f"{edge.transport} into the GPU of {edge.reader}"
        return (into, f"{edge.transport} out of the GPU of {edge.source}") if is_of_gpus(edge.transport) else (into,)
    return (f"memory of host {edge.reader_host or edge.reader}",)


def _busiest(lanes: Mapping[str, float]) -> Expected | None:
    if not lanes:
        return None
    lane = max(sorted(lanes), key=lambda name: lanes[name])
    return Expected(lanes[lane], lane)


def _after(*steps: Expected | None) -> Expected | None:
    """The time of steps one after the other; the longest gives the reason."""
    parts = [step for step in steps if step is not None]
    if not parts:
        return None
    return Expected(sum(step.seconds for step in parts), max(parts, key=lambda step: step.seconds).because)


def _table(value: object, what: str) -> Mapping[str, object]:
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        raise invalid(f"{what}: {value!r} is not a JSON object")
    return value


def _only(table: Mapping[str, object], names: Sequence[str], what: str) -> None:
    for name in table:
        if name not in names:
            raise invalid(f"{what}: {name!r} is none of {', '.join(names)}")


def _rates(value: object, what: str, names: Sequence[str]) -> dict[str, float]:
    """Reads rates in GB/s as bytes a second."""
    return {name: rate * 1e9 for name, rate in _numbers(value, what, names).items()}


def _numbers(value: object, what: str, names: Sequence[str], zero: bool = False) -> dict[str, float]:
    table = _table(value, what)
    _only(table, names, what)
    found: dict[str, float] = {}
    for name, number in table.items():
        good = isinstance(number, int | float) and not isinstance(number, bool) and isfinite(number)
        if not good or number < 0 or (number == 0 and not zero):  # type: ignore[operator]
            raise invalid(f"{what}, {name}: {number!r} is not a number {'of seconds' if zero else 'above 0'}")
        found[name] = float(number)  # type: ignore[arg-type]
    return found
