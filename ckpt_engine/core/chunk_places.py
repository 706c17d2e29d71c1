"""Where the chunks of a version lie in a slot. Pure.

A chunk travels cell after cell, each row-major, and each relay has its own layout, so what is one run on the wire may
be many in a slot. It decides neither how a slot is laid out nor which chunks it has.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np
import numpy.typing as npt

from ckpt_engine.core.boxes import Box
from ckpt_engine.core.chunks import Chunk
from ckpt_engine.core.dtypes import itemsize
from ckpt_engine.core.problems import invalid
from ckpt_engine.core.relay_layout import SlotLayout

Runs = list[tuple[int, int]]
"""(offset in the slot, length), bytes, in the order in which the bytes travel."""


class ChunkPlaces:
    """Where the chunks of one layout lie. Runs are computed when they are asked for. Any thread.

    layout: of whole chunks, as `lay_out` makes it with these `chunks`.
    """

    def __init__(self, layout: SlotLayout, chunks: Sequence[Chunk]) -> None:
        self._layout = layout
        self._chunks = chunks
        recorded = layout.recorded
        self._sizes: list[int] = recorded.cut.sizes.tolist()
        self._widths = [itemsize(spec.dtype) for spec in recorded.record.manifest.tensors]
        self._atoms: list[tuple[int, ...]] = [()] * len(self._sizes)  # by cell, numbers in the layout
        for number, atom in enumerate(layout.atoms):
            self._atoms[atom.cell] += (number,)
        self.held = tuple(
            number for number, chunk in enumerate(chunks) if all(self._atoms[cell] for cell in chunk.cells)
        )

    held: tuple[int, ...]
    """The numbers of the chunks that the layout has."""

    def atoms(self, chunk: int) -> tuple[int, ...]:
        """The numbers of a chunk's atoms in the layout, cell after cell."""
        return tuple(atom for cell in self._chunks[chunk].cells for atom in self._atoms[cell])

    def runs(self, chunk: int) -> Runs:
        """Where a chunk lies: as few runs as there can be. Raises INVALID_ARGUMENT if the layout does not have it."""
        found: Runs = []
        for cell in self._chunks[chunk].cells:
            atoms = self._atoms[cell]
            if not atoms:
                raise invalid(f"chunk {chunk} has cell {cell}, and this slot is not laid out for that")
            if len(atoms) == 1:
                pieces = [(self._layout.atoms[atoms[0]].offset, self._sizes[cell])]
            else:
                pieces = self._rows(cell, atoms)
            if found and sum(found[-1]) == pieces[0][0]:
                found[-1] = found[-1][0], found[-1][1] + pieces[0][1]
                del pieces[0]
            found += pieces
        return found

    def _rows(self, cell: int, numbers: Sequence[int]) -> Runs:
        """The runs of a cell that is cut into several atoms."""
        atoms = [self._layout.atoms[number] for number in numbers]
        tensor = atoms[0].tensor
        recorded = self._layout.recorded
        box = recorded.boxes[tensor][cell - recorded.first[tensor]]
        rows = [_rows_of(box, atom.box, atom.offset, self._widths[tensor]) for atom in atoms]
        travels, offsets, lengths = (np.concatenate(each) for each in zip(*rows, strict=True))
        order = np.argsort(travels)
        offsets, lengths = offsets[order], lengths[order]
        begins = np.flatnonzero(np.concatenate(([True], offsets[:-1] + lengths[:-1] != offsets[1:])))
        return list(zip(offsets[begins].tolist(), np.add.reduceat(lengths, begins).tolist(), strict=True))


def _rows_of(cell: Box, atom: Box, offset: int, width: int) -> tuple[npt.NDArray[np.int64], ...]:
    """The rows of an atom that are in one run in its cell: where each is in the cell, where it is in the slot, and how
    long it is; bytes. offset: of the atom in the slot. width: bytes of an element."""
    cut = max(axis for axis in range(cell.rank) if atom.shape[axis] != cell.shape[axis])
    length = width * prod(atom.shape[cut:])
    travels: npt.NDArray[np.int64] = np.zeros((), dtype=np.int64)
    for axis in range(cut):
        places = np.arange(atom.shape[axis], dtype=np.int64) + atom.start[axis] - cell.start[axis]
        travels = travels[..., None] + places * (width * prod(cell.shape[axis + 1 :]))
    first = (atom.start[cut] - cell.start[cut]) * (width * prod(cell.shape[cut + 1 :]))
    travels = travels.reshape(-1) + first
    lengths = np.full(len(travels), length, dtype=np.int64)
    return travels, offset + np.arange(len(travels), dtype=np.int64) * length, lengths
