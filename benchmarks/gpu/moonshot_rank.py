"""One rank of Moonshot's checkpoint-engine: half of the weights in host memory, all of them to its GPU.

torchrun starts one for each GPU. No inference engine is attached: a process of its own receives what the parameter
server broadcasts and copies it into parameters, as an engine's loader would. Rank 0 prints one answer a line (see
`benchmarks.gpu.lines`), the first one after registering, then one for each update.
"""

from __future__ import annotations

import os
import sys
import time
from multiprocessing.queues import Queue
from typing import Any

import torch
from torch.multiprocessing import get_context

from benchmarks.gpu.lines import answer
from benchmarks.gpu.qwen3_8b import SHAPES

VALUE = 0.25


def receive(rank: int, updates: Queue[Any], done: Queue[Any]) -> None:
    """The engine's stand-in on GPU `rank`; answers each update with whether the last bytes are right."""
    import zmq
    from checkpoint_engine.worker import update_weights_from_ipc

    torch.cuda.set_device(rank)
    held = {name: torch.zeros(shape, dtype=torch.bfloat16, device="cuda") for name, shape in SHAPES.items()}
    context = zmq.Context()

    def load(weights: list[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            held[name].copy_(tensor)

    done.put(True)
    while (sockets := updates.get()) is not None:
        uuid = f"GPU-{torch.cuda.get_device_properties(rank).uuid}"
        update_weights_from_ipc(context, dict(sockets)[uuid], rank, run=load, post_hook=torch.cuda.synchronize)
        done.put(all(bool((tensor.reshape(-1)[-1] == VALUE).item()) for tensor in held.values()))
        for tensor in held.values():
            tensor.zero_()
        torch.cuda.synchronize()


def main() -> None:
    from checkpoint_engine.ps import ParameterServer

    rounds = int(sys.argv[1])
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    context = get_context("spawn")
    updates, done = context.Queue(), context.Queue()
    receiver = context.Process(target=receive, args=(rank, updates, done), daemon=True)
    receiver.start()
    assert done.get(timeout=60)
    server = ParameterServer(auto_pg=True)
    weights = {
        name: torch.full(shape, VALUE, dtype=torch.bfloat16)
        for index, (name, shape) in enumerate(SHAPES.items())
        if index % world == rank
    }
    began = time.perf_counter()
    server.register_checkpoint("weights", named_tensors=weights)
    registered = time.perf_counter()
    server.gather_metas("weights")
    if rank == 0:
        answer(register_seconds=registered - began, gather_seconds=time.perf_counter() - registered)
    for _ in range(rounds):
        began = time.perf_counter()
        server.update("weights", updates.put)
        seconds = time.perf_counter() - began
        right = done.get(timeout=60)
        if rank == 0:
            answer(seconds=seconds, right=right)
        time.sleep(0.3)
    updates.put(None)
    receiver.join(20)


if __name__ == "__main__":
    main()
