"""The chunks of a slot, and the tree by which each comes: the same for all relays with the same layout. Pure.

A chunk is a run of whole cells in the slot's order, since only whole cells can be compared with what was sealed. A cell
that is larger than a chunk should be is a chunk of its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from ckpt_engine.core.chunk_sizes import chunk_bytes, join_pieces
from ckpt_engine.core.dtypes import itemsize
from ckpt_engine.core.relay_layout import ATOM_BYTES, SlotLayout

KEY_BYTES = 16


@dataclass(frozen=True)
class SlotChunk:
    """A chunk as it lies in a relay's slot."""

    cells: tuple[int, ...]  # numbers in the record
    atoms: tuple[int, ...]  # numbers in the layout
    runs: tuple[tuple[int, int], ...]  # (offset in the slot, length), with the padding between adjacent atoms
    bytes: int  # of the atoms


def chunks_of(layout: SlotLayout) -> tuple[SlotChunk, ...]:
    """The chunks of a slot: all cells with bytes in it."""
    widths = [itemsize(spec.dtype) for spec in layout.recorded.record.manifest.tensors]
    atoms: dict[int, list[int]] = {}
    sizes: dict[int, int] = {}
    spans: dict[int, tuple[int, int]] = {}
    for number, atom in enumerate(layout.atoms):
        if size := atom.box.volume * widths[atom.tensor]:
            atoms.setdefault(atom.cell, []).append(number)
            sizes[atom.cell] = sizes.get(atom.cell, 0) + size
            spans[number] = atom.offset, size
    cells = list(atoms)  # by the offset of their first atom
    found = []
    for start, stop in join_pieces([sizes[cell] for cell in cells], chunk_bytes(sum(sizes.values()))):
        own = cells[start:stop]
        numbers = [number for cell in own for number in atoms[cell]]
        runs = _join_spans(sorted(spans[number] for number in numbers))
        found.append(SlotChunk(tuple(own), tuple(numbers), runs, sum(sizes[cell] for cell in own)))
    return tuple(found)


def deal_chunks(chunks: Sequence[SlotChunk], shares: Sequence[int]) -> list[list[int]]:
    """The chunks of each tree, in the order in which they come. shares: of the trees, none 0."""
    found: list[list[int]] = [[] for _ in shares]
    sums = [0] * len(shares)
    whole = prod(shares)
    weights = [whole // share for share in shares]  # integers, so that all relays compute the same
    for number, chunk in enumerate(chunks):
        tree = min(range(len(shares)), key=lambda each: ((sums[each] + chunk.bytes) * weights[each], each))
        found[tree].append(number)
        sums[tree] += chunk.bytes
    return found


def filling_key(plan: bytes, root: bytes, chunks: Sequence[SlotChunk]) -> bytes:
    """The key by which relays name the content of a filling, 16 bytes: equal only where chunks lie alike."""
    found = hashlib.sha256(b"%d %d " % (len(plan), len(root)) + plan + root)
    for chunk in chunks:
        found.update(repr((chunk.cells, chunk.runs)).encode())
    return found.digest()[:KEY_BYTES]


def _join_spans(spans: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Joins the spans of atoms that are adjacent but for their padding."""
    found: list[tuple[int, int]] = []
    for offset, size in spans:
        if found and 0 <= offset - sum(found[-1]) < ATOM_BYTES:
            found[-1] = found[-1][0], offset + size - found[-1][0]
        else:
            found.append((offset, size))
    return tuple(found)
