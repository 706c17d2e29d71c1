"""One of the FSDP2 ranks that hold Qwen3-8B's shapes: python -m benchmarks.gpu.fsdp_rank MANAGER RANK STORE RANKS.

Each has the GPU of its number.

Lines: "renew SEED" puts new values into the local shards; "update" brings the replicas to them.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed
from google.protobuf.json_format import MessageToDict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.gpu.lines import answer
from benchmarks.gpu.qwen3_8b import Tree, renew
from ckpt_engine import Trainer


def main() -> None:
    address, rank, store, ranks = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    torch.cuda.set_device(rank)
    torch.distributed.init_process_group(
        "cpu:gloo,cuda:nccl", store=torch.distributed.FileStore(store, ranks), rank=rank, world_size=ranks
    )
    mesh = init_device_mesh("cuda", (ranks,))
    model = Tree("meta")
    for layer in model.get_submodule("model.layers").children():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device=f"cuda:{rank}")
    renew(model, rank)
    with Trainer(address, rank=rank, world_size=ranks, lineage="benchmark-sharded") as trainer:
        trainer.publish(model)
        answer(ready=True, gigabytes=torch.cuda.memory_allocated() / 1e9)
        for line in sys.stdin:
            what, *arguments = line.split()
            if what == "renew":
                renew(model, int(arguments[0]) * ranks + rank)
                answer(renewed=True)
            else:
                report = trainer.update_weights(timeout=60)
                answer(ok=report.ok, text=report.details, report=MessageToDict(report.message))


if __name__ == "__main__":
    main()
