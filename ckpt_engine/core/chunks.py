"""The chunks of a version: what relays ask each other for, verify and pass on. Pure.

A chunk is a list of whole cells of the sealed record, since only whole cells can be compared with what was sealed. The
chunks follow from the record alone, whatever a relay holds and however it lays that out, so relays with different needs
share what they share. It does not decide which relay brings which chunk.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ckpt_engine.core.chunk_sizes import chunk_bytes, join_pieces
from ckpt_engine.core.dtypes import itemsize
from ckpt_engine.core.sealed_record import ProvenRecord

KEY_BYTES = 16


class Chunk(NamedTuple):
    """Cells that travel together: cell after cell, each row-major, without gaps."""

    cells: tuple[int, ...]  # numbers in the record, in the order in which they travel
    bytes: int


def chunks_of(recorded: ProvenRecord) -> tuple[Chunk, ...]:
    """The chunks of a version: all cells with bytes in them, in record order within each group of cells that had the
    same readers and holders when they were sealed (SealedRecord.groups)."""
    sizes = [
        box.volume * itemsize(spec.dtype)
        for spec, boxes in zip(recorded.record.manifest.tensors, recorded.boxes, strict=True)
        for box in boxes
    ]
    groups = np.array(recorded.record.groups or [0] * len(sizes), dtype=np.int64)
    order = [int(cell) for cell in np.argsort(groups, kind="stable") if sizes[cell]]
    bounds = [0, *(at for at, (one, next_one) in enumerate(pairwise(order), 1) if groups[one] != groups[next_one])]
    least = chunk_bytes(sum(sizes))
    found = []
    for start, stop in pairwise([*bounds, len(order)]):
        cells = order[start:stop]
        for first, last in join_pieces([sizes[cell] for cell in cells], least):
            own = tuple(cells[first:last])
            found.append(Chunk(own, sum(sizes[cell] for cell in own)))
    return tuple(found)


def chunk_key(recorded: ProvenRecord, chunks: Sequence[Chunk]) -> bytes:
    """The key by which relays name a version's chunks, 16 bytes: equal only for equal weights cut alike."""
    found = hashlib.sha256(recorded.root + recorded.cutting)
    for chunk in chunks:
        found.update(np.array([len(chunk.cells), *chunk.cells], dtype="<u4").tobytes())
    return found.digest()[:KEY_BYTES]


def chunks_with(chunks: Sequence[Chunk], cells: Collection[int]) -> list[int]:
    """The numbers of the chunks that have some of these cells, in order."""
    wanted = frozenset(cells)
    return [number for number, chunk in enumerate(chunks) if not wanted.isdisjoint(chunk.cells)]
