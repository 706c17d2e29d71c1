"""A slot's memory, cell by cell: the elements of a box in row-major order, however the slot lays it out.

It decides neither what a slot holds nor whether that is what was sealed. Any thread; what is written while it is read
is the caller's concern.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import numpy as np
import torch

from ckpt_engine.core.boxes import Box, inside
from ckpt_engine.core.relay_layout import SlotLayout
from ckpt_engine.core.sealed_record import ProvenRecord
from ckpt_engine.delta.coding import Bits
from ckpt_engine.relay.fill import Memory
from ckpt_engine.torch_dtypes import torch_dtype
from ckpt_engine.v1.weights_pb2 import TensorSpec


class BoxBits(NamedTuple):
    """The elements of a box."""

    bits: Bits  # row-major, as unsigned numbers
    digest: int  # what they were sealed with


class CellMemory:
    """The cells of one version in one slot. recorded: of that version, cut as the layout's. memory: of the slot."""

    def __init__(self, recorded: ProvenRecord, layout: SlotLayout, memory: Memory) -> None:
        self.recorded = recorded
        self._layout = layout
        self._memory = memory
        self._specs = recorded.record.manifest.tensors
        self._numbers = {spec.name: number for number, spec in enumerate(self._specs)}
        self._atoms: dict[int, list[int]] = {}  # by cell
        for number, atom in enumerate(layout.atoms):
            self._atoms.setdefault(atom.cell, []).append(number)

    def place(self, cell: int) -> tuple[TensorSpec, Box]:
        """The tensor of a cell, and its box."""
        tensor = int(self.recorded.cut.tensor[cell])
        return self._specs[tensor], self.recorded.boxes[tensor][cell - self.recorded.first[tensor]]

    def room(self, cell: int) -> torch.Tensor:
        """Memory for a cell's elements, of its box's shape, contiguous: the slot's own where the cell lies there in one
        piece, else new memory that holds nothing yet."""
        atoms = self._atoms[cell]
        if len(atoms) == 1:
            return self._atom(atoms[0])
        spec, box = self.place(cell)
        return torch.empty(box.shape, dtype=torch_dtype(spec.dtype))

    def read(self, cell: int) -> torch.Tensor:
        """A cell's elements, in the memory that `room` gives."""
        found, atoms = self.room(cell), self._atoms[cell]
        if len(atoms) > 1:
            _, box = self.place(cell)
            for atom in atoms:
                found[inside(self._layout.atoms[atom].box, box)] = self._atom(atom)
        return found

    def write(self, cell: int, elements: torch.Tensor) -> None:
        """Writes what `room` returned, if that was not the slot's own memory."""
        atoms = self._atoms[cell]
        if len(atoms) > 1:
            _, box = self.place(cell)
            for atom in atoms:
                self._atom(atom).copy_(elements[inside(self._layout.atoms[atom].box, box)])

    def cells_of(self, spec: TensorSpec, box: Box) -> tuple[int, ...] | None:
        """The cells whose union is a box of a tensor; None: it is no union of cells, or of another tensor."""
        tensor = self._numbers.get(spec.name)
        if tensor is None or self._specs[tensor] != spec:
            return None
        partition, first = self.recorded.partitions[tensor], self.recorded.first[tensor]
        hits = partition.hits(box)
        whole = all(hit.volume == partition.boxes[hit.part].volume for hit in hits)
        if not whole or sum(hit.volume for hit in hits) != box.volume:
            return None
        return tuple(first + hit.part for hit in hits)

    def union(self, cells: Collection[int], box: Box) -> BoxBits:
        """The elements of a box that is the union of these cells, maybe the slot's own memory."""
        digest = int(np.sum(self.recorded.values[list(cells)], dtype=np.uint64))
        if len(cells) == 1:
            return BoxBits(bits_of(self.read(*cells)), digest)
        spec, _ = self.place(next(iter(cells)))
        found = torch.empty(box.shape, dtype=torch_dtype(spec.dtype))
        for cell in cells:
            found[inside(self.place(cell)[1], box)] = self.read(cell)
        return BoxBits(bits_of(found), digest)

    def _atom(self, number: int) -> torch.Tensor:
        atom = self._layout.atoms[number]
        return self._memory(atom.offset, atom.box.shape, torch_dtype(self._specs[atom.tensor].dtype))


def bits_of(elements: torch.Tensor) -> Bits:
    """Elements as unsigned numbers of their width: the same memory. elements: contiguous."""
    return elements.reshape(-1).view(torch.uint8).numpy().view(f"<u{elements.itemsize}")
