"""The table of transports for planner, sources, workers and `doctor`. Pure; it loads no transport.

A transport is one `TransportKind`, in a folder or a package of its own, and is found by its entry point, as ours are.
Everything that others ask about a transport is a value there, so no other code names one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pkgutil import resolve_name
from types import MappingProxyType
from typing import Any

from ckpt_engine.core.entry_points import REINSTALL, is_ours, points_of
from ckpt_engine.core.problems import precondition
from ckpt_engine.core.reach import Rule

log = logging.getLogger(__name__)

ENTRY_POINTS = "ckpt_engine.transports"
"""Group of entry points; each names a TransportKind."""

HOST_MEMORY = "host memory"
GPU_MEMORY = "GPU memory"
FILES = "files"
"""Kinds of memory that can be lent."""

Maker = Callable[..., Any] | str
"""Makes one side of a transport. As a string "module:name" it is loaded only where it is used."""


@dataclass(frozen=True, slots=True)
class Availability:
    """Whether a transport can be used in this process."""

    ok: bool
    reason: str  # why not, or what was found


@dataclass(frozen=True, slots=True)
class TransportKind:
    """One transport, both sides, and what planners, relays, workers and commands ask about it."""

    name: str
    """As in Offer.transport."""
    reach: Rule
    """Says whether it reaches the worker, and how near: (source's host, worker's host) to a Reach."""
    reader: Maker | None = None
    """Makes a transport.base.Transport, without arguments; None: it is between relays, and no worker, agent or trainer
    loads it."""
    lender: Maker | None = None
    """Makes a transport.base.Lender; None: sources of this process do not lend over it."""
    lends: frozenset[str] = frozenset()
    """The kinds of memory that it lends."""
    unasked: bool = True
    """Whether sources lend over it without being asked to by `publish(transport=...)`."""
    outlives: bool = False
    """Whether lent memory can be read after its owner has ended."""
    on_host: Maker | None = None
    """Makes the Availability for workers of this host, in an agent's process, without loading or starting what a worker
    would; None: the reader's own `availability`. Set if there is no reader."""
    chunks: Maker | None = None
    """Makes a transport.base.ChunkLender from (ArenaMemory, Network); None: relays of other hosts ask for nothing over
    it. There is one for each relay."""
    asker: Maker | None = None
    """Makes a transport.base.ChunkAsker from (OfferedRegion, owner, name, stop_at); set if `chunks` is."""
    carrier: Maker | None = None
    """Makes a transport.base.ChunkCarrier from an ArenaMapping, or returns None if this relay is not to use it. It
    reads chunks under an asker, and processes other than the relay may write the relay's memory."""
    link: Maker | None = None
    """Makes a transport.base.CarrierLink from (Region, owner, memory), the carrier's region of the owner and a slot of
    this process, or returns None if that slot's arena has no such carrier; set if `carrier` is."""
    collective: bool = False
    """All its readers and sources run one schedule together, so no worker reads over it alone. Its reader makes the
    Availability of a worker's process, and its lender is made from the address at which other hosts reach this one."""
    order: int = 100
    """Its place among equally near transports, of which the one with the smallest is taken."""
    of_relays: bool = False
    """Relays lend their memory over it to processes of their own host. There is one."""
    over_network: bool = False
    """Each byte leaves the network card of one host and enters another's."""
    checks: Maker | None = None
    """Makes its rows for `ckpt-engine doctor`: name, whether it works (None: a fact), what was found."""
    rates: Mapping[str, float] = field(default_factory=dict)
    """Measured bytes a second (docs/performance.md), by where a reader puts them: see prediction.Rates."""

    @property
    def relays_only(self) -> bool:
        """Whether it is between relays: no worker, agent or trainer loads either side."""
        return self.reader is None


_registered: dict[str, TransportKind] = {}


def transport_kinds() -> Mapping[str, TransportKind]:
    """Every transport that this process knows, by name: those of entry points, in their order, then registered ones."""
    return MappingProxyType({**_found(), **_registered})


def register_transport(kind: TransportKind) -> None:
    """Makes a transport known to this process; processes that it starts find entry points only.

    Raises ValueError if the name is taken.
    """
    if kind.name in transport_kinds():
        raise ValueError(f"there is a transport {kind.name!r} already")
    _registered[kind.name] = kind


