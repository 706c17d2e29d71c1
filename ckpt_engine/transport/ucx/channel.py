"""The protocol between a relay and its helper: messages of a Unix SOCK_SEQPACKET pair. Imports nothing heavy.

A message is a header and a body. The relay numbers its requests; each is answered once, with DONE or FAILED.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence

HEADER = struct.Struct("<B3xIQ")
"""Kind, number, and a value that each kind defines."""

LEND, CONNECT, READ = range(1, 4)
"""Requests of a relay.

LEND: register the first `value` bytes of the part of the arena that starts at the offset in the body (OFFSET);
answered with the metadata of the agent. CONNECT: to the owner whose metadata is the body. READ: the runs in the body
(RUN) of the owner's memory.
"""

READY, DONE, FAILED = range(16, 19)
"""Messages of a helper. READY: its agent has started, or the body says why not. DONE: the body is the answer, if there
is one. FAILED: the body says why."""

OFFSET = struct.Struct("<Q")
RUN = struct.Struct("<QQQ")
"""Address in the owner's helper; offset in this relay's arena; length."""

MOST_BYTES = 96 << 10
"""The most of a message; a socket takes twice that by default."""

MOST_METADATA = MOST_BYTES - 64
"""The most of an agent's metadata, which has some hundred bytes for each device."""

MOST_RUNS = 2048
"""The most runs of one READ."""

LENDER, LENDER_WRITABLE, READER = range(1, 4)
"""Roles of a helper. LENDER maps the arena read-only. LENDER_WRITABLE maps it writable, since InfiniBand registers only
writable memory. READER writes what it reads."""

Runs = Sequence[tuple[int, int, int]]


def message(kind: int, number: int, value: int = 0, body: bytes = b"") -> bytes:
    """One message, packed."""
    return HEADER.pack(kind, number, value) + body


def parts(data: bytes) -> tuple[int, int, int, bytes]:
    """Kind, number, value and body. Raises ValueError for a malformed message."""
    if len(data) < HEADER.size:
        raise ValueError(f"a message of {len(data)} bytes")
    return (*HEADER.unpack_from(data), data[HEADER.size :])


def pack_runs(runs: Runs) -> bytes:
    """The body of a READ."""
    return b"".join(RUN.pack(*run) for run in runs)


def unpack_runs(body: bytes) -> list[tuple[int, int, int]]:
    """Runs of a READ's body. Raises struct.error for a malformed one."""
    return list(RUN.iter_unpack(body))


def in_requests(runs: Iterable[tuple[int, int, int]], most: int) -> Iterator[tuple[int, list[tuple[int, int, int]]]]:
    """Requests, each with its bytes: runs in order, adjacent ones joined, cut so that no request has more than `most`
    bytes or MOST_RUNS runs."""
    batch: list[tuple[int, int, int]] = []
    size = 0
    for remote, local, length in _join(runs):
        while length:
            if size >= most or len(batch) >= MOST_RUNS:
                yield size, batch
                batch, size = [], 0
            piece = min(length, most - size)
            batch.append((remote, local, piece))
            size += piece
            remote, local, length = remote + piece, local + piece, length - piece
    if batch:
        yield size, batch


def _join(runs: Iterable[tuple[int, int, int]]) -> Iterator[tuple[int, int, int]]:
    held: tuple[int, int, int] | None = None
    for remote, local, length in runs:
        if held is not None and (held[0] + held[2], held[1] + held[2]) == (remote, local):
            held = held[0], held[1], held[2] + length
            continue
        if held is not None:
            yield held
        held = remote, local, length
    if held is not None:
        yield held
