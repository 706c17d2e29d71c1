"""The geometry of a copy: which rows of bytes go from which address to which.

Pure arithmetic over addresses, shapes and strides; it touches no memory and knows no device. Axes that are contiguous
in both views of a pair are merged, so that a whole tensor is one run of bytes, and a row-parallel slice one block of
rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise, product
from math import gcd, prod
from typing import NamedTuple

import torch

BLOCKS_LIMIT = 4096
"""Most blocks of a pair; one that needs more (for example a transposed matrix) is scattered."""

_LANE_BYTES = 16
_SPLIT_BYTES = 4096


class RowBlock(NamedTuple):
    """Rows of equal length, evenly spaced at both ends."""

    destination: int  # address of the first row
    source: int  # the same at the source
    length: int  # bytes of a row at the destination; a cast may have another number at the source
    rows: int = 1
    destination_pitch: int = 0  # bytes from row to row
    source_pitch: int = 0

    @property
    def bytes(self) -> int:
        return self.length * self.rows

    @property
    def alignment(self) -> int:
        """The largest of 16, 8, 4, 2 and 1 that divides everything; for copies of one dtype."""
        pitches = self[4:] if self.rows > 1 else ()
        return gcd(_LANE_BYTES, *self[:3], *pitches)

    def unroll(self) -> Iterator[RowBlock]:
        """The rows, each a block."""
        for row in range(self.rows):
            yield RowBlock(
                self.destination + row * self.destination_pitch, self.source + row * self.source_pitch, self.length
            )


def blocks_of(destination: torch.Tensor, source: torch.Tensor) -> list[RowBlock] | None:
    """The pair as blocks; None if it is scattered. Equal shapes, not empty; dtypes may differ in size.

    The order of elements within a row is that of the destination's memory.
    """
    wide, narrow = destination.element_size(), source.element_size()
    axes = _merge_axes(destination.shape, destination.stride(), source.stride())
    length, outer = 1, axes
    if axes and axes[-1][1:] == (1, 1):
        length, outer = axes[-1][0], axes[:-1]
    if len(outer) > 1 and length * wide < _LANE_BYTES:
        return None
    # The longest axis becomes the rows of a block; the others count blocks.
    rows = max(range(len(outer)), key=lambda axis: outer[axis][0]) if outer else 0
    others = [axis for axis in outer if axis is not outer[rows]] if outer else []
    if prod(extent for extent, _, _ in others) > BLOCKS_LIMIT:
        return None
    count, destination_stride, source_stride = outer[rows] if outer else (1, 0, 0)
    return [
        RowBlock(
            destination.data_ptr() + wide * sum(i * axis[1] for i, axis in zip(place, others, strict=True)),
            source.data_ptr() + narrow * sum(i * axis[2] for i, axis in zip(place, others, strict=True)),
            length * wide,
            count,
            destination_stride * wide,
            source_stride * narrow,
        )
        for place in product(*(range(extent) for extent, _, _ in others))
    ]


def merge(blocks: Sequence[RowBlock]) -> list[RowBlock]:
    """Joins runs that touch each other at both ends. Returns blocks in order of destination; for one dtype."""
    joined: list[RowBlock] = []
    for block in sorted(blocks):
        last = joined[-1] if joined else None
        if (
            last is not None
            and last.rows == block.rows == 1
            and last.destination + last.length == block.destination
            and last.source + last.length == block.source
        ):
            joined[-1] = last._replace(length=last.length + block.length)
        else:
            joined.append(block)
    return joined


def _merge_axes(
    shape: Sequence[int], destination_strides: Sequence[int], source_strides: Sequence[int]
) -> list[tuple[int, int, int]]:
    """Axes (extent, destination's stride, source's stride), slowest first in the destination; as few as possible."""
    axes = sorted(
        (axis for axis in zip(shape, destination_strides, source_strides, strict=True) if axis[0] > 1),
        key=lambda axis: axis[1:],
        reverse=True,
    )
    found: list[tuple[int, int, int]] = []
    for extent, slow, far in axes:
        if found and found[-1][1:] == (slow * extent, far * extent):
            found[-1] = found[-1][0] * extent, slow, far
        else:
            found.append((extent, slow, far))
    return found


def align(run: RowBlock) -> list[RowBlock]:
    """Splits a run into up to three parts, if worthwhile; the middle one is as well aligned as both ends allow."""
    width = gcd(_LANE_BYTES, run.destination - run.source)
    if run.rows > 1 or run.alignment >= width or run.length < _SPLIT_BYTES:
        return [run]
    head = -run.destination % width
    body = (run.length - head) // width * width
    cuts = (0, head, head + body, run.length)
    return [
        RowBlock(run.destination + first, run.source + first, end - first)
        for first, end in pairwise(cuts)
        if end > first
    ]


def cut(run: RowBlock, most_bytes: int) -> Iterator[RowBlock]:
    """Splits a run into parts of at most `most_bytes`."""
    for first in range(0, run.length, most_bytes):
        yield RowBlock(run.destination + first, run.source + first, min(most_bytes, run.length - first))
