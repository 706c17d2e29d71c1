"""Cells: the pieces of the weights that get a digest of their own. Pure.

Each part of a tensor (core/publication.py) is cut where a worker's need begins or ends, so that every need is a union
of whole cells and its digest the sum of theirs; and into rows, where it would be larger than what travels between hosts
at a time, since only a whole cell can be compared with what was sealed. All holders of a part have the same cells. A
source digests its *atoms*: all cells of its shards, also those that no worker reads, because the root is over
everything.

Cells are numbered through all tensors. Index arrays say which cells belong to which source and need, so that the sums
of an update cost milliseconds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, count

import numpy as np
import numpy.typing as npt

from ckpt_engine.core.boxes import Box
from ckpt_engine.core.dtypes import itemsize
from ckpt_engine.core.partition import Tiling
from ckpt_engine.core.publication import Publication
from ckpt_engine.v1.weights_pb2 import Atom, Atoms

Indices = npt.NDArray[np.int64]
NeededBoxes = Sequence[tuple[int, Box]]
"""What a worker needs, in the order of its needs: (tensor, box)."""


@dataclass(frozen=True, eq=False)
class NeedMap:
    """Which cells each need consists of: pairs (needs[i], cells[i]), sorted by need."""

    count: int  # of needs
    needs: Indices
    cells: Indices


@dataclass(frozen=True, eq=False)
class Cells:
    """One way to cut a publication. Compare by identity: digests of one cutting mean nothing in another."""

    publication: Publication
    first: Sequence[int]  # the number of each tensor's first cell
    tilings: Sequence[Tiling]  # of each tensor
    tensor: Indices  # of each cell
    atoms: Mapping[int, Atoms]  # what each source digests
    of_atom: Mapping[int, Indices]  # by source: the cell of each atom
    readers: Sequence[Sequence[NeededBoxes]] = ()  # what the workers of one host need, each such set once

    @cached_property
    def groups(self) -> Indices:
        """A number of each cell: equal where the same hosts hold it and the same `readers` read it, so that it travels
        to the same hosts from the same ones."""
        found = np.zeros(len(self), dtype=np.uint64)
        holding: dict[tuple[str, str], set[int]] = {}
        for source in self.of_atom:
            host = self.publication.tables[source].host
            holding.setdefault((host.boot_id, host.pid_namespace), set()).add(source)
        map_of: dict[int, NeedMap | None] = {}
        names = _names()
        for sources in holding.values():
            has = np.zeros(len(self), dtype=np.bool_)
            for source in sources:
                has[self.of_atom[source]] = True
            found[has] += next(names)
        for reader in self.readers:
            has = np.zeros(len(self), dtype=np.bool_)
            for needed in reader:
                if id(needed) not in map_of:
                    map_of[id(needed)] = self.map(needed)
                mapped = map_of[id(needed)]
                if mapped is not None:
                    has[mapped.cells] = True
            found[has] += next(names)
        return found.view(np.int64)

    def __len__(self) -> int:
        return len(self.tensor)

    def box(self, cell: int) -> Box:
        """The box of one cell."""
        tensor = int(self.tensor[cell])
        return self.tilings[tensor].boxes[cell - self.first[tensor]]

    def map(self, needed: NeededBoxes) -> NeedMap | None:
        """The cells of all needs; None if these cells are not cut finely enough."""
        counts: list[int] = []
        cells: list[int] = []
        for tensor, box in needed:
            found = self.tilings[tensor].cells(box, self.publication.partitions[tensor])
            if found is None:
                return None
            first = self.first[tensor]
            counts.append(len(found))
            cells += [first + cell for cell in found]
        needs = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
        return NeedMap(len(counts), needs, np.array(cells, dtype=np.int64))


def _names() -> Iterator[np.uint64]:
    """Numbers whose sums are different for different sets of them, as far as that can be: the same ones each time."""
    for number in count():
        yield np.frombuffer(hashlib.sha256(b"%d" % number).digest()[:8], dtype="<u8")[0].astype(np.uint64)


def cut(
    publication: Publication,
    needed: Iterable[NeededBoxes],
    most_bytes: int = 0,
    readers: Sequence[Sequence[NeededBoxes]] = (),
) -> Cells:
    """Cuts a publication so that each need is a union of cells. most_bytes: of a cell; 0: no limit. readers: as
    Cells.readers, of `needed`."""
    boxes: list[set[Box]] = [set() for _ in publication.parts]
    for boxes_of_worker in needed:
        for tensor, box in boxes_of_worker:
            boxes[tensor].add(box)
    most = [most_bytes // itemsize(spec.dtype) for spec in publication.manifest.tensors]
    tilings = [
        partition.tiling(frozenset(cuts), volume)
        for partition, cuts, volume in zip(publication.partitions, boxes, most, strict=True)
    ]
    counts = [len(tiling.boxes) for tiling in tilings]
    first = [0, *accumulate(counts)]
    shards_by_source: dict[int, list[tuple[int, int, tuple[Box, ...]]]] = {
        source: [] for source in range(len(publication.tables))
    }
    for tensor, (parts, tiling) in enumerate(zip(publication.parts, tilings, strict=True)):
        for part, begin, cells in zip(parts, tiling.first, tiling.parts, strict=False):
            for source, shard, _ in part.holders:
                shards_by_source[source].append((shard, first[tensor] + begin, cells))
    atoms: dict[int, Atoms] = {}
    of_atom: dict[int, Indices] = {}
    for source, shards in shards_by_source.items():
        shards.sort(key=lambda entry: entry[0])
        numbers = [cell for _, begin, cells in shards for cell in range(begin, begin + len(cells))]
        of_atom[source] = np.array(numbers, dtype=np.int64)
        atoms[source] = Atoms(
            table_digest=publication.table_digests[source],
            atoms=[Atom(shard=shard, start=cell.start, stop=cell.stop) for shard, _, cells in shards for cell in cells],
        )
    return Cells(
        publication=publication,
        first=first,
        tilings=tilings,
        tensor=np.repeat(np.arange(len(counts), dtype=np.int64), counts),
        atoms=atoms,
        of_atom=of_atom,
        readers=readers,
    )
