"""Where a relay puts what the workers of its host need: the union of their needs, as atoms. Pure.

Atoms are pieces of the sealed record's cells such that all needs are unions of atoms. Each lies contiguously, and those
that the same readers need lie side by side, so that workers read long runs: a worker that needs half of each row of a
thousand matrices finds all of its halves in one run. A relay holds whole cells, since only those can be compared with
what was sealed; and whole chunks, since these are what relays pass on. It does not decide where bytes come from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ckpt_engine.core.boxes import Box
from ckpt_engine.core.cells import NeededBoxes
from ckpt_engine.core.chunks import Chunk
from ckpt_engine.core.dtypes import itemsize
from ckpt_engine.core.manifest import blob_digest, canonical
from ckpt_engine.core.partition import Partition
from ckpt_engine.core.problems import invalid, precondition, unavailable
from ckpt_engine.core.sealed_record import ProvenRecord
from ckpt_engine.v1.weights_pb2 import WorkerNeeds

SLOTS = 2
"""Slots of a relay: one for the served version, one for the next."""

ATOM_BYTES = 64
"""Atoms begin at multiples of this: at cache lines, and at elements of any dtype."""

GROUP_BYTES = 2 << 20
"""Groups begin at multiples of this, so that each can be mapped by itself, also with huge pages."""


class RelayAtom(NamedTuple):
    """A contiguous piece of a cell, row-major."""

    tensor: int
    box: Box
    cell: int  # its number in the record
    group: int
    offset: int  # bytes from the start of the slot


class Group(NamedTuple):
    """Atoms that the same readers need, in one run."""

    readers: tuple[int, ...]  # their numbers, sorted; none: no known reader needs these
    offset: int  # bytes from the start of the slot
    size: int  # bytes


@dataclass(frozen=True, eq=False)
class SlotLayout:
    """How a version lies in a slot."""

    recorded: ProvenRecord
    atoms: tuple[RelayAtom, ...]  # by offset
    groups: tuple[Group, ...]
    bytes: int  # of all atoms
    size: int  # of the slot, gaps included


def needed_boxes(needs: WorkerNeeds, recorded: ProvenRecord) -> NeededBoxes:
    """A worker's needs as boxes, checked against a record's manifest.

    Raises FAILED_PRECONDITION if they are of another manifest, INVALID_ARGUMENT for a box outside its tensor.
    """
    manifest = recorded.record.manifest
    if needs.manifest_digest != blob_digest(canonical(manifest)):
        raise precondition(
            f"a worker prepared for manifest {needs.manifest_digest.hex()[:16]}, and the sealed weights have another "
            "one; it has to prepare again"
        )
    found = []
    for need in needs.needs:
        box = Box(tuple(need.start), tuple(need.stop))
        if need.tensor >= len(manifest.tensors):
            raise invalid(f"a worker needs tensor {need.tensor}, and the sealed weights have {len(manifest.tensors)}")
        shape = tuple(manifest.tensors[need.tensor].shape)
        if not len(box.start) == len(box.stop) == len(shape) or not all(
            0 <= start <= stop <= size for start, stop, size in zip(box.start, box.stop, shape, strict=True)
        ):
            name = manifest.tensors[need.tensor].name
            raise invalid(f"a worker needs {box} of tensor {name}, whose shape is {list(shape)}", [name])
        found.append((need.tensor, box))
    return found


def lay_out(
    recorded: ProvenRecord,
    readers: Sequence[NeededBoxes],
    everything: bool = False,
    within: Sequence[Partition] | None = None,
    chunks: Sequence[Chunk] | None = None,
) -> SlotLayout:
    """Lays out a slot for these readers: each cell that any of them touches, once, and all others of its chunk.

    readers: needs as `needed_boxes` returns them; those with equal needs count as one. everything: all cells of the
    model, also those that no reader needs. within: for each tensor the only part of it that is held, so that chunks not
    wholly in it are left out; None: no limit. chunks: of the record, as `chunks_of` returns them; None: each cell
    stands for itself, as for a slot that no other relay reads. The same arguments always give the same layout.
    """
    distinct = list(dict.fromkeys(tuple(each) for each in readers))
    by_tensor: list[list[tuple[int, Box]]] = [[] for _ in recorded.boxes]
    for number, needed in enumerate(distinct):
        for tensor, box in needed:
            by_tensor[tensor].append((number, box))
    held = _held_cells(recorded, by_tensor, everything, within, chunks)
    pieces_by_key: dict[tuple[Partition, tuple[tuple[int, Box], ...], bytes], list[_LayoutPiece]] = {}
    groups: dict[tuple[int, ...], list[tuple[int, _LayoutPiece]]] = {}
    for tensor, (partition, needs) in enumerate(zip(recorded.partitions, by_tensor, strict=True)):
        own = held[recorded.first[tensor] : recorded.first[tensor + 1]]
        key = partition, tuple(needs), own.tobytes()
        if key not in pieces_by_key:
            pieces_by_key[key] = _cut(partition, needs, np.flatnonzero(own).tolist())
        for piece in pieces_by_key[key]:
            groups.setdefault(piece.readers, []).append((tensor, piece))
    widths = [itemsize(spec.dtype) for spec in recorded.record.manifest.tensors]
    atoms: list[RelayAtom] = []
    slot_groups: list[Group] = []
    at = total = 0
    for group, readers_of in enumerate(sorted(groups, key=lambda each: (not each, each))):
        first = at
        for tensor, piece in groups[readers_of]:
            atoms.append(RelayAtom(tensor, piece.box, recorded.first[tensor] + piece.cell, group, at))
            size = piece.volume * widths[tensor]
            total += size
            at += -(-size // ATOM_BYTES) * ATOM_BYTES
        at = -(-at // GROUP_BYTES) * GROUP_BYTES
        slot_groups.append(Group(readers_of, first, at - first))
    return SlotLayout(recorded, tuple(atoms), tuple(slot_groups), total, at)


class _LayoutPiece(NamedTuple):
    """An atom, the same for all tensors that are cut and needed alike."""

    box: Box
    volume: int
    cell: int  # its number in the tensor
    readers: tuple[int, ...]


def _held_cells(
    recorded: ProvenRecord,
    needs: Sequence[Sequence[tuple[int, Box]]],
    everything: bool,
    within: Sequence[Partition] | None,
    chunks: Sequence[Chunk] | None,
) -> npt.NDArray[np.bool_]:
    """Whether a slot has each cell. needs: by tensor."""
    needed = np.full(len(recorded.values), everything)
    allowed = np.ones(len(recorded.values), dtype=np.bool_)
    found: dict[object, list[bool]] = {}
    for tensor, partition in enumerate(recorded.partitions):
        cells = slice(recorded.first[tensor], recorded.first[tensor + 1])
        if not everything and needs[tensor]:
            key: object = (partition, tuple(needs[tensor]))
            if key not in found:
                touched = {hit.part for _, box in needs[tensor] for hit in partition.hits(box)}
                found[key] = [cell in touched for cell in range(len(partition.boxes))]
            needed[cells] = found[key]
        if within is not None:
            key = (partition, within[tensor])
            if key not in found:
                found[key] = [_is_within(cell, within[tensor]) for cell in partition.boxes]
            allowed[cells] = found[key]
    if chunks is None:
        return needed & allowed
    held = np.zeros(len(recorded.values), dtype=np.bool_)
    for chunk in chunks:
        cells_of = list(chunk.cells)
        held[cells_of] = needed[cells_of].any() and allowed[cells_of].all()
    return held


def cut_pieces(
    partition: Partition, needs: Sequence[tuple[int, Box]], everything: bool, within: Partition | None = None
) -> list[_LayoutPiece]:
    """The atoms of a tensor's cells that any reader touches, or of all cells if `everything`.

    needs: pairs of reader and box. within: cells that do not lie wholly in these boxes are left out; None: no limit.
    """
    touched = {hit.part for _, box in needs for hit in partition.hits(box)}
    return _cut(
        partition,
        needs,
        [
            cell
            for cell, box in enumerate(partition.boxes)
            if (everything or cell in touched) and (within is None or _is_within(box, within))
        ],
    )


def _cut(partition: Partition, needs: Sequence[tuple[int, Box]], cells: Sequence[int]) -> list[_LayoutPiece]:
    """The atoms of these cells of a tensor. needs: pairs of reader and box."""
    tiling = partition.tiling(frozenset(box for _, box in needs))
    readers: dict[int, set[int]] = {}
    for number, box in needs:
        for atom in tiling.cells(box, partition) or ():
            readers.setdefault(atom, set()).add(number)
    return [
        _LayoutPiece(box, box.volume, cell, tuple(sorted(readers.get(tiling.first[cell] + index, ()))))
        for cell in cells
        for index, box in enumerate(tiling.parts[cell])
    ]


def _is_within(cell: Box, within: Partition) -> bool:
    return sum(hit.volume for hit in within.hits(cell)) == cell.volume


def check_memory(needed: int, allowed: int, what: str) -> None:
    """Raises FAILED_PRECONDITION, naming both numbers, if a slot has no room for `what`. needed, allowed: bytes."""
    if needed > allowed:
        raise precondition(
            f"{what} takes {needed} bytes of a relay's slot, and a slot has {allowed}; give the relay {2 * needed} "
            "bytes or more (it keeps two versions), or let it hold only what the workers of its host need"
        )


def check_room(needed: int, room: int, what: str) -> None:
    """Raises UNAVAILABLE, naming both numbers, if the host has no memory for `what`. needed, room: bytes."""
    if needed > room:
        raise unavailable(f"{what} takes {needed} more bytes of memory, and this host, or its cgroup, has {room} left")
