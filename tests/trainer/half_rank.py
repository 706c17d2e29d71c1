"""One of two ranks, a LineProcess: `half_rank MANAGER RANK DIRECTORY`. Prints what it found as JSON.

"halves" is a DTensor of which each rank holds a row, "both" is the same on both ranks.
"""

import json
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from ckpt_engine import CkptEngineError, Trainer
from tests.trainer.trainer_world import DEADLINES


def main(manager: str, rank: int, directory: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/rendezvous", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    local, both = torch.zeros(1, 3), torch.zeros(4)
    weights = {"halves": DTensor.from_local(local, mesh, [Shard(0)], run_check=False), "both": both}
    with Trainer(manager, rank=rank, world_size=2, deadlines=DEADLINES) as trainer:
        trainer.wait_for_replicas(timeout=60)
        trainer.publish(weights if rank == 0 else {**weights, "both": torch.zeros(5)})
        refused = ""
        try:
            trainer.update_weights(timeout=60)
        except CkptEngineError as error:
            refused = error.problem.message
        dist.barrier()
        trainer.publish(weights)
        reports = []
        for step in (1, 2):
            local.fill_(10 * step + rank)
            both.fill_(step)
            reports.append(trainer.update_weights(step, timeout=60).to_dict())
    print(json.dumps({"lineage": trainer.lineage, "refused": refused, "reports": reports}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
