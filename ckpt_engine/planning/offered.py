"""Makes the tables that a trainer would publish and the needs that workers would have, for the manager's own planner.
Pure.

Tensors that are split alike are planned once: one of them stands for all, and its bytes count as often as there are
such tensors. The planner's choices depend on boxes, hosts and holders, which are the same for all of them.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

from ckpt_engine.core.boxes import Box
from ckpt_engine.core.cells import NeededBoxes
from ckpt_engine.core.chunk_sizes import chunk_bytes
from ckpt_engine.core.dtypes import itemsize
from ckpt_engine.core.offers import rank_id
from ckpt_engine.core.partition import Partition
from ckpt_engine.core.publication import Publication, merge_tables
from ckpt_engine.planning.model import Model, Tensor
from ckpt_engine.planning.splits import Split
from ckpt_engine.v1.weights_pb2 import Host, Need, Offer, OfferedRegion, Shard, SourceTable, TensorSpec, WorkerNeeds


class TensorKind(NamedTuple):
    """Tensors that are split alike."""

    tensor: Tensor  # one of them
    many: int  # how many there are


def kinds_of(model: Model, trainer: Split, replica: Split) -> tuple[TensorKind, ...]:
    """The kinds of a model's tensors, sorted by the name of the one that stands for the others."""
    first: dict[Hashable, Tensor] = {}
    counts: dict[Hashable, int] = {}
    for tensor in model.tensors:
        key = tensor.dtype, tensor.shape, trainer.key(tensor), replica.key(tensor)
        first.setdefault(key, tensor)
        counts[key] = counts.get(key, 0) + 1
    return tuple(sorted(TensorKind(tensor, counts[key]) for key, tensor in first.items()))


@dataclass(frozen=True, eq=False)
class PlannedOffer:
    """What a trainer would publish, and what the workers of a replica would need of it."""

    kinds: tuple[TensorKind, ...]
    publication: Publication  # of one tensor of each kind, in the order of `kinds`
    needs: tuple[WorkerNeeds, ...]  # of each worker of a replica
    model: int  # bytes of one copy of the weights

    @cached_property
    def needed_boxes(self) -> tuple[NeededBoxes, ...]:
        """The needs of each worker, as boxes."""
        return tuple(
            tuple((need.tensor, Box(tuple(need.start), tuple(need.stop))) for need in each.needs) for each in self.needs
        )

    @cached_property
    def record(self) -> tuple[Partition, ...]:
        """How each kind's tensors are cut when they are sealed: along all needs, and into cells no larger than what
        travels at a time."""
        found: dict[tuple[int, frozenset[Box], int], Partition] = {}
        partitions = []
        for number, partition in enumerate(self.publication.partitions):
            boxes = frozenset(box for needs in self.needed_boxes for tensor, box in needs if tensor == number)
            most = chunk_bytes(self.model) // self.width(number)
            key = id(partition), boxes, most
            if key not in found:
                found[key] = Partition(tuple(sorted(partition.tiling(boxes, most).boxes)))
            partitions.append(found[key])
        return tuple(partitions)

    def width(self, kind: int) -> int:
        """Bytes of an element of a kind."""
        return itemsize(self.kinds[kind].tensor.dtype)

    def weight(self, kind: int) -> int:
        """Bytes that one element of a kind's box stands for, over all tensors of the kind."""
        return self.width(kind) * self.kinds[kind].many

    def held(self, source: int) -> int:
        """Bytes that a source holds."""
        table = self.publication.tables[source]
        numbers = {kind.tensor.name: number for number, kind in enumerate(self.kinds)}
        names = [spec.name for spec in table.tensors]
        return sum(
            prod(stop - start for start, stop in zip(shard.start, shard.stop, strict=True))
            * self.weight(numbers[names[shard.tensor]])
            for shard in table.shards
        )

    def needed(self, worker: int) -> int:
        """Bytes that a worker needs."""
        return sum(box.volume * self.weight(kind) for kind, box in self.needed_boxes[worker])


def planned_offer(
    model: Model, trainer: Split, replica: Split, hosts: Sequence[Host], transports: Sequence[str], stays: bool
) -> PlannedOffer:
    """Makes the offer of a trainer. hosts: of its ranks. transports: over which they lend. stays: its weights stay
    sealed. Raises as `merge_tables`."""
    kinds = kinds_of(model, trainer, replica)
    tables = [_table(kinds, trainer, rank, host, transports, stays) for rank, host in enumerate(hosts)]
    publication = merge_tables(tables)
    needs = tuple(_needs(kinds, replica, worker, publication.manifest_digest) for worker in range(replica.count))
    return PlannedOffer(kinds, publication, needs, model.bytes)


def _table(
    kinds: Sequence[TensorKind], split: Split, rank: int, host: Host, transports: Sequence[str], stays: bool
) -> SourceTable:
    specs: list[TensorSpec] = []
    shards: list[Shard] = []
    at = 0
    for kind in kinds:
        boxes = split.boxes(kind.tensor, rank)
        for box in boxes:
            strides = [prod(box.shape[axis + 1 :]) for axis in range(box.rank)]
            shards.append(Shard(tensor=len(specs), start=box.start, stop=box.stop, offset=at, stride=strides))
            at += box.volume * itemsize(kind.tensor.dtype)
        if boxes:
            specs.append(TensorSpec(name=kind.tensor.name, dtype=kind.tensor.dtype, shape=kind.tensor.shape))
    region = OfferedRegion(id=0, size=at, offers=[Offer(transport=name) for name in transports])
    regions = [region] if shards else []
    return SourceTable(
        host=host, rank=rank, tensors=specs, regions=regions, shards=shards, stays_sealed=stays, id=rank_id(rank)
    )


def _needs(kinds: Sequence[TensorKind], split: Split, worker: int, manifest: bytes) -> WorkerNeeds:
    needs, elsewhere = [], []
    for number, kind in enumerate(kinds):
        boxes = split.boxes(kind.tensor, worker)
        needs += [Need(tensor=number, start=box.start, stop=box.stop) for box in dict.fromkeys(boxes)]
        if not boxes:
            elsewhere.append(number)
    return WorkerNeeds(manifest_digest=manifest, needs=needs, elsewhere=elsewhere)
