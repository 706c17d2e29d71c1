"""Boxes: axis-aligned parts of a global tensor. Pure integers.

A box is [start, stop) with one entry an axis, in elements of the global tensor. The box of a 0-d tensor has no axis
and volume 1; a box with an axis of length 0 has volume 0 and holds nothing. Nothing here knows dtypes or memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise, product
from math import prod
from operator import ge, le, sub
from typing import NamedTuple


class Box(NamedTuple):
    """[start, stop) of a global tensor, elements, one entry an axis."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(map(sub, self.stop, self.start))

    @property
    def volume(self) -> int:
        return prod(map(sub, self.stop, self.start))

    @property
    def rank(self) -> int:
        """How many axes it has."""
        return len(self.start)

    def __str__(self) -> str:
        """The box as numpy writes slices: ``[0:4, 8:16]``; ``[]`` for a 0-d tensor."""
        return f"[{', '.join(f'{start}:{stop}' for start, stop in zip(self.start, self.stop, strict=True))}]"


def whole(shape: Iterable[int]) -> Box:
    """The box of a whole tensor of ``shape``."""
    stop = tuple(shape)
    return Box((0,) * len(stop), stop)


def intersect(a: Box, b: Box) -> Box | None:
    """What two boxes of one tensor have in common; None if they share no element."""
    if a == b:
        return a if a.volume else None
    start = tuple(map(max, a.start, b.start))
    stop = tuple(map(min, a.stop, b.stop))
    return None if any(map(ge, start, stop)) else Box(start, stop)


def contains(a: Box, b: Box) -> bool:
    """Whether ``b`` lies within ``a``, axis by axis, even if ``b`` has no elements."""
    return all(map(le, a.start, b.start)) and all(map(le, b.stop, a.stop))


def tile(box: Box, boxes: Iterable[Box]) -> list[Box]:
    """Disjoint parts of ``box`` such that each of ``boxes``, clipped to it, is a union of some of them.

    The parts are those of the grid that the boundaries of ``boxes`` draw in ``box``, in row-major order; boxes that
    contain ``box`` draw none, so the common case is ``[box]``. A box without elements has no parts.
    """
    start, stop = box
    cuts: list[set[int]] | None = None
    for other in boxes:
        if other == box:
            continue
        common = intersect(box, other)
        if common is None or common == box:
            continue
        if cuts is None:
            cuts = [set() for _ in start]
        for cut, first, last in zip(cuts, common.start, common.stop, strict=True):
            cut.add(first)
            cut.add(last)
    if cuts is None:
        return [box] if box.volume else []
    edges = [sorted(cut | {first, last}) for cut, first, last in zip(cuts, start, stop, strict=True)]
    return [Box(*zip(*spans, strict=True)) for spans in product(*(list(pairwise(axis)) for axis in edges))]


def remove(box: Box, cover: Box) -> list[Box]:
    """The parts of ``box`` that lie outside ``cover``: disjoint, at most two an axis."""
    common = intersect(box, cover)
    if common is None:
        return [box] if box.volume else []
    parts = []
    start, stop = box
    for axis in range(len(start)):
        if start[axis] < common.start[axis]:
            parts.append(Box(start, (*stop[:axis], common.start[axis], *stop[axis + 1 :])))
        if common.stop[axis] < stop[axis]:
            parts.append(Box((*start[:axis], common.stop[axis], *start[axis + 1 :]), stop))
        start = (*start[:axis], common.start[axis], *start[axis + 1 :])
        stop = (*stop[:axis], common.stop[axis], *stop[axis + 1 :])
    return parts


def remainder(boxes: Iterable[Box], covers: Iterable[Box]) -> list[Box]:
    """The parts of disjoint ``boxes`` that none of ``covers`` covers, disjoint."""
    remaining = [box for box in boxes if box.volume]
    for cover in covers:
        if not remaining:
            break
        remaining = [part for each in remaining for part in remove(each, cover)]
    return remaining


def uncovered(whole: Box, boxes: Iterable[Box]) -> Box | None:
    """A part of ``whole`` that none of ``boxes`` covers; None if they cover it."""
    remaining = remainder([whole], boxes)
    return remaining[0] if remaining else None


def overlap(boxes: Sequence[Box]) -> tuple[int, int] | None:
    """The indices of two of ``boxes`` that share an element; None if they are disjoint.

    Boxes are swept along the axis that separates them best, so shards of one axis cost a sort and not a square.
    """
    if len(boxes) < 2:
        return None
    ranks = range(boxes[0].rank)
    axis = max(ranks, key=lambda axis: len({box.start[axis] for box in boxes}), default=None)
    if axis is None:  # boxes of a 0-d tensor are all the same element
        return 0, 1
    order = sorted((index for index, box in enumerate(boxes) if box.volume), key=lambda i: boxes[i].start[axis])
    active: list[int] = []
    for index in order:
        box = boxes[index]
        active = [other for other in active if boxes[other].stop[axis] > box.start[axis]]
        for other in active:
            if intersect(boxes[other], box) is not None:
                return min(other, index), max(other, index)
        active.append(index)
    return None


def inside(part: Box, box: Box) -> tuple[slice, ...]:
    """Where a part of a box lies in it: the slice of each axis."""
    return tuple(
        slice(start - first, stop - first) for start, stop, first in zip(part.start, part.stop, box.start, strict=True)
    )


def refine(boxes: Iterable[Box]) -> list[Box]:
    """The common refinement of boxes of one tensor: disjoint, sorted, and each of ``boxes`` is a union of some of them.

    Equal or disjoint boxes are returned as they are, each once. Boxes without elements are left out.
    """
    found: list[Box] = []
    for box in sorted(set(boxes)):
        rest = [box] if box.volume else []
        parts: list[Box] = []
        for other in found:
            common = intersect(other, box)
            if common is None:
                parts.append(other)
                continue
            parts += [common, *remove(other, common)]
            rest = remainder(rest, [common])
        found = parts + rest
    return sorted(found)
