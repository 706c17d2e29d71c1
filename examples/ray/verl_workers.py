"""verl's worker group trains a sharded model; replicas of the same Ray job serve each step's weights.

python examples/ray/verl_workers.py --model DIR --insecure             # no GPU: two ranks, the reference engine
python examples/ray/verl_workers.py --model DIR --insecure --gpus --ranks 8 -- vllm serve DIR --host 0.0.0.0
"""

import argparse

import httpx
import ray
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

from ckpt_engine import Trainer
from ckpt_engine.integrations.ray import RayCluster


class Rank(Worker):
    def __init__(self, manager: str, path: str) -> None:
        super().__init__()  # verl sets RANK, WORLD_SIZE and MASTER_ADDR, which torch and Trainer read
        device = "cuda" if torch.cuda.is_available() else "cpu"
        torch.distributed.init_process_group("nccl" if device == "cuda" else "gloo")
        torch.manual_seed(0)  # all ranks begin with the same weights
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path)).to(device)
        self.model = torch.distributed.fsdp.fully_shard(model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.trainer = Trainer(manager)
        self.trainer.publish(self.model)  # what this rank holds; nothing is gathered

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def step(self, number: int, tokens: list[int]) -> tuple[str, int]:
        batch = torch.tensor([tokens], device=next(self.model.parameters()).device)
        self.model(input_ids=batch, labels=batch).loss.backward()  # your loss
        self.optimizer.step()
        self.optimizer.zero_grad()
        return str(self.trainer.update_weights(version=number)), int(self.model(input_ids=batch).logits[0, -1].argmax())


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--address", help="of a Ray cluster; none: one is started here")
    parser.add_argument("--gpus", action="store_true", help="one for each rank and each replica")
    parser.add_argument("--insecure", action="store_true", help="everybody who reaches the ports may use them")
    parser.add_argument("engine", nargs="*", help="the command of a server; none: the reference engine")
    args = parser.parse_args()
    ray.init(address=args.address, num_cpus=None if args.address else args.ranks + 1)  # a rank takes a whole one
    options = [] if args.engine else ["--engine", "reference", "--model", args.model]
    takes = {"num_gpus": int(args.gpus), "num_cpus": 0.2, "replicas": 2, "insecure": args.insecure}
    with RayCluster("verl-workers", engine=args.engine, agent_options=options, gateway=True, **takes) as cluster:
        pool = RayResourcePool([args.ranks], use_gpu=args.gpus, max_colocate_count=1)
        rank = RayClassWithInitArgs(ray.remote(Rank), cluster.manager_address, args.model)
        ranks = RayWorkerGroup(pool, rank, device_name="cuda" if args.gpus else "cpu")
        cluster.wait_for_replicas()
        for number in range(4):
            tokens = [5, 6, 7, 8, number]
            report, own = ranks.step(number, tokens)[0]  # rank 0's
            body = {"model": args.model, "prompt": tokens, "max_tokens": 1, "temperature": 0, "return_token_ids": True}
            answer = httpx.post(f"{cluster.gateway_url}/v1/completions", json=body, timeout=60).raise_for_status()
            print(f"{report}\nstep {number}: {own} by the trainer, {answer.json()['choices'][0]['token_ids']} served")
