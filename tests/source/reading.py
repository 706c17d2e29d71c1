"""Reads what a source offers the way a worker does: through its table and the real transports, nothing else."""

from __future__ import annotations

import torch

from ckpt_engine.core.offers import by_transport
from ckpt_engine.torch_dtypes import torch_dtype
from ckpt_engine.transport.base import Move
from ckpt_engine.transport.registry import all_transports
from ckpt_engine.v1.weights_pb2 import Atom, Atoms, Region, SourceTable


def readable(table: SourceTable) -> list[Region]:
    """Each region by the first way into it."""
    return [next(iter(by_transport(region).values())) for region in table.regions]


def read(table: SourceTable) -> dict[str, torch.Tensor]:
    """Every tensor whole; elements that no shard of this table holds are zero."""
    whole = {spec.name: torch.zeros(tuple(spec.shape), dtype=torch_dtype(spec.dtype)) for spec in table.tensors}
    transports = all_transports()
    for region in readable(table):
        moves = []
        for shard in table.shards:
            if shard.region == region.id:
                spec = table.tensors[shard.tensor]
                box = tuple(slice(start, stop) for start, stop in zip(shard.start, shard.stop, strict=True))
                destination = whole[spec.name][box]
                moves.append(
                    Move(region, shard.offset, tuple(destination.shape), tuple(shard.stride), spec.dtype, destination)
                )
        transports[region.transport].open([region]).prepare(moves).run()
    return whole


def whole_atoms(table: SourceTable) -> Atoms:
    """One atom a shard."""
    return Atoms(
        atoms=[Atom(shard=index, start=shard.start, stop=shard.stop) for index, shard in enumerate(table.shards)]
    )


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Same names, shapes, dtypes and bits."""
    assert sorted(found) == sorted(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].shape == tensor.shape, name
        assert torch.equal(found[name], tensor), name
