"""One rank of a training run that torchrun starts; after each step the replicas get the new weights.

    torchrun --nproc-per-node 2 examples/torchrun/train.py --manager 127.0.0.1:50051 --model DIR --steps 3

The model is sharded by FSDP2 over all ranks: NCCL where there are GPUs, else gloo. Each rank publishes what it holds.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

from ckpt_engine import Trainer


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--manager", required=True, help="host:port")
    parser.add_argument("--model", required=True, help="Hugging Face directory; its config.json is enough")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--replicas", type=int, default=1, help="wait for so many, and go on while so many serve")
    options = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    torch.manual_seed(0)  # all ranks begin with the same weights
    config = AutoConfig.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).to(device)
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    # The lineage is torchrun's --rdzv-id; without one the ranks agree on a fresh name.
    with Trainer(options.manager) as trainer:  # rank and world size are those of torchrun
        trainer.publish(model)
        trainer.wait_for_replicas(options.replicas)
        for step in range(options.steps):
            tokens = torch.randint(config.vocab_size, (4, 16), device=device)  # your rollouts
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            # Every rank calls; it returns when all replicas have an outcome. ok: at least so many serve the weights.
            report = trainer.update_weights(version=step, min_replicas=options.replicas)
            if dist.get_rank() == 0:
                print(f"step {step}, loss {loss.item():.3f}\n{report}", flush=True)
            if not report.ok:
                raise SystemExit(1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
