"""Digests of what a source has sealed."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from ckpt_engine.copy.copying import TensorCopy
from ckpt_engine.core.offers import label, ranks_of
from ckpt_engine.core.problems import invalid, precondition
from ckpt_engine.digest.boxes import digest_boxes
from ckpt_engine.digest.prepared import PreparedDigests, digest_anywhere, prepare_digests
from ckpt_engine.source.held import plain_values
from ckpt_engine.torch_dtypes import torch_dtype
from ckpt_engine.v1.weights_pb2 import Atoms, SourceTable


def digest_atoms(table: SourceTable, sealed: Sequence[torch.Tensor], atoms: Atoms) -> list[int]:
    """The digest of each atom, in order. `sealed[i]` is the memory of `table.shards[i]`, with the shard's shape and the
    served dtype.

    Raises FAILED_PRECONDITION if the atoms were made for another table, INVALID_ARGUMENT if one is not in its shard.
    """
    return digest_boxes(_boxes(table, sealed, atoms))


def prepare_atoms(table: SourceTable, sealed: Sequence[torch.Tensor], atoms: Atoms) -> PreparedDigests:
    """Prepares what `digest_atoms` does, to be run any number of times, with a search for NaN and infinity
    (`not_finite`). What is stored in another dtype is digested as if cast to the served one. Keeps the memory alive."""
    boxes = _boxes(table, sealed, atoms)
    shards = [table.shards[atom.shard] for atom in atoms.atoms]
    served = [torch_dtype(table.tensors[each.tensor].dtype) if each.stored_dtype else None for each in shards]
    return prepare_digests(boxes, served=served, finite=True)


def not_finite(table: SourceTable, atoms: Atoms, digests: PreparedDigests) -> list[str]:
    """The tensors in which the last run of `digests` found NaN or infinity, each once."""
    shards = (atom.shard for atom, wrong in zip(atoms.atoms, digests.not_finite, strict=True) if wrong)
    found = {table.shards[shard].tensor for shard in shards}
    return [table.tensors[tensor].name for tensor in sorted(found)]


def changed_since(
    table: SourceTable,
    sealed: Sequence[torch.Tensor],
    live: Sequence[torch.Tensor | None],
    atoms: Atoms,
    digests: list[int],
) -> list[str]:
    """The tensors that have other values now than when they were copied.

    live: what `sealed[i]` was copied from; None: not compared. digests: of `sealed`, atom by atom.
    """
    indices = [index for index, atom in enumerate(atoms.atoms) if live[atom.shard] is not None]
    chosen_atoms = Atoms(table_digest=atoms.table_digest, atoms=[atoms.atoms[index] for index in indices])
    values = [
        copy if live_tensor is None else plain_values(live_tensor)
        for live_tensor, copy in zip(live, sealed, strict=True)
    ]
    live_digests = digest_anywhere(
        _boxes(table, values, chosen_atoms), served=[sealed[atom.shard].dtype for atom in chosen_atoms.atoms]
    )
    suspects = {
        atoms.atoms[index].shard
        for index, digest in zip(indices, live_digests, strict=True)
        if digest != digests[index]
    }
    # Two casts of one NaN may differ, by device and by where they lie; of equal copies none was changed.
    changed = {table.shards[shard].tensor for shard in suspects if not _copies_to(values[shard], sealed[shard])}
    return [table.tensors[tensor].name for tensor in sorted(changed)]


def _copies_to(live: torch.Tensor, sealed: torch.Tensor) -> bool:
    copy = torch.empty_like(sealed)
    TensorCopy([(copy, live)]).run()
    return torch.equal(copy.reshape(-1).view(torch.uint8), sealed.reshape(-1).view(torch.uint8))


def _boxes(
    table: SourceTable, sealed: Sequence[torch.Tensor], atoms: Atoms
) -> list[tuple[torch.Tensor, Sequence[int]]]:
    own = hashlib.sha256(table.SerializeToString(deterministic=True)).digest()
    if atoms.table_digest and atoms.table_digest != own:
        raise precondition(
            f"the atoms are of table {atoms.table_digest.hex()[:16]}, but {label(table)} offers "
            f"{own.hex()[:16]}; it published again meanwhile",
            ranks=ranks_of([table]),
        )
    boxes: list[tuple[torch.Tensor, Sequence[int]]] = []
    for atom in atoms.atoms:
        if atom.shard >= len(sealed):
            raise invalid(f"atom of shard {atom.shard}, but {label(table)} has {len(sealed)}", ranks=ranks_of([table]))
        shard = table.shards[atom.shard]
        start, stop = tuple(atom.start), tuple(atom.stop)
        inside = len(start) == len(stop) == len(shard.start) and all(
            lowest <= first <= last <= highest
            for lowest, first, last, highest in zip(shard.start, start, stop, shard.stop, strict=True)
        )
        if not inside:
            raise invalid(
                f"atom [{list(start)}, {list(stop)}) is not in shard [{list(shard.start)}, {list(shard.stop)})",
                tensors=[table.tensors[shard.tensor].name],
                ranks=ranks_of([table]),
            )
        part = tuple(
            slice(first - lowest, last - lowest) for lowest, first, last in zip(shard.start, start, stop, strict=True)
        )
        boxes.append((sealed[atom.shard][part], start))
    return boxes
