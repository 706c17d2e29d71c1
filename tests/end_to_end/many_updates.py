"""One trainer that makes as many updates as it is told: python many_updates.py MANAGER DIRECTORY LINEAGE.

Reads numbers from its input, a line each; makes so many updates, each of changed weights, and answers with the version
that it has reached. A module's parameters lie in shared memory themselves; nothing is copied at the source.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from ckpt_engine import Trainer
from tests.tiny_model import make_tiny_qwen3

VOCABULARY = 500


def main() -> None:
    address, directory, lineage = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    model = make_tiny_qwen3(directory / lineage, 71, vocabulary=VOCABULARY, weights=False)
    version = 0
    with Trainer(address, lineage=lineage) as trainer:
        trainer.publish(model, move=True)
        for line in sys.stdin:
            for _ in range(int(line)):
                version += 1
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.neg_()
                report = trainer.update_weights(version=version)
                assert report.ok, report
                assert report.verified, report
            print(version, flush=True)


if __name__ == "__main__":
    main()
