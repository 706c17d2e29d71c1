"""How a GPU walks through boxes to digest them: boxes in, a table of tiles out. Pure; numpy only.

A box becomes rows of units that lie next to each other in memory; a unit becomes one lane. A tile is a few rows of at
most `block` units. A kernel sums lane * factor of its row down each column, multiplies each column's sum by the
column's factor and all by the tile's scale, and adds that to the box's digest. So the inner loop needs one multiply-add
a lane, and few factors. Rows so long that their factors would fill the memory are cut into flat tiles, for which the
kernel computes factors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

import numpy as np
import numpy.typing as npt

from ckpt_engine.digest.factors import INDEX_STEP, ONE, Axis, Words, element_words, hashed, outer_words, word

BLOCK_BYTES = 2048
"""The most of a tile's row: one load of 16 bytes for each of 128 threads, where rows are aligned."""

ALIGNMENT = 16
"""Bytes. A tile is read in loads of that width if all its rows start at, and have the length of, a multiple of it."""

FIELDS = 8
"""A tile in 64-bit words: units from the origin to its first one, units from row to row, its first row's and its first
column's place among the factors, rows, columns, scale, place of its sum.

Of a flat tile, the third word is the place of the factors of an element's lanes, and the fourth what `factors.word`
hashes for its first element.
"""

Table = npt.NDArray[np.uint64]
"""[tiles, FIELDS]"""

_MASK = (1 << 64) - 1
_ROWS = 128  # of a tile, at most; fewer while there are too few tiles to keep a GPU busy
_ROWS_LEAST = 8
_TILES_WANTED = 4096
_ROW_WORDS = 1 << 24  # rows that share one table of factors; 128 MiB
_COLUMN_WORDS = 1 << 22  # of one row, unless it is flat; 32 MiB
_PLANES = 1 << 14  # parts of one box that are not evenly spaced rows


@dataclass(frozen=True, slots=True)
class Strided:
    """A box in memory."""

    address: int  # of its first element, bytes
    shape: tuple[int, ...]
    stride: tuple[int, ...]  # elements
    start: tuple[int, ...]  # first global coordinate of each axis
    lanes: int  # units an element


@dataclass(frozen=True, slots=True)
class Tiles:
    """The work of many boxes, in disjoint tables."""

    aligned: Table
    unaligned: Table
    flat: dict[int, Table]  # by the lanes of an element
    factors: Words  # shared by all tables


class NotTileableError(ValueError):
    """A box does not lie in rows of neighbouring elements, or in too many."""


@dataclass(frozen=True, slots=True)
class _BoxRows:
    """Rows of one box, or of a part of it."""

    address: int
    step: int  # units from row to row
    rows: int
    columns: int
    outer: int
    inner: int
    scale: int
    flat: int = 0  # lanes of an element, if it is a flat row


