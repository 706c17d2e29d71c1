"""Which transports this process can use: those of core/transports.py that find themselves available."""

from __future__ import annotations

from dataclasses import dataclass

from ckpt_engine.core.transports import TransportKind, transport_kinds, worker_kinds
from ckpt_engine.transport.base import Availability, Fetcher, Transport
from ckpt_engine.transport.fetched import FetchedTransport
from ckpt_engine.transport.on_host import try_load


@dataclass(frozen=True, slots=True)
class TransportRow:
    """A row of `ckpt-engine doctor`: one transport."""

    name: str
    ok: bool
    reason: str


def all_transports(relay: bool = False) -> dict[str, Transport]:
    """A new instance of every transport that this process can use, by name; not of collectives, over which no process
    reads alone. Call it once a worker.

    relay: also the transports between relays; only relays may load them.
    """
    readers = {name: _reader(kind) for name, kind in (transport_kinds() if relay else worker_kinds()).items()}
    return {
        name: FetchedTransport(reader) if isinstance(reader, Fetcher) else reader
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


def _reader(kind: TransportKind) -> Transport | Fetcher | Availability:
    reader: Transport | Fetcher | Availability = try_load(kind, kind.reader)
    return reader


def _available(kind: TransportKind) -> Availability:
    reader = _reader(kind)
    return reader if isinstance(reader, Availability) else reader.availability()
