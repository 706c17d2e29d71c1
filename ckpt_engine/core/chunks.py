"""What travels between hosts at a time: chunks of 4 to 64 MiB that the same hosts want. Pure.

The needs of all hosts cut the sealed record's cells into pieces; a chunk is a run of pieces that the same hosts want,
so nothing travels to a host that does not need it. There is one table for all. A host that lays the pieces that it
wants in the table's order has each chunk in one run, and those that the same workers read side by side. It decides
neither who reads from whom (core/fan_out.py) nor where bytes lie in a host's memory.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from ckpt_engine.core.boxes import Box
from ckpt_engine.core.cells import Wanted
from ckpt_engine.core.dtypes import itemsize
from ckpt_engine.core.layout import Layout
from ckpt_engine.core.problems import invalid
from ckpt_engine.core.relay_layout import Piece, cut_pieces
from ckpt_engine.core.sealed_record import Recorded

LEAST_BYTES = 4 << 20
"""Of a chunk, where the same hosts want so much: less makes a tenth of the rate."""

MOST_BYTES = 64 << 20
"""Of a chunk: it is verified before it is passed on, so it should not take long."""

_CHUNKS = 1024  # of a model: a chunk takes five hops, and eight children wait for it at each; so these cost 4 %


class Chunk(NamedTuple):
    """bytes: on the wire. hosts: that want it. holders: trainers' hosts that have it. Both sorted, as numbers in two
    lists that go with the chunks. first, stop: its pieces, numbers in `ChunkTable.pieces`."""

    bytes: int
    hosts: tuple[int, ...]
    holders: tuple[int, ...]
    first: int = 0
    stop: int = 0


class ChunkPiece(NamedTuple):
    """A contiguous part of a chunk, rows first. cell: its number in the record. whole: it is all of this cell, so the
    record says what it hashes to. kinds: of workers that read it, as numbers."""

    tensor: int
    box: Box
    cell: int
    whole: bool
    kinds: tuple[int, ...]


@dataclass(frozen=True)
class ChunkTable:
    """One table for all hosts. hosts, trainers: names, sorted; chunks refer to them by number."""

    hosts: tuple[str, ...]
    trainers: tuple[str, ...]
    chunks: tuple[Chunk, ...]
    pieces: tuple[ChunkPiece, ...]

    @cached_property
    def unsealed(self) -> Wanted:
        """Pieces that the record has no digest of, since its cells are larger. Cut along them when the next version is
        sealed (`cells.cut`), and let holders digest them for this one: the sums of a cell's pieces are the cell's."""
        return [(piece.tensor, piece.box) for piece in self.pieces if not piece.whole]


def chunk_bytes(model: int) -> int:
    """How large chunks should be. model: bytes that travel. A chunk has at least so much, and less than twice it."""
    return max(LEAST_BYTES, min(MOST_BYTES // 2, model // _CHUNKS))


def cut_chunks(
    recorded: Recorded,
    needs: Mapping[str, Sequence[Wanted]],
    held: Mapping[str, Collection[int]],
    everything: Collection[str] = (),
    target: int = 0,
) -> ChunkTable:
    """The chunks of a version. The same arguments, in any order, give the same table.

    needs: of each host, its workers' needs as `wanted_of` gives them. held: of each trainers' host, the cells that it
    can be asked for; a host that is in both reads nothing that it holds. everything: hosts that want all cells. target:
    bytes of a chunk, at least; 0: `chunk_bytes` of the whole model.

    Raises INVALID_ARGUMENT for a cell that the record does not have, and for a target above half of MOST_BYTES.
    """
    if target > MOST_BYTES // 2:
        raise invalid(f"chunks of at least {target} bytes would be larger than {MOST_BYTES}; ask for half of that")
    hosts = sorted({*needs, *everything})
    trainers = sorted(held)
    kinds, kind_of = _kinds(needs.values())
    readers = _Readers(hosts, trainers, {host: [kind_of[id(each)] for each in needs.get(host, ())] for host in hosts})
    readers.everything = frozenset(index for index, host in enumerate(hosts) if host in everything)
    readers.holders_of = _holders(len(recorded.values), [held[name] for name in trainers])

    by_tensor: list[list[tuple[int, Box]]] = [[] for _ in recorded.boxes]
    for index, kind in enumerate(kinds):
        for tensor, box in kind:
            by_tensor[tensor].append((index, box))
    widths = [itemsize(spec.dtype) for spec in recorded.record.manifest.tensors]
    volumes = [box.volume * width for boxes, width in zip(recorded.boxes, widths, strict=True) for box in boxes]
    least = target or chunk_bytes(sum(volumes))
    known: dict[tuple[Layout, tuple[tuple[int, Box], ...], int], list[Piece]] = {}
    runs: dict[tuple[tuple[int, ...], tuple[int, ...]], dict[tuple[int, ...], list[tuple[int, ChunkPiece]]]] = {}
    for tensor, (layout, wanted) in enumerate(zip(recorded.layouts, by_tensor, strict=True)):
        key = layout, tuple(wanted), widths[tensor]
        if key not in known:
            known[key] = list(_small(cut_pieces(layout, wanted, bool(everything)), max(1, least // widths[tensor])))
        for piece in known[key]:
            cell = recorded.first[tensor] + piece.cell
            who = readers.of(cell, piece.readers)
            if who[0]:
                size = piece.volume * widths[tensor]
                whole = size == volumes[cell]
                run = runs.setdefault(who, {}).setdefault(piece.readers, [])
                run.append((size, ChunkPiece(tensor, piece.box, cell, whole, piece.readers)))
    chunks: list[Chunk] = []
    pieces: list[ChunkPiece] = []
    for (wanting, holding), of_class in sorted(runs.items()):
        sizes: list[int] = []
        first = len(pieces)
        for _, together in sorted(of_class.items()):
            for size, each in together:
                sizes.append(size)
                pieces.append(each)
        for start, stop in joined(sizes, least):
            chunks.append(Chunk(sum(sizes[start:stop]), wanting, holding, first + start, first + stop))
    return ChunkTable(tuple(hosts), tuple(trainers), tuple(chunks), tuple(pieces))


def _kinds(needs: Iterable[Sequence[Wanted]]) -> tuple[list[tuple[tuple[int, Box], ...]], dict[int, int]]:
    """Distinct needs, and the number of each by its object's id: thousands of workers share a few objects, and to hash
    one costs milliseconds."""
    objects = {id(wanted): wanted for each in needs for wanted in each}
    as_tuples = {name: tuple(wanted) for name, wanted in objects.items()}
    kinds = sorted(set(as_tuples.values()))
    number = {kind: index for index, kind in enumerate(kinds)}
    return kinds, {name: number[kind] for name, kind in as_tuples.items()}


class _Readers:
    """Which hosts want a piece, and which hold it."""

    def __init__(self, hosts: Sequence[str], trainers: Sequence[str], kinds_of: Mapping[str, Sequence[int]]) -> None:
        self.everything: frozenset[int] = frozenset()
        self.holders_of: Sequence[tuple[int, ...]] = ()
        self._by_kind: dict[int, list[int]] = {}
        for index, host in enumerate(hosts):
            for kind in kinds_of[host]:
                self._by_kind.setdefault(kind, []).append(index)
        place = {host: index for index, host in enumerate(hosts)}
        self._same = {index: place[name] for index, name in enumerate(trainers) if name in place}
        self._known: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[int, ...]] = {}

    def of(self, cell: int, kinds: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The hosts that want a piece of `cell` that workers of these kinds read, and those that hold it."""
        holders = self.holders_of[cell]
        hosts = self._known.get((kinds, holders))
        if hosts is None:
            wanting = set(self.everything).union(*(self._by_kind[kind] for kind in kinds))
            wanting.difference_update(self._same[index] for index in holders if index in self._same)
            hosts = self._known[kinds, holders] = tuple(sorted(wanting))
        return hosts, holders


