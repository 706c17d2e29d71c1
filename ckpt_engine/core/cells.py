"""Cells: the pieces of the weights that get a digest of their own. Pure.

Each part of a tensor (core/manifest.py) is cut where a worker's need begins or ends, so that every need is a union of
whole cells and its digest the sum of theirs. Replicas of a part have the same cells. What a source digests, its atoms,
are the cells of its shards, all of them: also those that nobody reads, because the root is over everything.

Cells are numbered, and who has what is kept in index arrays, so that the sums of an update cost milliseconds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ckpt_engine.core.boxes import Box, contains, tile
from ckpt_engine.core.manifest import Publication
from ckpt_engine.v1.weights_pb2 import Atom, Atoms

Indices = npt.NDArray[np.int64]


class Overlap(NamedTuple):
    """What a need has in common with a part of its tensor; `box` is never empty."""

    need: int
    tensor: int
    part: int
    box: Box


@dataclass(frozen=True)
class NeedMap:
    """Which cells each need consists of: pairs (needs[i], cells[i]), sorted by need. count: number of needs."""

    count: int
    needs: Indices
    cells: Indices


@dataclass(frozen=True, eq=False)
class Cells:
    """One way to cut a publication. Compare by identity: digests of one cutting mean nothing in another.

    first: for each tensor and part the number of its first cell, and one past its last in the next entry.
    boxes: of each cell. tensor: its tensor. part: numbers the parts of all tensors. atoms: what each source digests.
    of_atom: for each source, the cell of each of its atoms.
    """

    first: tuple[tuple[int, ...], ...]
    boxes: tuple[Box, ...]
    tensor: Indices
    part: Indices
    atoms: Mapping[int, Atoms]
    of_atom: Mapping[int, Indices]

    def map(self, overlaps: Iterable[Overlap], count: int) -> NeedMap | None:
        """The cells of `count` needs; None if these cells are not cut finely enough."""
        needs: list[int] = []
        cells: list[int] = []
        for need, tensor, part, box in overlaps:
            begin, end = self.first[tensor][part : part + 2]
            if end - begin == 1:
                if self.boxes[begin] != box:
                    return None
                needs.append(need)
                cells.append(begin)
                continue
            inside = [cell for cell in range(begin, end) if contains(box, self.boxes[cell])]
            if sum(self.boxes[cell].volume for cell in inside) != box.volume:
                return None
            needs += [need] * len(inside)
            cells += inside
        return NeedMap(count, np.array(needs, dtype=np.int64), np.array(cells, dtype=np.int64))


def cut(publication: Publication, overlaps: Iterable[Overlap], sources: Collection[int]) -> Cells:
    """Cuts a publication so that each of `overlaps` is a union of cells. Only `sources` get atoms."""
    cuts: dict[tuple[int, int], set[Box]] = {}
    for overlap in overlaps:
        if overlap.box != publication.parts[overlap.tensor][overlap.part].box:
            cuts.setdefault((overlap.tensor, overlap.part), set()).add(overlap.box)
    boxes: list[Box] = []
    first: list[tuple[int, ...]] = []
    tensors: list[int] = []
    part_numbers: list[int] = []
    held: dict[int, list[tuple[int, int, int]]] = {source: [] for source in sources}
    number = 0
    for tensor, parts in enumerate(publication.parts):
        begins = [len(boxes)]
        for index, part in enumerate(parts):
            begin = len(boxes)
            boxes += tile(part.box, cuts.get((tensor, index), ()))
            end = len(boxes)
            begins.append(end)
            part_numbers += [number] * (end - begin)
            number += 1
            for source, shard in part.holders:
                if source in held:
                    held[source].append((shard, begin, end))
        tensors += [tensor] * (len(boxes) - begins[0])
        first.append(tuple(begins))
    atoms: dict[int, Atoms] = {}
    of_atom: dict[int, Indices] = {}
    for source, shards in held.items():
        shards.sort()
        of_atom[source] = np.array([cell for _, begin, end in shards for cell in range(begin, end)], dtype=np.int64)
        atoms[source] = Atoms(
            table_digest=publication.table_digests[source],
            atoms=[
                Atom(shard=shard, start=boxes[cell].start, stop=boxes[cell].stop)
                for shard, begin, end in shards
                for cell in range(begin, end)
            ],
        )
    return Cells(
        tuple(first),
        tuple(boxes),
        np.array(tensors, dtype=np.int64),
        np.array(part_numbers, dtype=np.int64),
        atoms,
        of_atom,
    )
