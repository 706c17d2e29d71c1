"""One of two FSDP2 ranks on gloo: python fsdp_rank.py MANAGER RANK DIRECTORY LINEAGE.

For each line on standard input, the seed of new weights, it updates the replicas and prints one line.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from ckpt_engine import Probe, Trainer
from ckpt_engine.integrations.scoring import model_score
from tests.tiny_model import make_tiny_qwen3

VOCABULARY = 500


def main() -> None:
    address, rank, directory = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    store = torch.distributed.FileStore(str(directory / "store"), 2)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    model = make_tiny_qwen3(directory / f"rank-{rank}", 31, vocabulary=VOCABULARY, weights=False)
    whole = sum(parameter.numel() for parameter in model.parameters())
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    held = sum(parameter.to_local().numel() for parameter in model.parameters())
    assert held < 0.6 * whole, "this rank should hold about half of the model"
    probe = Probe([list(range(5, 17))], model_score(model))
    with Trainer(address, rank=rank, world_size=2, lineage=sys.argv[4], probe=probe) as trainer:
        trainer.publish(model)
        for version, line in enumerate(sys.stdin):
            new = make_tiny_qwen3(directory / f"rank-{rank}", int(line), vocabulary=VOCABULARY, weights=False)
            with torch.no_grad():
                for mine, whole_tensor in zip(model.parameters(), new.parameters(), strict=True):
                    shard = distribute_tensor(whole_tensor.detach(), mine.device_mesh, mine.placements)
                    mine.to_local().copy_(shard.to_local())
            report = trainer.update_weights(version=version)
            assert report.ok, report
            assert report.verified
            assert report.message.source_copies == 1
            assert all(each.probe is not None and each.probe.engine.tokens == 11 for each in report.replicas)
            assert not report.probe, report.details
            assert sum(parameter.to_local().numel() for parameter in model.parameters()) == held, "it is sharded again"
            print(f"updated {version}", flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
