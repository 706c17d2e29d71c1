"""Pieces of a version that are brought together, and digested as they then lie in the slot.

Memory of this host, as it is served, is copied and digested in one pass, on the threads that digest host memory. All
else is brought first: bytes of a GPU, and those that must be cast. Then processors digest it (what GPUs bring, as it
arrives). Where processors are few, the GPU that brought it reads it back and digests it. A digest of what
was sent would prove nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch

from ckpt_engine.copy.prepared import PreparedCopy, QueueableCopy, Queued
from ckpt_engine.core.boxes import Box
from ckpt_engine.digest.host import HostDigests
from ckpt_engine.relay.read_back import Boxes, digests_by_gpu, staged_bytes
from ckpt_engine.relay.sources import Reading
from ckpt_engine.transport.base import Move

BATCH_BYTES = 256 << 20
"""The most between two looks at the clock; also the most of a tensor that is read at once."""

GPU_BATCH_BYTES = 512 << 20
"""The same for pieces on a GPU that reads them back: 10 ms of its link, next to which the start of a batch costs
little."""

GPU_PIECE_BYTES = 64 << 20
"""The same for pieces that a GPU brings and processors digest as they arrive. Also the most of a tensor on a GPU that
is read at once, and of the last batches, whose digests overlap with no further copy."""

LEAST_AHEAD_BYTES = 16 << 20
"""As so large a batch counts at least, where batches are queued ahead."""

AHEAD_BYTES = 512 << 20
"""Queued on a GPU beyond the batch that is waited for, so that its link never waits for this process."""

READ_BACK: int | None = None
"""Every n-th batch that a GPU brings is digested by that GPU, which reads it back over its link: 0 none, 1 all. That
slows down copies that arrive meanwhile. None: 2 where processors cannot keep up with a link, else 0."""

ENOUGH_THREADS = 12
"""Threads that digest as fast as a link brings."""

_POLL_SECONDS = 50e-6
_LONGEST_POLL_SECONDS = 200e-6

Words = npt.NDArray[np.uint64]
Cells = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ReadPiece:
    """A part of an atom that one read brings."""

    cell: int
    tensor: int
    box: Box
    destination: torch.Tensor
    holders: tuple[Reading, ...]  # in the order in which they are asked

    @property
    def bytes(self) -> int:
        return self.destination.nbytes


class PieceBatch:
    """Pieces that are brought together. readings: the source of each.

    `bring`, then `digest`, maybe on another thread. `start`, `bring` and `abandon` belong to one thread at a time.
    """

    def __init__(self, pieces: Sequence[ReadPiece], readings: Sequence[Reading], stage_bytes: int = 0) -> None:
        """stage_bytes: memory of each GPU for what it reads back; 0: it reads nothing back."""
        self.pieces, self.readings = pieces, readings
        self.cells = np.fromiter((piece.cell for piece in pieces), dtype=np.int64, count=len(pieces))
        plain = [index for index, reading in enumerate(readings) if reading.is_plain]
        other = [index for index, reading in enumerate(readings) if not reading.is_plain]
        by_gpu = self._by_gpu(other) if stage_bytes else {}
        near = self._near_indices = sorted(set(other).difference(*by_gpu.values()))
        self._order = np.array([*plain, *near, *chain.from_iterable(by_gpu.values())], dtype=np.int64)
        self._plain = HostDigests(
            self._boxes(plain), sources=[readings[index].view(pieces[index].box) for index in plain]
        )
        self._copies = _copies([(pieces[index], readings[index]) for index in other])
        self._on_gpus = all(readings[index].gpu is not None for index in other)
        self._queued: list[Queued] | None = None  # None: not started
        self._near = HostDigests(self._boxes(near))
        self._read_back = [digests_by_gpu(self._boxes(group), gpu, stage_bytes) for gpu, group in by_gpu.items()]

    @property
    def bytes(self) -> int:
        return sum(piece.bytes for piece in self.pieces)

    def by_source(self) -> Iterator[tuple[str, Cells, Words]]:
        """The cells of the pieces of each source that is read, and their bytes."""
        for source in dict.fromkeys(reading.source for reading in self.readings):
            its = [index for index, reading in enumerate(self.readings) if reading.source == source]
            yield source, self.cells[its], np.array([self.pieces[index].bytes for index in its], dtype=np.uint64)

    @property
    def is_brought_first(self) -> bool:
        """Whether `bring` has anything to do."""
        return bool(self._copies)

    @property
    def ahead(self) -> int:
        """How many of the next batches to start while this one is waited for."""
        return 1 + AHEAD_BYTES // max(self.bytes, LEAST_AHEAD_BYTES) if self._copies and self._on_gpus else 0

    @property
    def boxes(self) -> Boxes | None:
        """Where its pieces lie, if GPUs bring all of it and processors digest it; else None."""
        ours = self._copies and self._on_gpus and len(self._near_indices) == len(self.pieces)
        return self._boxes(range(len(self.pieces))) if ours else None

    def start(self) -> None:
        """Queues a GPU's copies, if that was not done yet. Does not wait. Raises what a transport raises."""
        if self._on_gpus and self._queued is None:
            self._queued = []
            for copy in self._copies:
                queued = copy.queue() if isinstance(copy, QueueableCopy) else None
                if queued is not None:
                    self._queued.append(queued)

    def bring(self, carry_on: Callable[[], None]) -> None:
        """Brings the pieces that must arrive before they can be digested. carry_on: called while this waits; an
        exception of it ends the batch. Raises what a transport raises."""
        self.start()
        for queued in self._queued or ():
            _await(queued.finished, carry_on)
        if len(self._queued or ()) < len(self._copies):
            for copy in self._copies:
                copy.run()
        self._queued = None

    def digest(self) -> Words:
        """Brings the rest, and returns the digest of each piece as it has arrived."""
        found = np.zeros(len(self.pieces), dtype=np.uint64)
        read_back = [value for digests in self._read_back for value in digests.run()]
        found[self._order] = np.array([*self._plain.run(), *self._near.run(), *read_back], dtype=np.uint64)
        return found

    def abandon(self) -> None:
        """Gives the batch up. When it returns, nothing of it can land."""
        queued, self._queued = self._queued, None
        for each in queued or ():
            each.drain()

    def _by_gpu(self, indices: Sequence[int]) -> dict[int, list[int]]:
        """Pieces that a GPU brings into pinned memory, by GPU."""
        found: dict[int, list[int]] = {}
        for index in indices:
            gpu = self.readings[index].gpu
            if gpu is not None and self.pieces[index].destination.is_pinned():
                found.setdefault(gpu, []).append(index)
        return found

    def _boxes(self, indices: Sequence[int]) -> Boxes:
        return [(self.pieces[index].destination, self.pieces[index].box.start) for index in indices]


