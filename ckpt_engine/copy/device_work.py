"""Copies by one GPU, to its memory or to pinned memory of the host, from memory that it can reach: each is assigned to
the kernel, a copy engine or torch, and prepared for queueing.

It decides by where the bytes lie (this GPU, a peer GPU, pinned host memory) and how. Within one GPU the kernel copies
everything, in as few launches as tables: the copy engines would pause between hundreds of tensors. Across NVLink and
PCIe the engines reach the link's speed without a multiprocessor, so they copy long runs; the kernel copies small
tensors and rows, such as a row-parallel worker's slices. The rest is left to torch.

It queues and does not wait; `DeviceCopy` does. Reader's side, one thread.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from functools import partial
from typing import NamedTuple

import torch

from ckpt_engine.copy import background, copy_kernel
from ckpt_engine.copy.blocks import RowBlock, align, blocks_of, cut, merge
from ckpt_engine.cuda.driver import CudaDriverError, driver
from ckpt_engine.cuda.elsewhere import lies_elsewhere

Pair = tuple[torch.Tensor, torch.Tensor]


class Side(Enum):
    """Where the bytes of a source lie, as seen from the GPU that copies; or that the destination is on the host."""

    SAME = "the same GPU"
    PEER = "a peer GPU"
    HOST = "pinned host memory"
    TO_HOST = "a GPU, and the destination is pinned host memory"


ENGINE_BYTES = {Side.SAME: 1 << 62, Side.PEER: 1 << 20, Side.HOST: 64 << 10, Side.TO_HOST: 16 << 10}
"""Bytes from which on a run goes to a copy engine: there a launch costs less than the kernel would lose."""

SEGMENT_BYTES = {Side.SAME: 4 << 30, Side.PEER: 512 << 20, Side.HOST: 128 << 20, Side.TO_HOST: 128 << 20}
"""Bytes of a segment: a few milliseconds of work, after which a run can be stopped."""


def _segment_bytes(side: Side) -> int:
    return background.SEGMENT_BYTES if background.is_background() else SEGMENT_BYTES[side]


class Segment(NamedTuple):
    """A part of the work, in its place in the order."""

    bytes: int
    queue: Callable[[int], None]  # queues it on a stream, given by its handle, which is also torch's current stream


class DeviceWork:
    """Copies of pairs (destination, source), all destinations on `device` or in pinned memory of the host, and sources
    that it can reach.

    segments: all of the work. launches: kernels (ours and torch's) an update; engine_copies: by copy engines. Keeps the
    sources' tensors. On a CPU `device` the kernel's interpreter copies, for tests.
    """

    def __init__(self, pairs: Iterable[Pair], device: torch.device) -> None:
        self._device = device
        self._kernel = not copy_kernel.problem()
        self._keep: list[Pair] = []
        self._same: dict[Side, list[RowBlock]] = defaultdict(list)
        self._casts: dict[tuple[Side, torch.dtype, torch.dtype], list[RowBlock]] = defaultdict(list)
        self._others: list[Pair] = []
        self.segments: list[Segment] = []
        self.launches = self.engine_copies = 0
        for destination, source in pairs:
            if destination.numel():
                self._sort(destination, source)
        for side, blocks in self._same.items():
            self._add_blocks(side, blocks)
        for (side, *cast), blocks in self._casts.items():
            table = copy_kernel.CopyTable(blocks, device, 1, (cast[0], cast[1]), near=side is Side.SAME)
            self._add_table(side, table)
        self._add_others()
        self.bytes = sum(segment.bytes for segment in self.segments)

    def _sort(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        if source.device.type == "cuda" and source.device.index != self._device.index:
            # Memory of this process on another GPU. Torch knows whether this one may touch it; a transport maps what it
            # reads for the GPU that reads, so such tensors carry the destination's device.
            self._others.append((destination, source))
            return
        side = self._side(destination, source)
        blocks = blocks_of(destination, source)
        cast = (source.dtype, destination.dtype)
        if blocks is None or not (self._kernel or all(block.rows == 1 for block in blocks)):
            self._others.append((destination, source))
        elif cast[0] == cast[1]:
            self._same[side] += blocks
        elif self._kernel and copy_kernel.can_cast(*cast):
            self._casts[(side, *cast)] += blocks
        else:
            self._others.append((destination, source))
        self._keep.append((destination, source))

    def _side(self, destination: torch.Tensor, source: torch.Tensor) -> Side:
        if self._device.type == "cpu":
            return Side.SAME
        if destination.device.type == "cpu":
            return Side.TO_HOST
        if source.device.type == "cpu":
            return Side.HOST
        if lies_elsewhere(source.data_ptr()):
            return Side.PEER
        try:
            # The driver knows best: a mapping of a peer's memory is labelled as the device that mapped it.
            found = driver().device_of(source.data_ptr())
        except CudaDriverError:
            found = source.device.index
        return Side.SAME if found == self._device.index else Side.PEER

    def _add_blocks(self, side: Side, blocks: Sequence[RowBlock]) -> None:
        tables: dict[tuple[int, bool], list[RowBlock]] = defaultdict(list)
        runs: list[RowBlock] = []
        small: list[RowBlock] = []
        segment_bytes = _segment_bytes(side)
        for block in blocks:
            if block.rows == 1 and (block.length >= ENGINE_BYTES[side] or not self._kernel):
                runs += cut(block, segment_bytes)
            else:
                small.append(block)
        # Only what the kernel copies is merged: an engine refuses a run over two allocations that happen to touch.
        for block in merge(small):
            for part in align(block):
                tables[part.alignment, part.rows > 1].append(part)
        self.engine_copies += len(runs)
        batch: list[RowBlock] = []
        size = 0
        for run in runs:
            batch.append(run)
            size += run.length
            if size >= segment_bytes or run is runs[-1]:
                self.segments.append(Segment(size, partial(_queue_runs, batch)))
                batch, size = [], 0
        for (alignment, _), parts in tables.items():
            self._add_table(side, copy_kernel.CopyTable(parts, self._device, alignment, near=side is Side.SAME))

    def _add_table(self, side: Side, table: copy_kernel.CopyTable) -> None:
        for first, end, size in table.segments(_segment_bytes(side)):
            self.segments.append(Segment(size, partial(_queue_lines, table, first, end)))
            self.launches += 1

    def _add_others(self) -> None:
        groups: dict[tuple[torch.device, torch.dtype, torch.dtype], list[Pair]] = defaultdict(list)
        for destination, source in self._others:
            groups[source.device, source.dtype, destination.dtype].append((destination, source))
        for pairs in groups.values():
            self.segments.append(Segment(sum(pair[0].nbytes for pair in pairs), partial(_queue_torch, pairs)))
            self.launches += len(pairs)


def _queue_runs(runs: Sequence[RowBlock], stream: int) -> None:
    copy = driver().copy_async
    for run in runs:
        copy(run.destination, run.source, run.length, stream)


def _queue_lines(table: copy_kernel.CopyTable, first: int, end: int, _stream: int) -> None:
    table.launch(first, end)


def _queue_torch(pairs: Sequence[Pair], _stream: int) -> None:
    for destination, source in pairs:
        destination.copy_(source, non_blocking=True)
