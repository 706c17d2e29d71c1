"""Source tables for tests, and weights that they describe: tensors cut by hand, held in numpy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from ckpt_engine.core.boxes import Box, whole
from ckpt_engine.core.plan import PlanRequest, Plans
from ckpt_engine.digest.boxes import digest_boxes
from ckpt_engine.torch_dtypes import dtype_name
from ckpt_engine.v1.weights_pb2 import (
    Digests,
    Host,
    Need,
    Offer,
    OfferedRegion,
    Shard,
    SourceTable,
    TensorSpec,
    WorkerNeeds,
)

HERE = Host(boot_id="boot-1", pid_namespace="pid:[1]", name="h1")
THERE = Host(boot_id="boot-2", pid_namespace="pid:[1]", name="h2")

Held = Sequence[tuple[str, Box]]


def table(
    rank: int,
    weights: Mapping[str, torch.Tensor],
    held: Held,
    *,
    host: Host = HERE,
    transport: str = "shared_memory",
    stays_sealed: bool = False,
) -> SourceTable:
    """A rank that holds these boxes, one behind the other in one region, rows first."""
    names = sorted({name for name, _ in held})
    shards = []
    offset = 0
    for name, box in held:
        stride = [math.prod(box.shape[axis + 1 :]) for axis in range(box.rank)]
        shards.append(
            Shard(tensor=names.index(name), start=box.start, stop=box.stop, region=7, offset=offset, stride=stride)
        )
        offset += box.volume * weights[name].itemsize
    return SourceTable(
        host=host,
        id=f"rank {rank}",
        rank=rank,
        tensors=[spec(name, weights[name]) for name in names],
        regions=[OfferedRegion(id=7, size=offset, offers=[Offer(transport=transport)])],
        shards=shards,
        stays_sealed=stays_sealed,
    )


def spec(name: str, tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec(name=name, dtype=dtype_name(tensor.dtype), shape=tensor.shape)


def everything(weights: Mapping[str, torch.Tensor]) -> Held:
    return [(name, whole(tensor.shape)) for name, tensor in sorted(weights.items())]


def rows(weights: Mapping[str, torch.Tensor], rank: int, ranks: int) -> Held:
    """What one of `ranks` holds when the first axis is dealt out evenly."""
    held = []
    for name, tensor in sorted(weights.items()):
        each = tensor.shape[0] // ranks
        box = whole(tensor.shape)
        held.append((name, Box((rank * each, *box.start[1:]), ((rank + 1) * each, *box.stop[1:]))))
    return held


def request(
    key: object, plans_for: bytes, needs: Sequence[tuple[int, Box]], host: Host = HERE, *transports: str
) -> PlanRequest:
    return PlanRequest(
        key,
        WorkerNeeds(
            manifest_digest=plans_for,
            needs=[Need(tensor=tensor, start=box.start, stop=box.stop) for tensor, box in needs],
        ),
        host,
        transports or ("shared_memory", "file"),
    )


def part(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    return tensor[tuple(slice(start, stop) for start, stop in zip(box.start, box.stop, strict=True))]


def digests(plans: Plans, source: int, weights: Mapping[str, torch.Tensor]) -> Digests:
    """What a source answers if it holds `weights`."""
    own = plans.publication.tables[source]
    found = []
    for atom in plans.atoms[source].atoms:
        box = Box(tuple(atom.start), tuple(atom.stop))
        name = own.tensors[own.shards[atom.shard].tensor].name
        found.append((part(weights[name], box), box.start))
    return Digests(values=digest_boxes(found))
