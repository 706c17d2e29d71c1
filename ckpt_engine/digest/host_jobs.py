"""How a CPU walks through boxes to digest them: boxes in, jobs for digest/host_kernel.py out. Needs Numba."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import NamedTuple

import numpy as np

from ckpt_engine.digest import host_kernel as field
from ckpt_engine.digest.factors import INDEX_STEP, LANE_AXIS, MASK, Words, hashed, word, words
from ckpt_engine.digest.finite import FiniteRule
from ckpt_engine.digest.host_kernel import COLUMN_AXES, COLUMNS, FIELDS, FIRST_AXIS

_JOB_BYTES = 1 << 20  # at most; less would spend too much on the factors of columns, more shares out badly
_WIDE = 512  # columns that are worth a row


class _BoxAxis(NamedTuple):
    """An axis of a box."""

    hash: int  # the number that `factors.word` mixes for its first coordinate
    length: int
    step: int  # bytes from one coordinate to the next
    source_step: int  # the same in the memory that is copied

    def parts(self, most: int) -> list[tuple[int, _BoxAxis]]:
        """Parts of nearly equal length, `most` at most, each with its first index."""
        length = -(-self.length // -(-self.length // most))
        return [
            (at, self._replace(hash=(self.hash + at * INDEX_STEP) & MASK, length=min(length, self.length - at)))
            for at in range(0, self.length, length)
        ]


_NO_AXIS = _BoxAxis(0, 1, 0, 0)
"""A single coordinate with factor 1: a hash of 0 is mixed to 0, and made odd."""


def join(layouts: Sequence[Words]) -> tuple[Words, np.ndarray[tuple[int], np.dtype[np.intp]], Words]:
    """The jobs of all boxes; for each job its box, and the bytes of all jobs up to it."""
    jobs = np.concatenate([np.empty((0, FIELDS), dtype=np.uint64), *layouts])
    of_job = np.repeat(np.arange(len(layouts)), [len(layout) for layout in layouts])
    return jobs, of_job, np.cumsum(jobs[:, field.ROWS] * jobs[:, field.WIDTH] * jobs[:, field.UNIT])


def look_for(
    jobs: Words, of_job: np.ndarray[tuple[int], np.dtype[np.intp]], rules: Sequence[FiniteRule | None]
) -> None:
    """Sets the jobs of these boxes to find greatest lanes, by the boxes' rules; None: not of this box."""
    if any(rules):
        of_box = np.array([rule[:3] if rule else (0, 0, 0) for rule in rules], dtype=np.uint64)
        jobs[:, field.FLIP : field.GUARD + 1] = of_box[of_job]


def lie_alike(shape: Sequence[int], strides: Sequence[int], source_strides: Sequence[int], itemsize: int) -> bool:
    """Whether neighbours in a box are neighbours in the memory that is copied to it, so that rows can be copied."""
    steps = [
        (stride, other) for length, stride, other in zip(shape, strides, source_strides, strict=True) if length > 1
    ]
    return itemsize > 2 or min(steps, default=(1, 1)) == (1, 1)


@lru_cache(maxsize=1024)
def jobs_of(
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    source_strides: tuple[int, ...] | None,
    start: tuple[int, ...],
    itemsize: int,
    seed: int,
) -> Words:
    """The jobs of a box, addresses counting from its first element's. Not to be written to.

    strides: in elements. source_strides: of memory that is copied to the box first, if any; see `lie_alike`.
    """
    if 0 in shape:
        return np.empty((0, FIELDS), dtype=np.uint64)
    lanes, unit, scale = max(itemsize // 2, 1), min(itemsize, 2), 1
    others = source_strides or (0,) * len(shape)
    axes = []
    for number, (first, length, stride, other) in enumerate(zip(start, shape, strides, others, strict=True), 1):
        if length == 1:
            scale = scale * word(seed, number, first) & MASK
        else:
            axes.append(_BoxAxis(hashed(seed, number, first), length, stride * itemsize, other * itemsize))
    axes.sort(key=lambda axis: -axis.step)
    source_unit = unit if source_strides is not None else 0
    if lanes > 1:
        axes.append(_BoxAxis(hashed(seed, LANE_AXIS, 0), lanes, unit, source_unit))
    else:
        scale = scale * word(seed, LANE_AXIS, 0) & MASK
    axes = axes or [_NO_AXIS._replace(step=unit, source_step=source_unit)]
    place, most = _columns(axes)
    (slowest, *columns), outer = axes[place:], axes[:place]
    rows = outer.pop(max(range(place), key=lambda at: outer[at].length)) if place else _NO_AXIS
    below = prod(axis.length for axis in columns)
    offsets, scales = _planes(outer, scale)
    blocks = slowest.parts(most)
    parts = rows.parts(max(_JOB_BYTES // (blocks[0][1].length * below * unit), 1))
    jobs = np.zeros((len(scales), len(blocks), len(parts), FIELDS), dtype=np.uint64)
    jobs[..., field.ADDRESS : field.SOURCE + 1] = offsets[:, None, None]
    jobs[..., field.SCALE] = scales[:, None, None]
    jobs[..., field.ROW_STEP], jobs[..., field.SOURCE_ROW_STEP] = rows.step, rows.source_step
    jobs[..., field.UNIT], jobs[..., field.COLUMN_STEP] = unit, axes[-1].step // unit
    jobs[..., field.AXES] = 1 + len(columns)
    for index, axis in enumerate(columns, 1):
        jobs[..., FIRST_AXIS + 2 * index : FIRST_AXIS + 2 * index + 2] = axis.hash, axis.length
    for index, (at, part) in enumerate(parts):
        jobs[:, :, index, field.ADDRESS : field.SOURCE + 1] += _bytes(rows, at)
        jobs[:, :, index, field.ROWS], jobs[:, :, index, field.ROW_HASH] = part.length, part.hash
    for index, (at, part) in enumerate(blocks):
        jobs[:, index, :, field.ADDRESS : field.SOURCE + 1] += _bytes(slowest, at)
        jobs[:, index, :, field.WIDTH] = part.length * below
        jobs[:, index, :, FIRST_AXIS : FIRST_AXIS + 2] = part.hash, part.length
    return jobs.reshape(-1, FIELDS)


def _columns(axes: Sequence[_BoxAxis]) -> tuple[int, int]:
    """The place of the slowest axis that a row spans, and how long parts of it may be."""
    place, width, fastest = len(axes), 1, axes[-1]
    while place and len(axes) - place < COLUMN_AXES:
        axis = axes[place - 1]
        if (axis.step, axis.source_step) != (fastest.step * width, fastest.source_step * width):
            break
        if width * axis.length > COLUMNS:
            return (place, axes[place].length) if width >= _WIDE else (place - 1, COLUMNS // width)
        place, width = place - 1, width * axis.length
    return place, axes[place].length


def _planes(axes: Sequence[_BoxAxis], scale: int) -> tuple[Words, Words]:
    """The offsets, [planes, 2], of each combination of coordinates in the box and in what is copied; and its factor."""
    offsets, scales = np.zeros((1, 2), dtype=np.uint64), np.array([scale], dtype=np.uint64)
    for axis in axes:
        steps = np.arange(axis.length, dtype=np.uint64)[:, None] * _bytes(axis, 1)
        offsets = (offsets[:, None] + steps).reshape(-1, 2)
        scales = np.multiply.outer(scales, words(axis.hash, axis.length)).ravel()
    return offsets, scales


def _bytes(axis: _BoxAxis, index: int) -> Words:
    return np.array([axis.step * index, axis.source_step * index], dtype=np.uint64)