def _holders(cells: int, held: Sequence[Collection[int]]) -> list[tuple[int, ...]]:
    found: list[list[int]] = [[] for _ in range(cells)]
    for index, each in enumerate(held):
        for cell in each:
            if not 0 <= cell < cells:
                raise invalid(f"a trainers' host is said to hold cell {cell}, and the record has {cells}")
            found[cell].append(index)
    shared: dict[tuple[int, ...], tuple[int, ...]] = {}
    return [shared.setdefault(key, key) for key in map(tuple, found)]


def _small(pieces: Sequence[Piece], most: int) -> Iterator[Piece]:
    """Pieces, cut so that none has more than `most` elements; each part is contiguous in its piece."""
    for piece in pieces:
        if piece.volume <= most:
            yield piece
        else:
            for box in rows_of(piece.box, most):
                yield piece._replace(box=box, volume=box.volume)


def rows_of(box: Box, most: int) -> Iterator[Box]:
    """Contiguous parts of a box with at most `most` elements each (at least 1), in their order, about equal."""
    volume = box.volume
    if volume <= most:
        if volume:
            yield box
        return
    axis = next(axis for axis, size in enumerate(box.shape) if size > 1)
    size = box.shape[axis]
    parts = min(size, -(-size // max(1, most * size // volume)))
    for part in range(parts):
        start, stop = (box.start[axis] + size * edge // parts for edge in (part, part + 1))
        inner = Box((*box.start[:axis], start, *box.start[axis + 1 :]), (*box.stop[:axis], stop, *box.stop[axis + 1 :]))
        yield from rows_of(inner, most)


def joined(sizes: Sequence[int], least: int) -> list[tuple[int, int]]:
    """Runs of pieces, [first, last), of `least` bytes and less than twice as many where no piece is above `least`. What
    is left over and small is joined to the last."""
    found: list[tuple[int, int]] = []
    start = total = 0
    for at, size in enumerate(sizes):
        total += size
        if total >= least:
            found.append((start, at + 1))
            start, total = at + 1, 0
    if total and found and total < min(least, LEAST_BYTES):
        start = found.pop()[0]
        total = sum(sizes[start:])
        if total > 2 * least:
            half = 0
            for at in range(start, len(sizes)):
                half += sizes[at]
                if 2 * half >= total:
                    found.append((start, at + 1))
                    start, total = at + 1, total - half
                    break
    if total:
        found.append((start, len(sizes)))
    return found
