"""A training actor on Ray, with replicas beside it: each step's weights reach all of them, and the gateway answers.

python examples/ray/train.py --model DIR --insecure                    # no GPU: the reference engine
python examples/ray/train.py --model DIR --insecure --gpus 1 --address auto -- vllm serve DIR --host 0.0.0.0
"""

from __future__ import annotations

import argparse

import httpx
import ray
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ckpt_engine import Trainer
from ckpt_engine.integrations.ray import RayCluster


class Training:
    def __init__(self, manager: str, path: str) -> None:
        self.model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), dtype=torch.bfloat16)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.trainer = Trainer(manager)
        self.trainer.publish(self.model, snapshot=True)

    def step(self, number: int, tokens: list[int]) -> str:
        batch = torch.tensor([tokens])
        self.model(input_ids=batch, labels=batch).loss.backward()  # your loss
        self.optimizer.step()
        self.optimizer.zero_grad()
        return str(self.trainer.update_weights(version=number))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--address", help="of a Ray cluster; none: one is started here")
    parser.add_argument("--gpus", type=float, default=0)
    parser.add_argument("--insecure", action="store_true", help="everybody who reaches the ports may use them")
    parser.add_argument("engine", nargs="*", help="the command of a server; none: the reference engine")
    args = parser.parse_args()
    ray.init(address=args.address)
    options = [] if args.engine else ["--engine", "reference", "--model", args.model]
    takes = {"num_gpus": args.gpus, "num_cpus": 0.2, "replicas": 2, "insecure": args.insecure}
    with RayCluster(engine=args.engine, agent_options=options, gateway=True, **takes) as cluster:
        training = ray.remote(Training).options(num_cpus=0.2).remote(cluster.manager_address, args.model)
        cluster.wait_for_replicas()
        tokens = [5, 6, 7, 8]
        for number in range(3):
            print(ray.get(training.step.remote(number, tokens)))  # two lines of its report
            body = {"model": args.model, "prompt": tokens[:4], "max_tokens": 8, "return_token_ids": True}
            answer = httpx.post(f"{cluster.gateway_url}/v1/completions", json=body, timeout=60).raise_for_status()
            tokens = tokens[:4] + answer.json()["choices"][0]["token_ids"]
            print(f"after step {number}: {tokens}")


if __name__ == "__main__":
    main()