def _await(finished: Callable[[], bool], carry_on: Callable[[], None]) -> None:
    pause = _POLL_SECONDS
    while not finished():
        carry_on()
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_POLL_SECONDS)


def _copies(pairs: Sequence[tuple[ReadPiece, Reading]]) -> list[PreparedCopy]:
    moves: dict[int, tuple[Reading, list[Move]]] = {}
    for piece, reading in pairs:
        _, found = moves.setdefault(id(reading.opened), (reading, []))
        found.append(reading.move(piece.box, piece.destination))
    return [reading.opened.prepare(found) for reading, found in moves.values()]


def parts_of(piece: ReadPiece) -> list[ReadPiece]:
    """The parts of a piece, cut along its longest axis so that none takes much longer than a batch."""
    most = _most(piece.holders[0], 0)
    count = -(-piece.bytes // most)
    if count <= 1:
        return [piece] if piece.bytes else []
    start, stop = piece.box
    shape = piece.box.shape
    axis = next(axis for axis, extent in enumerate(shape) if extent > 1)
    step = -(-shape[axis] // count)
    found = []
    for first in range(0, shape[axis], step):
        length = min(step, shape[axis] - first)
        low = (*start[:axis], start[axis] + first, *start[axis + 1 :])
        high = (*stop[:axis], start[axis] + first + length, *stop[axis + 1 :])
        part = piece.destination.narrow(axis, first, length)
        found.append(ReadPiece(piece.cell, piece.tensor, Box(low, high), part, piece.holders))
    return found


def _most(reading: Reading, remaining: int) -> int:
    """The most bytes of a batch. remaining: bytes still to be brought, with those of the batch."""
    if reading.gpu is None:
        return BATCH_BYTES
    most = remaining // 2 if _read_back() else 0
    return min(GPU_BATCH_BYTES, max(GPU_PIECE_BYTES, most))


def _read_back() -> int:
    if READ_BACK is not None:
        return READ_BACK
    return 0 if torch.get_num_threads() >= ENOUGH_THREADS else 2


def in_batches(pieces: Sequence[tuple[ReadPiece, Reading]]) -> list[PieceBatch]:
    """Batches in order. The last batches of GPUs are small."""
    parts: list[list[tuple[ReadPiece, Reading]]] = []
    size, most = 0, 0
    remaining = sum(piece.bytes for piece, _ in pieces)
    for piece, reading in pieces:
        if not parts or size + piece.bytes > most:
            parts.append([])
            size, most = 0, _most(reading, remaining)
        parts[-1].append((piece, reading))
        size += piece.bytes
        remaining -= piece.bytes
    staged = (
        sum(staged_bytes(piece.destination) for piece, reading in part if reading.gpu is not None) for part in parts
    )
    stage_bytes = max(staged, default=0)
    every = _read_back()
    return [
        PieceBatch(
            [piece for piece, _ in part],
            [reading for _, reading in part],
            stage_bytes if every and number % every == 0 else 0,
        )
        for number, part in enumerate(parts)
    ]
