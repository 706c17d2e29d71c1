"""A trainer on GPU 0 that publishes for collectives: collective_trainer MANAGER DIRECTORY SIZE.

A question gives the seed of new weights, and perhaps the update's timeout in seconds; the answer is what came of it.
SIZE: "tiny", or "large": 1.7 GB.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from ckpt_engine import CkptEngineError, Trainer
from tests.line_process import say
from tests.tiny_model import make_tiny_qwen3

LARGE: dict[str, Any] = {"layers": 14, "hidden": 2048, "intermediate": 8192, "vocabulary": 32000}


def main() -> None:
    address, directory, size = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    shape = LARGE if size == "large" else {}
    model = make_tiny_qwen3(directory / "trained", 0, weights=False, **shape).to("cuda:0")
    with Trainer(address, lineage=size) as trainer:
        trainer.publish(model, transport="nccl")
        say(published=True)
        for line in sys.stdin:
            asked = json.loads(line)
            seed = asked["seed"]
            with torch.no_grad():
                if size == "large":
                    torch.manual_seed(seed)
                    for parameter in model.parameters():
                        parameter.normal_()
                else:
                    new = make_tiny_qwen3(directory / "new", seed, weights=False)
                    for mine, theirs in zip(model.parameters(), new.parameters(), strict=True):
                        mine.copy_(theirs)
            try:
                say(**trainer.update_weights(timeout=asked.get("timeout", 120.0)).to_dict())
            except CkptEngineError as error:
                say(refused=str(error))


if __name__ == "__main__":
    main()
