"""Which kinds of engines there are: an entry point each, which names an `EngineKind`. It loads no adapter, no engine
and no torch, and decides nothing about what an engine can do: that is the adapter's to declare.

An adapter is a folder, or a package of its own. Whatever our core asks of an engine stands in its `EngineKind`, or is
found where that says; nothing else of ours knows the name of any engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ckpt_engine.core.entry_points import REINSTALL, points_of

ENTRY_POINTS = "ckpt_engine.engines"
"""Group of entry points; each is named as its engine, and names an EngineKind."""

DEFAULT = "vllm"
"""What `ckpt-engine plan` plans for where nobody says: the engine that most people run."""


class UnknownAdapterError(Exception):
    """No adapter of that kind exists, or it cannot be imported."""


class UpdateSeconds(NamedTuple):
    """Seconds that an engine takes for an update, whatever its bytes, for `ckpt-engine plan`."""

    quiesce: float
    """From the call that pauses it to no worker computing any more."""
    resume: float
    """Until it computes again."""
    calls: float
    """Within its pause, in no stage."""
    around: float
    """Of the trainer's call, before and after the pause."""


@dataclass(frozen=True)
class Layout:
    """How an engine splits a model, as far as `ckpt-engine plan` follows rules and not the engine's own loader."""

    vocabulary_for_workers: bool = False
    """Whether rows of embedding and head are padded to a multiple that grows with the number of workers."""
    repeats_heads: bool = True
    """Whether key-value heads are repeated where there are fewer than workers."""
    experts_fill_stages: bool = False
    """Whether experts are dealt to all workers of a pipeline stage, or to none."""
    vocabulary_on_each_stage: frozenset[str] = frozenset()
    """Architectures of which each pipeline stage has embedding, last norm and output head."""


class Requirement(NamedTuple):
    """What an engine needs in the agent's own environment."""

    extra: str
    """Of ckpt-engine, which brings it."""
    modules: tuple[str, ...]


@dataclass(frozen=True)
class EngineKind:
    """One kind of engine: all that is asked of it before its adapter is loaded, and where the parts of the adapter are.

    Places are texts, "package.module" or "package.module:name": each process loads what it uses. The manager loads none
    of them, the gateway `gateway` only.
    """

    name: str
    """As in `--engine`; that of the entry point."""
    title: str
    """What people call it, in messages."""
    driver: str
    """The module that drives it in an agent: an `engine.adapter.AdapterModule`."""
    gateway: str = ""
    """A `gateway.engines.GatewaySide`: which dialects it speaks, how it is asked for its load. Empty: the gateway only
    passes on to it what any engine answers."""
    demo: str = ""
    """A `demo.servers.DemoServer`: how `ckpt-engine demo` starts and asks one. Empty: the demo does not."""
    requires: Requirement | None = None
    """Of an engine that runs with the agent's own Python; others may have an environment of their own."""
    seconds: UpdateSeconds | None = None
    """Medians of measurements, of one replica with no request in it; None: nobody has measured them."""
    layout: Layout = field(default_factory=Layout)


def engine_names() -> Sequence[str]:
    """The kinds that there are, in the order of their names. Loads nothing."""
    return tuple(points_of(ENTRY_POINTS))


def engine_kind(name: str) -> EngineKind:
    """What is known of one kind of engine.

    Raises UnknownAdapterError for a name that no adapter has, with those that there are, and for an entry point that
    cannot be loaded or is something else.
    """
    points, name = points_of(ENTRY_POINTS), str(name)  # an option's value has another way to be printed
    point = points.get(name)
    if point is None:
        known = ", ".join(points) or f"none; {REINSTALL}"
        raise UnknownAdapterError(f"no adapter for engine kind {name!r}; known kinds: {known}")
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
