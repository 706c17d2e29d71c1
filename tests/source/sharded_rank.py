"""One rank of a sharded trainer: a real process in a gloo group. Run as `python -m tests.source.sharded_rank`.

Arguments: rank, world size, directory. It ends with 0 if everything that it asserts holds.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.source.base import Source
from ckpt_engine.source.open import open_source
from ckpt_engine.v1.weights_pb2 import Problem, SourceTable
from tests.source.reading import assert_equal, read


def tables(directory: Path, step: str, source: Source) -> list[SourceTable]:
    """Every rank's table; they can be read from until the next barrier."""
    rank, world = dist.get_rank(), dist.get_world_size()
    (directory / f"{step}.{rank}").write_bytes(source.table().SerializeToString())
    dist.barrier()
    return [SourceTable.FromString((directory / f"{step}.{other}").read_bytes()) for other in range(world)]


def together(found: list[SourceTable]) -> dict[str, torch.Tensor]:
    """What all ranks' shared memory holds of each tensor. Asserts that no element is missing, and that none is held
    twice unless by shards that are equal."""
    whole: dict[str, torch.Tensor] = {}
    for table in found:
        parts = read(table)
        for shard in table.shards:
            spec = table.tensors[shard.tensor]
            target = whole.setdefault(spec.name, torch.full(tuple(spec.shape), torch.nan))
            box = tuple(slice(start, stop) for start, stop in zip(shard.start, shard.stop, strict=True))
            new, old = parts[spec.name][box].float(), target[box]
            assert old.isnan().all() or torch.equal(old, new), spec.name
            target[box] = new
    assert not any(tensor.isnan().any() for tensor in whole.values())
    return whole


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(7, 7) for _ in range(2))
        self.one = nn.Parameter(torch.ones(1, 7))
        self.head = nn.Linear(7, 5, bias=False)
        self.register_buffer("steps", torch.zeros(3))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = layer(hidden) * self.one
        return self.head(hidden)


def fsdp(directory: Path) -> None:
    """Uneven and empty shards, a step, gathered root parameters, bfloat16."""
    torch.manual_seed(3)
    model = Model()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    source = open_source(model, rank=dist.get_rank(), world_size=dist.get_world_size())
    assert source.table().description == "FSDP2 module, copied at each seal"
    assert source.table().stays_sealed
    before = source.table().SerializeToString()
    for step in range(2):
        optimizer.zero_grad()
        model(torch.ones(2, 7)).sum().backward()
        optimizer.step()
        # A forward pass alone leaves the root's parameters gathered; they must be found sharded all the same.
        with torch.no_grad():
            model(torch.ones(2, 7))
        assert not isinstance(dict(model.named_parameters())["head.weight"], DTensor)
        source.check()
        source.seal()
        found = tables(directory, f"fsdp{step}", source)
        expected = {name: tensor.full_tensor().detach() for name, tensor in model.named_parameters()}  # type: ignore[attr-defined]
        assert_equal(together(found), {**expected, "steps": torch.zeros(3)})
        assert source.table().SerializeToString() == before
        dist.barrier()
    rows = {
        table.tensors[shard.tensor].name: (shard.start[0], shard.stop[0])
        for table in found
        for shard in table.shards
        if table.rank == 3
    }
    assert rows["layers.0.weight"] == (6, 7)
    assert "head.weight" not in rows
    assert "one" not in rows
    assert rows["steps"] == (0, 3)

    with pytest.raises(CkptEngineError, match="snapshot=False") as refused:
        open_source(model, snapshot=False, move=True)
    assert refused.value.problem.code == Problem.CODE_INVALID_ARGUMENT

    served = open_source(model, rank=dist.get_rank(), world_size=4, dtype="bfloat16")
    served.seal()
    found = tables(directory, "cast", served)
    halves = {name: tensor.full_tensor().bfloat16().float() for name, tensor in model.named_parameters()}  # type: ignore[attr-defined]
    assert_equal(together(found), {**halves, "steps": torch.zeros(3)})
    dist.barrier()


def meshes(directory: Path) -> None:
    """Two-dimensional meshes: every combination of Shard and Replicate, even and uneven."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    line = DeviceMesh("cpu", torch.arange(4))
    torch.manual_seed(4)
    layouts: dict[str, tuple[DeviceMesh, list[Placement], tuple[int, ...]]] = {
        "columns": (mesh, [Shard(0), Shard(1)], (5, 3)),
        "rows": (mesh, [Shard(1), Shard(0)], (5, 3)),
        "twice": (mesh, [Shard(0), Shard(0)], (7, 2)),
        "hybrid": (mesh, [Replicate(), Shard(0)], (5, 3)),
        "inner": (mesh, [Shard(1), Replicate()], (5, 3)),
        "copies": (mesh, [Replicate(), Replicate()], (2, 2)),
        "short": (line, [Shard(0)], (2, 3)),
        "last": (line, [Shard(-1)], (2, 6)),
        "empty": (line, [Shard(0)], (0, 3)),
    }
    full = {name: torch.randn(shape) for name, (_, _, shape) in layouts.items()}
    tensors = {
        name: distribute_tensor(full[name].clone(), where, placements)
        for name, (where, placements, _) in layouts.items()
    }
    source = open_source(tensors, rank=dist.get_rank(), world_size=4)
    source.seal()
    found = tables(directory, "meshes", source)
    assert_equal(together(found), full)
    held = [{table.tensors[shard.tensor].name for shard in table.shards} for table in found]
    assert "short" in held[1]
    assert "short" not in held[2]
    assert all("empty" in names for names in held)

    for placement in (_StridedShard(0, split_factor=2), Partial()):
        odd = DTensor.from_local(torch.zeros(4, 4), line, [placement], run_check=False)
        with pytest.raises(CkptEngineError, match="only Shard and Replicate") as refused:
            open_source({"odd": odd})
        assert list(refused.value.problem.tensors) == ["odd"]
    dist.barrier()


def flat(directory: Path) -> None:
    """FSDP1 has whole parameters, as views of one buffer, only where it does not shard."""
    torch.manual_seed(5)
    model = FullyShardedDataParallel(
        nn.Linear(3, 4),
        use_orig_params=True,
        sharding_strategy=ShardingStrategy.NO_SHARD,
        device_id=torch.device("cpu"),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    source = open_source(model, rank=dist.get_rank(), world_size=4)
    assert [entry.tensors for entry in source.table().copied] == [2]
    for step in range(2):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        source.check()
        source.seal()
        found = tables(directory, f"flat{step}", source)
        assert_equal(together(found), {"weight": model.module.weight.detach(), "bias": model.module.bias.detach()})
        dist.barrier()

    sharded = FullyShardedDataParallel(nn.Linear(3, 4), use_orig_params=True, device_id=torch.device("cpu"))
    with pytest.raises(CkptEngineError, match="FSDP1") as refused:
        open_source(nn.Sequential(sharded))
    assert refused.value.problem.code == Problem.CODE_INVALID_ARGUMENT
    assert refused.value.problem.tensors[0].endswith("weight")


def main() -> None:
    rank, world, directory = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    store = dist.FileStore(str(directory / "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    fsdp(directory)
    meshes(directory)
    flat(directory)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
