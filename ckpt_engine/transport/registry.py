"""Which transports this process can use: those of core/transports.py, asked to try themselves.

Those that the design foresees and nobody has built are told as such, with what this host has for them: a person who
wonders why an edge took shared memory gets an answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from ckpt_engine.core.transports import TransportKind, transport_kinds, worker_kinds
from ckpt_engine.transport.base import Availability, Fetcher, Transport
from ckpt_engine.transport.fetched import FetchedTransport
from ckpt_engine.transport.on_host import loaded


@dataclass(frozen=True, slots=True)
class TransportRow:
    """What `ckpt-engine doctor` shows of one transport. built: whether this version of ckpt-engine has it at all."""

    name: str
    built: bool
    ok: bool
    reason: str


def all_transports(relay: bool = False) -> dict[str, Transport]:
    """A new instance of every transport that this process can use, by name. Call it once a worker.

    relay: also those that are between relays; nothing else may load them.
    """
    readers = {name: _reader(kind) for name, kind in (transport_kinds() if relay else worker_kinds()).items()}
    return {
        name: FetchedTransport(reader) if isinstance(reader, Fetcher) else reader
        for name, reader in readers.items()
        if not isinstance(reader, Availability) and reader.availability().ok
    }


def transport_rows() -> list[TransportRow]:
    """Every transport, built or not, and why it is on or off in this process. Never raises."""
    rows = []
    for name, kind in transport_kinds().items():
        found = _available(kind)
        reason = f"between relays: {found.reason}" if kind.relays_only else found.reason
        rows.append(TransportRow(name, True, found.ok, reason))
    for name, found in unbuilt().items():
        if name not in transport_kinds():
            rows.append(TransportRow(name, False, False, found.reason))
    return rows


def _reader(kind: TransportKind) -> Transport | Fetcher | Availability:
    reader: Transport | Fetcher | Availability = loaded(kind, kind.reader)
    return reader


def _available(kind: TransportKind) -> Availability:
    reader = _reader(kind)
    return reader if isinstance(reader, Availability) else reader.availability()


def unbuilt() -> Mapping[str, Availability]:
    """Transports of the design that this version does not have, with what they would find on this host."""
    return {
        "nccl": Availability(False, f"no update uses it yet (docs/collective.md); {_cuda()}; {_nccl()}"),
    }


def _cuda() -> str:
    if torch.version.cuda is None:
        return f"this torch ({torch.__version__}) is built without CUDA"
    if not Path("/proc/driver/nvidia/version").exists():
        return "no NVIDIA driver is loaded"
    return f"{torch.cuda.device_count()} CUDA devices visible"


def _nccl() -> str:
    if torch.version.cuda is None:
        return "no NCCL"
    # Loaded here only: a torch without CUDA would be asked in vain.
    from ckpt_engine.transport.collective.nccl import nccl_availability

    return nccl_availability().reason
