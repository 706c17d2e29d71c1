"""What can be read in a filled slot: a table, and the memory of each of its shards."""

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
    """What can be read in a slot; equal from version to version of one layout."""

    listed: SourceTable  # without its regions
    sealed: Sequence[torch.Tensor]  # the memory of each of its shards

    def table(self, regions: Iterable[OfferedRegion]) -> SourceTable:
        """The table with those of the groups' regions in which shards lie."""
        found = SourceTable()
        found.CopyFrom(self.listed)
        used = {shard.region for shard in found.shards}
        found.regions.extend(region for region in regions if region.id in used)
        return found


def contents_of(
    source: SourceTable, recorded: ProvenRecord, layout: SlotLayout, missing: Collection[int], memory: Memory
) -> Contents:
    """What can be read of a version in a slot. source: a table with the relay's facts. missing: cells of the record
    that could not be brought. memory: of the slot."""
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
