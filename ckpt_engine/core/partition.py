"""How tensors are split into parts, once for all tensors that are split alike. Pure.

A model has tens of thousands of tensors but few shapes, and each rank takes its parts of them by one rule. So geometry
(which parts a box overlaps, where parts must be cut) is computed once for each partition, and cached in it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate, chain, pairwise
from math import prod
from operator import sub
from typing import NamedTuple

from ckpt_engine.core.boxes import Box, contains, intersect, tile


class Hit(NamedTuple):
    """What a box has in common with one part; never empty."""

    part: int  # its number
    box: Box
    volume: int
    delta: tuple[int, ...]  # from the part's first element to that of `box`, elements by axis; empty: the same


class Tiling:
    """The parts of a partition, cut into cells. Cells are numbered across all parts."""

    def __init__(self, parts: tuple[tuple[Box, ...], ...]) -> None:
        """parts: the cells of each part."""
        self.parts = parts
        self.first = (0, *accumulate(map(len, parts)))
        self._cells: dict[Box, tuple[int, ...] | None] = {}

    @cached_property
    def boxes(self) -> tuple[Box, ...]:
        """All cells, by number."""
        return tuple(chain.from_iterable(self.parts))

    def cells(self, box: Box, partition: Partition) -> tuple[int, ...] | None:
        """The cells whose union is `box`; None if the cells are not cut along it."""
        if box not in self._cells:
            self._cells[box] = self._find(box, partition)
        return self._cells[box]

    def _find(self, box: Box, partition: Partition) -> tuple[int, ...] | None:
        found: list[int] = []
        for hit in partition.hits(box):
            cells = self.parts[hit.part]
            inside = [number for number, cell in enumerate(cells, self.first[hit.part]) if contains(hit.box, cell)]
            if sum(self.boxes[number].volume for number in inside) != hit.volume:
                return None
            found += inside
        return tuple(found)


class Partition:
    """Disjoint boxes that tile a tensor, sorted. Compare by identity."""

    _MANY = 8  # parts; from here on they are searched by bisection

    def __init__(self, boxes: tuple[Box, ...]) -> None:
        self.boxes = boxes
        self._hits: dict[Box, tuple[Hit, ...]] = {}
        self._tilings: dict[tuple[frozenset[Box], int], Tiling] = {}

    def hits(self, box: Box) -> tuple[Hit, ...]:
        """What `box` has in common with each part, in their order."""
        found = self._hits.get(box)
        if found is None:
            found = self._hits[box] = tuple(self._find(box))
        return found

    def tiling(self, needed: frozenset[Box], most: int = 0) -> Tiling:
        """The parts, cut so that each of `needed` is a union of cells. most: elements of a cell; 0: no limit."""
        found = self._tilings.get((needed, most))
        if found is None:
            cuts: dict[int, list[Box]] = {}
            for box in sorted(needed):
                for hit in self.hits(box):
                    cuts.setdefault(hit.part, []).append(hit.box)
            parts = tuple(tuple(_tiled(box, cuts.get(part, ()), most)) for part, box in enumerate(self.boxes))
            found = self._tilings[needed, most] = Tiling(parts)
        return found

    def _find(self, box: Box) -> list[Hit]:
        first, end = 0, len(self.boxes)
        if end >= self._MANY and self._rising is not None:
            axis, starts, stops = self._rising
            first, end = bisect_right(stops, box.start[axis]), bisect_left(starts, box.stop[axis])
        found = []
        for part in range(first, end):
            common = intersect(box, self.boxes[part])
            if common is not None:
                delta = tuple(map(sub, common.start, self.boxes[part].start))
                found.append(Hit(part, common, common.volume, delta if any(delta) else ()))
        return found

    @cached_property
    def _rising(self) -> tuple[int, list[int], list[int]] | None:
        """An axis along which both starts and stops of the parts rise, with these; None if there is none."""
        for axis in range(self.boxes[0].rank):
            starts = [box.start[axis] for box in self.boxes]
            if starts[0] != starts[-1]:
                stops = [box.stop[axis] for box in self.boxes]
                rising = all(a <= b for a, b in pairwise(starts)) and all(a <= b for a, b in pairwise(stops))
                return (axis, starts, stops) if rising else None
        return None


def _tiled(box: Box, needed: Sequence[Box], most: int) -> list[Box]:
    """The cells of a part. All of it is cut in the same places, so that cutting it along these cells again changes
    nothing."""
    cells = tile(box, needed)
    if not most or all(cell.volume <= most for cell in cells):
        return cells
    spans = [sorted({(cell.start[axis], cell.stop[axis]) for cell in cells}) for axis in range(box.rank)]
    longest = [max(stop - start for start, stop in axis) for axis in spans]
    slabs: list[Box] = []
    for axis, own in enumerate(spans):
        length = max(1, most // prod(longest[axis + 1 :]))
        for start, stop in own:
            parts = -(-(stop - start) // length)
            for part in range(1, parts):
                edge = start + (stop - start) * part // parts
                slabs.append(Box(box.start, (*box.stop[:axis], edge, *box.stop[axis + 1 :])))
        if length * prod(longest[axis + 1 :]) <= most:
            break  # small enough, and a row is not cut further
    return tile(box, [*needed, *slabs])
