"""One of two trainer ranks that publish for collectives: collective_rank MANAGER RANK DIRECTORY LINEAGE.

Each holds every other tensor. A question gives the seed of new weights; the answer is what came of their update.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from ckpt_engine import CkptEngineError, Trainer
from tests.end_to_end.conftest import PADDED_VOCABULARY
from tests.line_process import say
from tests.tiny_model import make_tiny_qwen3, named_weights


def main() -> None:
    address, rank, directory, lineage = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
    torch.set_num_threads(1)

    def weights(seed: int) -> dict[str, torch.Tensor]:
        model = make_tiny_qwen3(directory / f"rank-{rank}", seed, vocabulary=PADDED_VOCABULARY, weights=False)
        return dict(named_weights(model)[rank::2])

    mine = weights(0)
    with Trainer(address, rank=rank, world_size=2, lineage=lineage) as trainer:
        trainer.publish(mine, transport="nccl")
        say(published=True)
        for line in sys.stdin:
            for name, tensor in weights(json.loads(line)["seed"]).items():
                mine[name].copy_(tensor)
            try:
                say(**trainer.update_weights(timeout=60.0).to_dict())
            except CkptEngineError as error:
                say(refused=str(error))


if __name__ == "__main__":
    main()