def unregister_transport(name: str) -> None:
    """Removes a registered transport. Raises KeyError for any other."""
    del _registered[name]


def worker_kinds() -> Mapping[str, TransportKind]:
    """The kinds that workers of engines may read over: all but those between relays."""
    return MappingProxyType({name: kind for name, kind in transport_kinds().items() if not kind.relays_only})


def is_collective(name: str) -> bool:
    """Whether all users of a transport run one schedule together; False for an unknown one."""
    kind = _known(name)  # called for each tensor
    return kind is not None and kind.collective


def reading_kinds() -> list[str]:
    """The names of those over which an engine's worker, or a relay on its host, reads by itself."""
    return [name for name, kind in worker_kinds().items() if not kind.collective]


def collective_kinds(memory: str) -> list[TransportKind]:
    """The collectives in which such memory can be sent."""
    return [kind for kind in transport_kinds().values() if kind.collective and memory in kind.lends]


def chunk_kinds() -> list[TransportKind]:
    """The kinds over which relays of different hosts ask each other for chunks."""
    return [kind for kind in transport_kinds().values() if kind.chunks is not None]


def carrier_kinds() -> list[TransportKind]:
    """The kinds that may carry a chunk which was asked for over another one."""
    return [kind for kind in transport_kinds().values() if kind.carrier is not None]


def lending(memory: str, transport: str | None) -> list[TransportKind]:
    """The kinds over which such memory is lent. transport: the user's choice; None: all that lend without being
    asked."""
    return [
        kind
        for kind in transport_kinds().values()
        if kind.lender is not None
        and not kind.relays_only
        and memory in kind.lends
        and (kind.unasked if transport is None else kind.name == transport)
    ]


def memory_of(name: str) -> frozenset[str]:
    """The kinds of memory that a transport lends from this process; empty for one that lends none, or is unknown."""
    kind = _known(name)
    return kind.lends if kind is not None else frozenset()


def is_of_gpus(name: str) -> bool:
    """Whether a transport lends memory of GPUs and no other."""
    return memory_of(name) == {GPU_MEMORY}


def is_over_network(name: str) -> bool:
    """Whether each byte crosses the network cards of two hosts; False for an unknown transport."""
    kind = _known(name)
    return kind is not None and kind.over_network


def relay_transport() -> str:
    """The transport over which processes of a host read its relay."""
    return _only("processes read the relay of their host", lambda kind: kind.of_relays)


def passing_transport() -> str:
    """The transport over which relays of different hosts ask each other for chunks."""
    return _only("relays of different hosts ask each other", lambda kind: kind.chunks is not None)


def collective_transport() -> str:
    """The transport that is a collective."""
    return _only("collectives go", lambda kind: kind.collective)


def make(maker: Maker, *arguments: object) -> Any:
    """Calls a maker, which is loaded first if need be."""
    return (resolve_name(maker) if isinstance(maker, str) else maker)(*arguments)


def _known(name: str) -> TransportKind | None:
    return _registered.get(name) or _found().get(name)


def _only(what: str, fact: Callable[[TransportKind], bool]) -> str:
    """The name of the first kind, by order, for which a fact is true."""
    found = next((kind.name for kind in transport_kinds().values() if fact(kind)), None)
    if found is None:
        raise precondition(f"there is no transport over which {what}: {REINSTALL}")
    return found


@cache
def _found() -> dict[str, TransportKind]:
    found: dict[str, TransportKind] = {}
    for point in sorted(points_of(ENTRY_POINTS).values(), key=lambda point: not is_ours(point)):
        try:
            kind = point.load()
        except Exception:
            log.exception("ckpt-engine: transport %s (%s) cannot be loaded; it is left out", point.name, point.value)
            continue
        if not isinstance(kind, TransportKind) or kind.name in found:
            log.error(
                "ckpt-engine: transport %s (%s) is not a TransportKind with a name of its own; it is left out",
                point.name,
                point.value,
            )
            continue
        found[kind.name] = kind
    return {kind.name: kind for kind in sorted(found.values(), key=lambda kind: (kind.order, kind.name))}
