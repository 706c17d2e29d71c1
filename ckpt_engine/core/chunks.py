"""The chunks of a version: what relays ask each other for, verify and pass on. Pure.

A chunk is a list of whole cells of the sealed record, since only whole cells can be compared with what was sealed. The
chunks follow from the record alone, whatever a relay holds and however it lays that out, so relays with different needs
share what they share. It does not decide which relay brings which chunk.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from ckpt_engine.core.chunk_sizes import chunk_bytes, join_pieces
from ckpt_engine.core.sealed_record import ProvenRecord

KEY_BYTES = 16


class Chunk(NamedTuple):
    """Cells that travel together: cell after cell, each row-major, without gaps."""

    cells: tuple[int, ...]  # numbers in the record, in the order in which they travel
    bytes: int


def chunks_of(recorded: ProvenRecord) -> tuple[Chunk, ...]:
    """The chunks of a version, in the order in which they are asked for. Equal for versions that were cut alike.

    Each has consecutive cells, in record order, of one group: of those that had the same readers and holders when they
    were sealed (SealedRecord.groups). The chunks of a group are spread over all, so that all holders always send.
    """
    sizes = recorded.cut.sizes
    groups = np.array(recorded.record.groups or [0] * len(sizes), dtype=np.int64)
    order = np.argsort(groups, kind="stable")
    bounds = np.flatnonzero(np.diff(groups[order])) + 1
    least = chunk_bytes(int(sizes.sum()))
    found = []
    for number, own in enumerate(np.split(order, bounds)):
        cells, own_sizes = own.tolist(), sizes[own].tolist()
        runs = join_pieces(own_sizes, least)
        for turn, (first, last) in enumerate(runs):
            chunk = Chunk(tuple(cells[first:last]), sum(own_sizes[first:last]))
            found.append(((turn + 0.5) / len(runs), number, chunk))
    return tuple(chunk for _, _, chunk in sorted(found))


def chunk_key(recorded: ProvenRecord, chunks: Sequence[Chunk]) -> bytes:
    """The key by which relays name a version's chunks, 16 bytes: equal only for equal weights cut alike."""
    counts = np.array([len(chunk.cells) for chunk in chunks], dtype="<u4")
    cells = np.array([cell for chunk in chunks for cell in chunk.cells], dtype="<u4")
    content = recorded.root + recorded.cutting + counts.tobytes() + cells.tobytes()
    return hashlib.sha256(content).digest()[:KEY_BYTES]


def chunks_with(chunks: Sequence[Chunk], cells: Collection[int]) -> list[int]:
    """The numbers of the chunks that have some of these cells, in order."""
    its_cells = frozenset(cells)
    return [number for number, chunk in enumerate(chunks) if not its_cells.isdisjoint(chunk.cells)]
