"""Strides of views, and how far views reach in memory. Pure integers."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod


def span(shape: Iterable[int], stride: Iterable[int]) -> int:
    """Elements from the first to the last element of a view, both counted; 0 if it has none.

    shape, stride: elements, one entry an axis; no stride is negative. Raises ValueError if one has more entries.
    """
    extents, steps = tuple(shape), tuple(stride)
    if len(extents) != len(steps):
        raise ValueError(f"shape {list(extents)} and stride {list(steps)} have different numbers of axes")
    if 0 in extents:
        return 0
    return 1 + sum((extent - 1) * step for extent, step in zip(extents, steps, strict=True))


def contiguous(shape: Iterable[int]) -> tuple[int, ...]:
    """Strides of a tensor that lies in one piece, the last axis fastest, in elements."""
    extents = tuple(shape)
    return tuple(prod(extents[axis + 1 :]) for axis in range(len(extents)))
