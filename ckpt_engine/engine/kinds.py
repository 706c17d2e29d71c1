"""The kinds of engines: each has an entry point that names its `EngineKind`. It loads no adapter, no engine and no
torch, and does not decide what an engine can do: the adapter declares that.

An adapter is a folder, or a separate package. All that our core asks of an engine is in its `EngineKind`, or found
where that points; nothing else of ours knows the name of any engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ckpt_engine.core.entry_points import REINSTALL, points_of

ENTRY_POINTS = "ckpt_engine.engines"
"""Group of entry points; each has the name of its engine, and names an EngineKind."""

DEFAULT = "vllm"
"""The engine that `ckpt-engine plan` assumes if none is named: the one that most people run."""


class UnknownAdapterError(Exception):
    """No adapter of that kind exists, or it cannot be imported."""


class UpdateSeconds(NamedTuple):
    """Seconds that an engine takes for an update of any size, for `ckpt-engine plan`."""

    quiesce: float  # from the pausing call until no worker computes any more
    resume: float  # until it computes again
    calls: float  # within its pause, in no stage
    around: float  # of the trainer's call, before and after the pause


@dataclass(frozen=True)
class Layout:
    """How an engine splits a model, where `ckpt-engine plan` follows rules instead of the engine's own loader."""

    vocabulary_for_workers: bool = False
    """Whether rows of embedding and head are padded to a multiple that grows with the number of workers."""
    repeats_heads: bool = True
    """Whether key-value heads are repeated where there are fewer than workers."""
    experts_fill_stages: bool = False
    """Whether experts are divided among all workers of a pipeline stage, or among none."""
    vocabulary_on_each_stage: frozenset[str] = frozenset()
    """Architectures with embedding, last norm and output head on each pipeline stage."""


class Requirement(NamedTuple):
    """What an engine needs in the agent's own environment."""

    extra: str  # of ckpt-engine, which installs it
    modules: tuple[str, ...]


@dataclass(frozen=True)
class EngineKind:
    """One kind of engine: the facts that are needed before its adapter is loaded, and where the adapter's parts are.

    Parts are named by text, "package.module" or "package.module:name", so that each process loads only what it uses.
    The manager loads none of them, the gateway only `gateway`.
    """

    name: str
    """As in `--engine`, and of the entry point."""
    title: str
    """Its name in messages for people."""
    driver: str
    """The module that drives it in an agent: an `engine.adapter.AdapterModule`."""
    gateway: str = ""
    """A `gateway.engines.GatewaySide`: its dialects, and how to ask for its load. Empty: the gateway only passes on
    what any engine answers."""
    demo: str = ""
    """A `demo.servers.DemoServer`: how `ckpt-engine demo` starts and asks one. Empty: the demo cannot."""
    requires: Requirement | None = None
    """What an engine needs that runs with the agent's own Python; others may have a separate environment."""
    seconds: UpdateSeconds | None = None
    """Measured medians, of one replica without requests; None: not measured."""
    layout: Layout = field(default_factory=Layout)


def engine_names() -> Sequence[str]:
    """The names of all kinds, sorted. Loads nothing."""
    return tuple(points_of(ENTRY_POINTS))


def engine_kind(name: str) -> EngineKind:
    """Loads one kind of engine.

    Raises UnknownAdapterError for an unknown name, with the known ones, and for an entry point that cannot be loaded or
    is not an EngineKind of that name.
    """
    points, name = points_of(ENTRY_POINTS), str(name)  # an option's value prints differently
    point = points.get(name)
    if point is None:
        names = ", ".join(points) or f"none; {REINSTALL}"
        raise UnknownAdapterError(f"no adapter for engine kind {name!r}; known kinds: {names}")
    try:
        kind = point.load()
    except Exception as error:
        raise UnknownAdapterError(
            f"the adapter for engine kind {name!r} cannot be loaded ({point.value}): {type(error).__name__}: {error}"
        ) from error
    if not isinstance(kind, EngineKind) or kind.name != name:
        raise UnknownAdapterError(
            f"the entry point {name!r} of {ENTRY_POINTS} must name an EngineKind of that name, and {point.value} is "
            + (f"that of {kind.name!r}" if isinstance(kind, EngineKind) else f"a {type(kind).__name__}")
        )
    return kind
