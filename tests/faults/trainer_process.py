"""A trainer for fault injection: python trainer_process.py MANAGER LINEAGE WEIGHTS [snapshot] [nccl] [RANK/WORLD].

WEIGHTS has a directory for each seed with model.safetensors. Each line of input is JSON: {"version", "seed",
"timeout", "prefetch", "until"}: the parameters, which lie in shared memory, take that seed's values in place, and the
replicas are updated. Each answer is a line of JSON: what came out. It imports no transformers, so that it is quickly up
again.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from ckpt_engine import CkptEngineError, Trainer


def module_of(tensors: dict[str, torch.Tensor]) -> nn.Module:
    """A module whose parameters have these names."""
    root = nn.Module()
    for name, tensor in tensors.items():
        *path, last = name.split(".")
        place = root
        for part in path:
            if part not in dict(place.named_children()):
                place.add_module(part, nn.Module())
            place = place.get_submodule(part)
        place.register_parameter(last, nn.Parameter(tensor.clone(), requires_grad=False))
    return root


def update(trainer: Trainer, version: int, timeout: float, prefetch: str, until: str) -> dict[str, object]:
    started = time.monotonic()
    try:
        report = trainer.update_weights(version=version, timeout=timeout, prefetch=prefetch, until=until)
    except CkptEngineError as error:
        return {"error": str(error), "seconds": time.monotonic() - started}
    replicas = {each.name: [each.outcome, each.problem] for each in report.replicas}
    ways = sorted({use.transport for each in report.replicas for use in each.transports})
    seconds = time.monotonic() - started
    told = {"ok": report.ok, "held": report.held, "prefetch": report.prefetch}
    return {**told, "replicas": replicas, "ways": ways, "seconds": seconds}


def main() -> None:
    address, lineage, weights = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    torch.set_num_threads(1)
    seeds = [load_file(path) for path in sorted(weights.glob("*/model.safetensors"))]
    model = module_of(seeds[0])
    ranks = next((option for option in sys.argv[4:] if "/" in option), "0/1")
    rank, world_size = (int(number) for number in ranks.split("/"))
    with Trainer(address, rank, world_size, lineage) as trainer:
        transport = "nccl" if "nccl" in sys.argv[4:] else None
        snapshot = "snapshot" in sys.argv[4:]
        trainer.publish(model, snapshot=snapshot or None, move=not snapshot, transport=transport)
        print(json.dumps({"published": True}), flush=True)
        for line in sys.stdin:
            asked = json.loads(line)
            values = seeds[asked["seed"]]
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    parameter.copy_(values[name])
            asking = (asked[name] for name in ("version", "timeout", "prefetch", "until"))
            print(json.dumps(update(trainer, *asking)), flush=True)


if __name__ == "__main__":
    main()