class TileTable:
    """Collects boxes of one unit (bytes). origin: the address from which addresses count, a multiple of ALIGNMENT. A
    box that is refused leaves nothing behind."""

    def __init__(self, seed: int, unit: int, origin: int) -> None:
        self._seed = seed
        self._unit = unit
        self._origin = origin
        self._block = BLOCK_BYTES // unit
        self._found: list[tuple[int, _BoxRows]] = []
        self._factors: list[Words] = [ONE]
        self._places: dict[tuple[int, tuple[Axis, ...]], int] = {(0, ()): 0}
        self._length = 1

    def add(self, box: Strided, place: int) -> None:
        """Adds a box. place: where its digest is summed up. Raises NotTileableError."""
        if 0 not in box.shape:
            self._found += [(place, rows) for rows in self._rows(box)]

    def tiles(self) -> Tiles:
        """The tiles of all boxes that were added; the largest first, flat ones apart."""
        weight = sum(-(-rows.columns // self._block) * rows.rows for _, rows in self._found)
        most = max(min(_ROWS, weight // _TILES_WANTED), _ROWS_LEAST)
        empty = np.empty((0, FIELDS), dtype=np.uint64)
        alike: dict[tuple[int, ...], list[tuple[int, _BoxRows]]] = {}  # thousands of boxes share a few shapes
        for place, rows in self._found:
            if not rows.flat:
                key = rows.step, rows.rows, rows.columns, rows.outer, rows.inner
                alike.setdefault(key, []).append((place, rows))
        parts = [self._cut(group, most) for group in alike.values()]
        table = np.concatenate([empty, *parts])
        table = table[np.argsort(-(table[:, 4] * table[:, 5]).astype(np.int64), kind="stable")]
        aligned = self._aligned(table)
        flat: dict[int, list[Table]] = {}
        for place, rows in self._found:
            if rows.flat:
                flat.setdefault(rows.flat, []).append(self._cut_flat(rows, place, most))
        long = {lanes: np.concatenate(tables) for lanes, tables in flat.items()}
        return Tiles(table[aligned], table[~aligned], long, np.concatenate(self._factors))

    def _cut_flat(self, row: _BoxRows, place: int, most: int) -> Table:
        """The tiles of one long row: at most `most` rows of a block each, and one more for the rest."""
        whole, rest = divmod(row.columns, self._block)
        first_block = np.arange(0, whole, most, dtype=np.uint64)
        blocks = np.minimum(np.uint64(whole) - first_block, np.uint64(most))
        columns = np.full_like(blocks, self._block)
        if rest:
            first_block = np.append(first_block, np.uint64(whole))
            blocks, columns = np.append(blocks, np.uint64(1)), np.append(columns, np.uint64(rest))
        first = np.uint64((row.address - self._origin) // self._unit & _MASK)
        table = np.empty((first_block.size, FIELDS), dtype=np.uint64)
        table[:, 0] = first + first_block * np.uint64(self._block)
        table[:, 1] = self._block
        table[:, 2] = row.outer
        elements = first_block * np.uint64(self._block // row.flat)
        table[:, 3] = np.uint64(row.inner) + elements * np.uint64(INDEX_STEP)
        table[:, 4], table[:, 5], table[:, 6], table[:, 7] = blocks, columns, row.scale, place
        return table

    def _cut(self, alike: Sequence[tuple[int, _BoxRows]], most: int) -> Table:
        """The tiles of rows that differ only in address, scale and place; each of at most `most` rows."""
        rows = alike[0][1]
        first_row = np.arange(0, rows.rows, most, dtype=np.uint64)[:, None]
        first_column = np.arange(0, rows.columns, self._block, dtype=np.uint64)[None, :]
        table = np.empty((len(alike), first_row.size, first_column.size, FIELDS), dtype=np.uint64)
        firsts = [(each.address - self._origin) // self._unit & _MASK for _, each in alike]
        table[..., 0] = _column(firsts) + first_row * np.uint64(rows.step & _MASK) + first_column
        table[..., 1] = rows.step & _MASK
        table[..., 2] = np.uint64(rows.outer) + first_row
        table[..., 3] = np.uint64(rows.inner) + first_column
        table[..., 4] = np.minimum(np.uint64(rows.rows) - first_row, np.uint64(most))
        table[..., 5] = np.minimum(np.uint64(rows.columns) - first_column, np.uint64(self._block))
        table[..., 6] = _column([each.scale for _, each in alike])
        table[..., 7] = _column([place for place, _ in alike])
        return table.reshape(-1, FIELDS)

    def _aligned(self, table: Table) -> npt.NDArray[np.bool_]:
        units = np.uint64(ALIGNMENT // self._unit)
        steps = (table[:, 1] % units == 0) | (table[:, 4] == 1)
        aligned: npt.NDArray[np.bool_] = (table[:, 0] % units == 0) & steps & (table[:, 5] % units == 0)
        return aligned

    def _rows(self, box: Strided) -> list[_BoxRows]:
        if box.address % self._unit:
            raise NotTileableError(f"address {box.address:#x} is not a multiple of {self._unit}")
        scale = 1
        axes: list[tuple[Axis, int]] = []
        for number, (first, length, stride) in enumerate(zip(box.start, box.shape, box.stride, strict=True), start=1):
            if length == 1:
                scale = scale * word(self._seed, number, first) & _MASK
            else:
                axes.append(((number, first, length), stride))
        axes.sort(key=lambda axis: -axis[1])
        width, inner = _columns(axes, box.lanes, self._block)
        rows, outer = _row_axes(axes[: len(axes) - inner])
        planes = axes[: len(axes) - inner - outer]
        flat = inner == 1 and width * box.lanes > _COLUMN_WORDS  # what spans more axes is short
        if flat:
            planes, rows, outer = axes[:-1], 1, 0
        if prod(axis[2] for axis, _ in planes) > _PLANES:
            raise NotTileableError(f"a box of {list(box.shape)} with strides {list(box.stride)}")
        if flat:
            number, start, _ = axes[-1][0]
            lane_place = self._place(box.lanes, ())
            return [
                _BoxRows(
                    address=box.address + offset * box.lanes * self._unit,
                    step=0,
                    rows=1,
                    columns=width * box.lanes,
                    outer=lane_place,
                    inner=hashed(self._seed, number, start),
                    scale=scale * factor & _MASK,
                    flat=box.lanes,
                )
                for offset, factor in self._planes(planes)
            ]
        inner_place = self._place(box.lanes, tuple(axis for axis, _ in axes[len(axes) - inner :]))
        outer_place = self._place(0, tuple(axis for axis, _ in axes[len(planes) : len(axes) - inner]))
        step = axes[len(axes) - inner - 1][1] * box.lanes if outer else 0
        return [
            _BoxRows(
                address=box.address + offset * box.lanes * self._unit,
                step=step,
                rows=rows,
                columns=width * box.lanes,
                outer=outer_place,
                inner=inner_place,
                scale=scale * factor & _MASK,
            )
            for offset, factor in self._planes(planes)
        ]

    def _planes(self, axes: Sequence[tuple[Axis, int]]) -> Iterator[tuple[int, int]]:
        """The offset of each plane in elements, and the product of its factors."""
        for indices in product(*(range(length) for (_, _, length), _ in axes)):
            offset, factor = 0, 1
            for index, ((number, first, _), stride) in zip(indices, axes, strict=True):
                offset += index * stride
                factor = factor * word(self._seed, number, first + index) & _MASK
            yield offset, factor

    def _place(self, lanes: int, axes: tuple[Axis, ...]) -> int:
        """Where the factors of a block of coordinates lie; lanes: 0 for those of rows."""
        key = (lanes, axes)
        if key not in self._places:
            words = element_words(self._seed, lanes, axes) if lanes else outer_words(self._seed, axes)
            self._places[key] = self._length
            self._factors.append(words)
            self._length += words.size
        return self._places[key]


def _columns(axes: Sequence[tuple[Axis, int]], lanes: int, block: int) -> tuple[int, int]:
    """Elements of a row, and how many of the fastest axes it spans."""
    if not axes:
        return 1, 0
    if axes[-1][1] != 1:
        raise NotTileableError(f"neighbours along the fastest axis are {axes[-1][1]} elements apart")
    width, inner = axes[-1][0][2], 1
    while inner < len(axes) and width * lanes < block:
        (_, _, length), stride = axes[-1 - inner]
        if stride != width or width * length * lanes > 16 * block:
            break
        width, inner = width * length, inner + 1
    return width, inner


def _row_axes(axes: Sequence[tuple[Axis, int]]) -> tuple[int, int]:
    """Rows that are evenly spaced, and how many of the fastest of these axes they span."""
    if not axes:
        return 1, 0
    (_, _, rows), step = axes[-1]
    outer = 1
    if rows > _ROW_WORDS:
        raise NotTileableError(f"{rows} rows")
    while outer < len(axes):
        (_, _, length), stride = axes[-1 - outer]
        if stride != step * rows or rows * length > _ROW_WORDS:
            break
        rows, outer = rows * length, outer + 1
    return rows, outer


def _column(values: Sequence[int]) -> Table:
    return np.array(values, dtype=np.uint64)[:, None, None]
