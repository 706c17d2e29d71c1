"""Which transports this process can use: those of core/transports.py that find themselves available."""

from __future__ import annotations

from dataclasses import dataclass

from ckpt_engine.core.transports import TransportKind, transport_kinds, worker_kinds
from ckpt_engine.transport.base import Availability, Transport
from ckpt_engine.transport.on_host import try_load


@dataclass(frozen=True, slots=True)
class TransportRow:
    """A row of `ckpt-engine doctor`: one transport."""

    name: str
    ok: bool
    reason: str


def all_transports() -> dict[str, Transport]:
    """A new instance of every transport that this process can read over, by name; not of collectives, over which no
    process reads alone, nor of those between relays. Call it once a worker or relay."""
    readers = {name: _reader(kind) for name, kind in worker_kinds().items()}
    return {
        name: reader
        for name, reader in readers.items()
        if not isinstance(reader, Availability) and reader.availability().ok
    }


def transport_rows() -> list[TransportRow]:
    """Every transport, and why this process can or cannot use it. Never raises."""
    rows = []
    for name, kind in transport_kinds().items():
        found = _available(kind)
        reason = f"between relays: {found.reason}" if kind.relays_only else found.reason
        rows.append(TransportRow(name, found.ok, reason))
    return rows


def _reader(kind: TransportKind) -> Transport | Availability:
    reader: Transport | Availability = try_load(kind, kind.reader or "")
    return reader


def _available(kind: TransportKind) -> Availability:
    if kind.reader is None:
        found: Availability = try_load(kind, kind.on_host or "")
        return found
    reader = _reader(kind)
    return reader if isinstance(reader, Availability) else reader.availability()
