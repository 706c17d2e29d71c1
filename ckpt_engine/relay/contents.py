"""What can be read in a slot once it was filled: a table, and the memory of each of its shards."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import torch

from ckpt_engine.core.relay_layout import SlotLayout
from ckpt_engine.core.sealed_record import ProvenRecord
from ckpt_engine.relay.fill import Memory
from ckpt_engine.source.host_memory import contiguous
from ckpt_engine.torch_dtypes import torch_dtype
from ckpt_engine.v1.weights_pb2 import OfferedRegion, Shard, SourceTable


@dataclass(frozen=True)
class Contents:
    """Equal from version to version of one layout. listed: a table without its regions. sealed: the memory of each of
    its shards."""

    listed: SourceTable
    sealed: Sequence[torch.Tensor]

    def table(self, regions: Iterable[OfferedRegion]) -> SourceTable:
        """A table with the regions, of all groups, in which something lies."""
        found = SourceTable()
        found.CopyFrom(self.listed)
        used = {shard.region for shard in found.shards}
        found.regions.extend(region for region in regions if region.id in used)
        return found


def contents_of(
    source: SourceTable, recorded: ProvenRecord, layout: SlotLayout, missing: Collection[int], memory: Memory
) -> Contents:
    """What can be read of a version in a slot. source: who has it. missing: cells of the record that nobody brought.
    memory: of the slot."""
    specs = recorded.record.manifest.tensors
    atoms = [atom for atom in layout.atoms if atom.cell not in missing and atom.box.volume]
    tensors = sorted({atom.tensor for atom in atoms})
    place = {tensor: index for index, tensor in enumerate(tensors)}
    listed = SourceTable()
    listed.CopyFrom(source)
    listed.tensors.extend(specs[tensor] for tensor in tensors)
    listed.shards.extend(
        Shard(
            tensor=place[atom.tensor],
            start=atom.box.start,
            stop=atom.box.stop,
            region=atom.group,
            offset=atom.offset - layout.groups[atom.group].offset,
            stride=contiguous(atom.box.shape),
        )
        for atom in atoms
    )
    sealed = [memory(atom.offset, atom.box.shape, torch_dtype(specs[atom.tensor].dtype)) for atom in atoms]
    return Contents(listed, sealed)
