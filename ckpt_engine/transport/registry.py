"""Which transports this process can use: those of core/transports.py, asked to try themselves.

Those that the design foresees and nobody has built are told as such, with what this host has for them: a person who
wonders why an edge took shared memory gets an answer.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ckpt_engine.core.transports import Maker, TransportKind, made, transport_kinds
from ckpt_engine.transport.base import Availability, Fetcher, Transport
from ckpt_engine.transport.fetched import FetchedTransport

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TransportRow:
    """What `ckpt-engine doctor` shows of one transport. built: whether this version of ckpt-engine has it at all."""

    name: str
    built: bool
    ok: bool
    reason: str


def all_transports() -> dict[str, Transport]:
    """A new instance of every transport that this process can use, by name. Call it once a worker."""
    readers = {name: _reader(kind) for name, kind in transport_kinds().items()}
    return {
        name: FetchedTransport(reader) if isinstance(reader, Fetcher) else reader
        for name, reader in readers.items()
        if not isinstance(reader, Availability) and reader.availability().ok
    }


def worker_transports(only: Sequence[str] = ()) -> tuple[str, ...]:
    """What workers of an engine on this host may use, as its agent tells the manager. Starts CUDA nowhere.

    only: the names that a user allows; none: all that work. Raises ValueError for a name that is unknown or does not
    work here.
    """
    found = {name: _on_host(kind) for name, kind in transport_kinds().items()}
    for name in only:
        if name not in found:
            raise ValueError(f"there is no transport {name!r}; there are {', '.join(found)}")
        if not found[name].ok:
            raise ValueError(f"transport {name} does not work on this host: {found[name].reason}")
    return tuple(name for name, each in found.items() if each.ok and (not only or name in only))


def transport_rows() -> list[TransportRow]:
    """Every transport, built or not, and why it is on or off in this process. Never raises."""
    rows = []
    for name, kind in transport_kinds().items():
        found = _available(kind)
        rows.append(TransportRow(name, True, found.ok, found.reason))
    for name, found in unbuilt().items():
        if name not in transport_kinds():
            rows.append(TransportRow(name, False, False, found.reason))
    return rows


def _loaded(kind: TransportKind, maker: Maker) -> Any:
    """What it makes, or an Availability that says why not, which is in the log: no transport of others may stop a
    worker or an agent."""
    try:
        return made(maker)
    except Exception as error:
        log.exception("ckpt-engine: transport %s cannot be loaded", kind.name)
        return Availability(False, f"it cannot be loaded: {type(error).__name__}: {error}")


def _reader(kind: TransportKind) -> Transport | Fetcher | Availability:
    reader: Transport | Fetcher | Availability = _loaded(kind, kind.reader)
    return reader


def _available(kind: TransportKind) -> Availability:
    reader = _reader(kind)
    return reader if isinstance(reader, Availability) else reader.availability()


def _on_host(kind: TransportKind) -> Availability:
    if kind.on_host is None:
        return _available(kind)
    found: Availability = _loaded(kind, kind.on_host)
    return found


def unbuilt() -> Mapping[str, Availability]:
    """Transports of the design that this version does not have, with what they would find on this host."""
    return {
        "nccl": Availability(False, f"not built yet; {_cuda()}; {_nccl()}"),
        "ucx": Availability(False, f"not built yet; {_nixl()}"),
    }


def _cuda() -> str:
    if torch.version.cuda is None:
        return f"this torch ({torch.__version__}) is built without CUDA"
    if not Path("/proc/driver/nvidia/version").exists():
        return "no NVIDIA driver is loaded"
    return f"{torch.cuda.device_count()} CUDA devices visible"


def _nccl() -> str:
    if torch.distributed.is_available() and torch.distributed.is_nccl_available():
        return "this torch has NCCL"
    return "this torch has no NCCL"


def _nixl() -> str:
    if (
        importlib.util.find_spec("nixl")
        or importlib.util.find_spec("nixl_cu13")
        or importlib.util.find_spec("nixl_cu12")
    ):
        return "NIXL is installed"
    return "NIXL is not installed (pip install 'ckpt-engine[nixl-cu13]' or 'ckpt-engine[nixl-cu12]')"
