"""Which transports there are: a table that planner, sources, workers and `doctor` go by. Pure; it loads no transport.

A transport is one `TransportKind`. Those of a package of its own are found by their entry points, or registered before
any process is started that is to know them; nothing else has to be edited.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from pkgutil import resolve_name
from types import MappingProxyType
from typing import Any

from ckpt_engine.core.reach import Rule, by_collective, by_directory, by_file, by_gpu, by_network, by_process

log = logging.getLogger(__name__)

ENTRY_POINTS = "ckpt_engine.transports"
"""Group of entry points; each names a TransportKind."""

HOST_MEMORY = "host memory"
GPU_MEMORY = "GPU memory"
FILES = "files"
"""What can be lent."""

Maker = Callable[..., Any] | str
"""Makes one side of a transport; or where to find what does, as "module:name", so that it is loaded where it is used
only."""


@dataclass(frozen=True, slots=True)
class Availability:
    """Whether a transport can be used in this process; `reason` says why not, or what was found."""

    ok: bool
    reason: str


@dataclass(frozen=True, slots=True)
class TransportKind:
    """One transport, both sides.

    name: as in Offer.transport. reach: from (source's host, worker's host) to whether it leads there, and how near.
    reader: makes a transport.base.Transport (mapped) or a transport.base.Fetcher (fetched), without arguments.
    lender: makes a transport.base.Lender; none: sources of this process do not lend over it. lends: of what memory.
    unasked: whether sources lend over it although nobody named it to `publish(transport=...)`.
    outlives: whether what was lent can be read when its owner is gone.
    on_host: makes the Availability for workers of this host, in an agent's process, without loading or starting what a
    worker would; none: the reader's own `availability`.
    relays_only: it is between relays: no worker, agent or trainer loads either side.
    arena: makes a transport.base.ArenaLender from (ArenaMemory, Network); none: relays do not lend over it.
    collective: all its readers and sources run one schedule together, so nobody reads over it alone. Its reader makes
        the Availability of a worker's process, and its lender is made from the address at which other hosts reach
        this one.
    """

    name: str
    reach: Rule
    reader: Maker
    lender: Maker | None = None
    lends: frozenset[str] = frozenset()
    unasked: bool = True
    outlives: bool = False
    on_host: Maker | None = None
    relays_only: bool = False
    arena: Maker | None = None
    collective: bool = False


_OWN = (
    TransportKind(
        name="cuda_ipc",
        reach=by_gpu,
        reader="ckpt_engine.transport.cuda_ipc:CudaIpcTransport",
        lender="ckpt_engine.transport.cuda_ipc:CudaIpcLender",
        lends=frozenset({GPU_MEMORY}),
        on_host="ckpt_engine.transport.on_host:cuda_ipc",
    ),
    TransportKind(
        name="relay_memory",
        reach=by_directory,
        reader="ckpt_engine.transport.relay_memory:RelayMemoryTransport",
        on_host="ckpt_engine.transport.on_host:relay_memory",
    ),
    TransportKind(
        name="shared_memory",
        reach=by_process,
        reader="ckpt_engine.transport.shared_memory:SharedMemoryTransport",
        lender="ckpt_engine.transport.shared_memory:SharedMemoryLender",
        lends=frozenset({HOST_MEMORY}),
        on_host="ckpt_engine.transport.on_host:shared_memory",
    ),
    TransportKind(
        name="file",
        reach=by_file,
        reader="ckpt_engine.transport.file:FileTransport",
        lender="ckpt_engine.transport.file:FileLender",
        lends=frozenset({FILES}),
        outlives=True,
        on_host="ckpt_engine.transport.on_host:file",
    ),
    TransportKind(
        name="ucx",
        reach=by_network,
        reader="ckpt_engine.transport.ucx.reader:UcxFetcher",
        relays_only=True,
        arena="ckpt_engine.transport.ucx.lender:UcxLender",
    ),
    TransportKind(
        name="tcp",
        reach=by_network,
        reader="ckpt_engine.transport.tcp:TcpFetcher",
        relays_only=True,
        arena="ckpt_engine.transport.tcp:TcpArenaLender",
    ),
    TransportKind(
        name="nccl",
        reach=by_collective,
        reader="ckpt_engine.transport.collective.here:availability",
        lender="ckpt_engine.transport.collective.lender:CollectiveLender",
        lends=frozenset({HOST_MEMORY, GPU_MEMORY}),
        unasked=False,
        on_host="ckpt_engine.transport.on_host:nccl",
        collective=True,
    ),
)

_registered: dict[str, TransportKind] = {}


def transport_kinds() -> Mapping[str, TransportKind]:
    """Every transport that this process knows, by name: ours, those of entry points, those that were registered."""
    return MappingProxyType({**_found(), **_registered})


def register_transport(kind: TransportKind) -> None:
    """Makes a transport known to this process; the processes that it starts find entry points only.

    Raises ValueError if there is one of this name.
    """
    if kind.name in transport_kinds():
        raise ValueError(f"there is a transport {kind.name!r} already")
    _registered[kind.name] = kind


def unregister_transport(name: str) -> None:
    """Takes back what was registered. Raises KeyError for any other."""
    del _registered[name]


def worker_kinds() -> Mapping[str, TransportKind]:
    """The kinds that workers of engines may read over: all but those between relays."""
    return MappingProxyType({name: kind for name, kind in transport_kinds().items() if not kind.relays_only})


def is_collective(name: str) -> bool:
    """Whether all who use a transport run one schedule together; False for one that is not known."""
    kind = _registered.get(name) or _found().get(name)  # asked for each tensor
    return kind is not None and kind.collective


def reading_kinds() -> list[str]:
    """The names of those that a worker of an engine, or a relay beside it, reads over by itself."""
    return [name for name, kind in worker_kinds().items() if not kind.collective]


def collective_kinds(memory: str) -> list[TransportKind]:
    """The collectives in which such memory can be sent."""
    return [kind for kind in transport_kinds().values() if kind.collective and memory in kind.lends]


def arena_kinds() -> list[TransportKind]:
    """The kinds over which relays lend their arenas to other relays."""
    return [kind for kind in transport_kinds().values() if kind.arena is not None]


def lending(memory: str, asked: str | None) -> list[TransportKind]:
    """The transports over which such memory is lent. asked: the one that the user named; None: those that need none."""
    return [
        kind
        for kind in transport_kinds().values()
        if kind.lender is not None
        and not kind.relays_only
        and memory in kind.lends
        and (kind.unasked if asked is None else kind.name == asked)
    ]


def memory_of(name: str) -> frozenset[str]:
    """What kinds of memory a transport lends from this process; empty for one that lends none, or is not known."""
    kind = transport_kinds().get(name)
    return kind.lends if kind is not None else frozenset()


def made(maker: Maker, *given: object) -> Any:
    """What a maker makes of what it is given, loaded now if it has to be."""
    return (resolve_name(maker) if isinstance(maker, str) else maker)(*given)


@cache
def _found() -> dict[str, TransportKind]:
    found = {kind.name: kind for kind in _OWN}
    for point in sorted(entry_points(group=ENTRY_POINTS), key=lambda point: point.name):
        try:
            kind = point.load()
        except Exception:
            log.exception("ckpt-engine: transport %s (%s) cannot be loaded; it is left out", point.name, point.value)
            continue
        if not isinstance(kind, TransportKind) or kind.name in found:
            log.error(
                "ckpt-engine: transport %s (%s) is no TransportKind with a name of its own; it is left out",
                point.name,
                point.value,
            )
            continue
        found[kind.name] = kind
    return found
