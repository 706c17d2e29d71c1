"""One Triton kernel that copies any number of blocks, rows and casts in one launch.

A `CopyTable` is made once: a line for each program of the kernel, with what it copies. It lies on the GPU, so an update
is one launch and no Python for each tensor. Addresses may be of the same GPU, of a peer, or of pinned host memory.
Needs triton, which comes with CUDA builds of torch; `problem()` says what is missing. Compiling takes some 0.2 s a
variant, the first time on a host: a table does it when it is made.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import torch

from ckpt_engine.copy.blocks import RowBlock

try:
    import triton
    import triton.language as tl
except ImportError as error:
    _MISSING = f"triton cannot be imported: {error}"
else:
    _MISSING = ""

PROGRAM_BYTES = 64 << 10
"""What a program copies, at most."""

_LANES = 2048
_ROW_LIMIT = 1 << 30  # bytes; lanes within a row are counted in 32 bits
_BYTES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
_CAST = {torch.float32, torch.float16, torch.bfloat16}


def problem() -> str:
    """Why the kernel cannot be used; empty if it can."""
    return _MISSING


def can_cast(source: torch.dtype, destination: torch.dtype) -> bool:
    """Whether the kernel casts so, rounding to nearest, ties to even, as torch does."""
    return source in _CAST and destination in _CAST


def warm_up(device: torch.device, dtypes: Collection[torch.dtype]) -> None:
    """Compiles the variants that tables of these dtypes are likely to need; does nothing if triton is missing."""
    if problem():
        return
    for rows, near in product((1, 2), (True, False)):
        for alignment in (width for width in _BYTES if width >= min((dtype.itemsize for dtype in dtypes), default=16)):
            CopyTable([RowBlock(0, 0, alignment, rows, alignment, alignment)], device, alignment, near=near)
        for dtype in dtypes:
            if dtype != torch.float32 and can_cast(torch.float32, dtype):
                for count in (1, 4):
                    block = RowBlock(0, 0, count * dtype.itemsize, rows, count * dtype.itemsize, count * 4)
                    CopyTable([block], device, 1, (torch.float32, dtype), near)


class CopyTable:
    """Blocks of one kind, ready to be copied by launches on `device`'s current stream.

    alignment: of all blocks, if they are of one dtype. cast: (source's dtype, destination's dtype). near: both ends lie
    on this GPU; its memory is fastest with twice the warps and no hint for its cache (2,028 instead of 1,973 GB/s on an
    H200). `bytes` are counted at the destination. It does not keep the memory alive that it points to.
    """

    def __init__(
        self,
        blocks: Sequence[RowBlock],
        device: torch.device,
        alignment: int,
        cast: tuple[torch.dtype, torch.dtype] | None = None,
        near: bool = False,
    ) -> None:
        self._warps, self._evict = (16, "") if near else (8, "evict_first")
        blocks = [part for block in blocks for part in (block.unroll() if block.length > _ROW_LIMIT else (block,))]
        self.rows = any(block.rows > 1 for block in blocks)
        if cast is None:
            self._source = self._destination = _BYTES[alignment]
            self._per = alignment // self._source.itemsize
        else:
            self._source, self._destination = cast
            self._per = 4 if all(_four_at_once(block, *cast) for block in blocks) else 1
        lines = _lines(blocks, self.rows, self._source.itemsize * self._per, self._destination.itemsize * self._per)
        self._sizes = lines[:, 2] * (self._destination.itemsize * self._per)
        self.bytes = int(self._sizes.sum())
        self._table = torch.from_numpy(lines).to(device)
        self.launch(0, 0)

    def segments(self, most_bytes: int) -> list[tuple[int, int, int]]:
        """(first line, end, bytes) of consecutive parts of about `most_bytes`."""
        ends = np.cumsum(self._sizes)
        found = []
        first, before = 0, 0
        while first < len(ends):
            end = max(int(np.searchsorted(ends, before + most_bytes, side="right")), first + 1)
            found.append((first, end, int(ends[end - 1]) - before))
            first, before = end, int(ends[end - 1])
        return found

    def launch(self, first: int, end: int) -> None:
        """Queues these lines. Without lines it only compiles the kernel, unless that was done."""
        source_bytes, destination_bytes = self._source.itemsize * self._per, self._destination.itemsize * self._per
        _kernel()[(max(end - first, 1),)](
            self._table,
            first,
            end,
            SOURCE=_triton_dtype(self._source),
            DESTINATION=_triton_dtype(self._destination),
            SOURCE_BYTES=source_bytes,
            DESTINATION_BYTES=destination_bytes,
            PER=self._per,
            ROWS=self.rows,
            LANES=_LANES,
            PARTS=-(-_most_lanes(source_bytes, destination_bytes) // _LANES),
            EVICT=self._evict,
            num_warps=self._warps,
        )


def _four_at_once(block: RowBlock, source: torch.dtype, destination: torch.dtype) -> bool:
    """Whether a cast can take four elements a lane: addresses, lengths and pitches must be multiples of their size."""
    destination_parts = (block.destination, block.length, block.destination_pitch)
    source_parts = (block.source, block.source_pitch)
    return not any(part % (4 * destination.itemsize) for part in destination_parts) and not any(
        part % (4 * source.itemsize) for part in source_parts
    )


def _lines(
    blocks: Sequence[RowBlock], rows: bool, source_bytes: int, destination_bytes: int
) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The table: (destination, source, lanes) a line. Rows have four columns more: the first lane in the line's first
    row, lanes in a row, and both pitches in lanes. source_bytes, destination_bytes: of a lane."""
    table = np.array([tuple(block) for block in blocks], np.int64).reshape(-1, 6)
    table[:, 2] //= destination_bytes
    most = _most_lanes(source_bytes, destination_bytes)
    parts = -(-table[:, 2] * table[:, 3] // most)
    owner = np.repeat(np.arange(len(table)), parts)
    part = np.arange(len(owner)) - np.repeat(np.cumsum(parts) - parts, parts)
    of = table[owner]
    first = part * most
    lanes = np.minimum(most, of[:, 2] * of[:, 3] - first)
    if not rows:
        return np.ascontiguousarray(
            np.stack([of[:, 0] + first * destination_bytes, of[:, 1] + first * source_bytes, lanes], 1)
        )
    row, lane = np.divmod(first, of[:, 2])
    addresses = of[:, 0] + row * of[:, 4], of[:, 1] + row * of[:, 5]
    steps = lane, of[:, 2], of[:, 4] // destination_bytes, of[:, 5] // source_bytes
    return np.ascontiguousarray(np.stack([*addresses, lanes, *steps], 1))


def _most_lanes(source_bytes: int, destination_bytes: int) -> int:
    return PROGRAM_BYTES // max(source_bytes, destination_bytes)


@cache
def _triton_dtype(dtype: torch.dtype) -> Any:
    return getattr(tl, str(dtype).removeprefix("torch."))


@cache
def _kernel() -> Any:
    # A launch must never compile anything, whatever its bounds are.
    return triton.jit(_copy_lines, do_not_specialize=["first_line", "end_line"])


def _copy_lines(  # type: ignore[no-untyped-def]
    table,
    first_line,
    end_line,
    SOURCE: tl.constexpr,  # noqa: N803
    DESTINATION: tl.constexpr,  # noqa: N803
    SOURCE_BYTES: tl.constexpr,  # noqa: N803
    DESTINATION_BYTES: tl.constexpr,  # noqa: N803
    PER: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    LANES: tl.constexpr,  # noqa: N803
    PARTS: tl.constexpr,  # noqa: N803
    EVICT: tl.constexpr,  # noqa: N803
):
    """Program p copies line `first_line + p`: LANES lanes at a time, of PER elements each."""
    line = first_line + tl.program_id(0).to(tl.int64)
    entry = table + line * (7 if ROWS else 3)
    destination = tl.load(entry).to(tl.pointer_type(DESTINATION))
    source = tl.load(entry + 1).to(tl.pointer_type(SOURCE))
    destination = tl.multiple_of(destination, DESTINATION_BYTES)
    source = tl.multiple_of(source, SOURCE_BYTES)
    lanes = tl.where(line < end_line, tl.load(entry + 2), 0).to(tl.int32)
    element = tl.arange(0, PER)[None, :]
    if ROWS:
        # Narrow, since a 64-bit division costs as much as the copy.
        lane_of_first = tl.load(entry + 3).to(tl.int32)
        in_a_row = tl.load(entry + 4).to(tl.int32)
        destination_pitch = tl.load(entry + 5)
        source_pitch = tl.load(entry + 6)
    for part in range(PARTS):
        lane = part * LANES + tl.arange(0, LANES)[:, None]
        if ROWS:
            position = lane_of_first + lane
            row = position // in_a_row
            within = position - row * in_a_row
            write_at = row * destination_pitch + within
            read_at = row * source_pitch + within
        else:
            write_at = lane
            read_at = lane
        inside = (lane < lanes) & (element < PER)
        values = tl.load(source + read_at * PER + element, mask=inside, eviction_policy=EVICT)
        tl.store(destination + write_at * PER + element, values.to(DESTINATION), mask=inside, eviction_policy=EVICT)
