"""Fetched bytes that land where they belong: no staging memory, each byte is written once.

For boxes that lie in the landing memory and need no cast: a relay's slot. Boxes are cut into runs that are contiguous
on both sides; runs that follow each other on both sides become one, with the padding between them. The caller compares
landed bytes with the sealed record before it uses them. Reader's side, one thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

import torch

from ckpt_engine.core.dtypes import itemsize
from ckpt_engine.core.problems import invalid
from ckpt_engine.transport.base import ByteRun, Move
from ckpt_engine.transport.fetched import FetchedRegions, Reads
from ckpt_engine.transport.mapped import check_destination, span_of
from ckpt_engine.v1.weights_pb2 import Region

LONGEST_RUN = 16 << 20
"""Bytes; longer runs are asked for in parts."""


class Landing:
    """Prepared moves that are read together. padded: unused bytes behind each destination.

    Raises INVALID_ARGUMENT for a move that does not fit, or whose destination is not in the landing memory.
    """

    def __init__(self, regions: FetchedRegions, moves: Sequence[Move], padded: Sequence[int]) -> None:
        self._regions = regions
        self.bytes = sum(move.destination.nbytes for move in moves)
        found: dict[bytes, tuple[Region, list[ByteRun]]] = {}
        behind: dict[bytes, int] = {}
        for move, padding in zip(moves, padded, strict=True):
            _, runs = found.setdefault(move.region.locator, (move.region, []))
            gap = behind.get(move.region.locator, 0)
            for run in _runs(move, regions.landing):
                _append(runs, run, gap)
                gap = 0
            behind[move.region.locator] = padding
        self._requests = [(region, [part for run in runs for part in _parts(run)]) for region, runs in found.values()]
        self._reads: Reads | None = None

    def start(self) -> None:
        """Asks for all of it. Does not wait. Raises what the links raise; then they are severed."""
        try:
            self._reads = Reads(self._regions, self._requests)
        except BaseException:
            self._regions.sever()
            raise

    @property
    def started(self) -> bool:
        """Whether bytes may land now."""
        return self._reads is not None

    def finished(self) -> bool:
        """Whether all of it has landed. Does not wait. Raises what the links raise; then they are severed."""
        assert self._reads is not None, "start comes first"
        try:
            is_over = self._reads.finished()
        except BaseException:
            self.sever()
            raise
        if is_over:
            self._reads = None
        return is_over

    def sever(self) -> None:
        """Severs the links: when it returns, nothing can land over them any more, also for other landings."""
        self._reads = None
        self._regions.sever()


def _runs(move: Move, landing: torch.Tensor) -> Iterator[ByteRun]:
    """A move in runs that are contiguous on both sides, in the order in which they lie there."""
    check_destination(move)
    destination, width = move.destination, itemsize(move.dtype)
    if move.stored and move.stored != move.dtype:
        raise invalid(f"a piece that is stored as {move.stored} cannot land as {move.dtype}")
    if not span_of(move.region.size, move.offset, move.shape, move.stride, width):
        return
    first = destination.data_ptr() - landing.data_ptr()
    span_of(landing.nbytes, first, destination.shape, destination.stride(), width)
    axes = [axis for axis, extent in enumerate(move.shape) if extent > 1]
    axes.sort(key=lambda axis: (move.stride[axis], destination.stride(axis)))
    length = inner = 1
    for number, axis in enumerate(axes):
        if move.stride[axis] != length or destination.stride(axis) != length:
            break
        length, inner = length * move.shape[axis], number + 1
    outer = axes[inner:][::-1]
    for place in product(*(range(move.shape[axis]) for axis in outer)):
        remote = sum(at * move.stride[axis] for at, axis in zip(place, outer, strict=True))
        local = sum(at * destination.stride(axis) for at, axis in zip(place, outer, strict=True))
        yield ByteRun(move.offset + remote * width, first + local * width, length * width)


def _append(runs: list[ByteRun], run: ByteRun, padding: int) -> None:
    """Adds a run; joins it to the last one if it follows on both sides with at most `padding` in between."""
    if runs:
        last = runs[-1]
        gap = run.local - (last.local + last.length)
        if 0 <= gap <= padding and run.remote - (last.remote + last.length) == gap:
            runs[-1] = ByteRun(last.remote, last.local, last.length + gap + run.length)
            return
    runs.append(run)


def _parts(run: ByteRun) -> Iterator[ByteRun]:
    for at in range(0, run.length, LONGEST_RUN):
        yield ByteRun(run.remote + at, run.local + at, min(LONGEST_RUN, run.length - at))
