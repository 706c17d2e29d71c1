"""A trainer with Qwen3-8B's shapes on GPU 0, on a host of its own, driven by one JSON line at a time. Run as a script
with the manager's address.

Answers {"renew": seed} (new weights; then GB/s of a copy to pinned memory, the ceiling of whoever reads them),
{"update": wishes} (an UpdateReport, in hexadecimal digits) and {"status": true}.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from benchmarks.gpu.measure import CopyCeiling
from benchmarks.gpu.qwen3_8b import Tree, renew
from ckpt_engine import Trainer
from ckpt_engine.core.problems import CkptEngineError
from tests.end_to_end.far_trainer import status_of


def _main(address: str) -> None:
    ceiling: CopyCeiling | None = None
    model: Tree | None = None
    trainer: Trainer | None = None
    for line in sys.stdin:
        question = json.loads(line)
        answer: Any = None
        try:
            if "renew" in question:
                model = model or Tree("cuda:0")
                renew(model, question["renew"])
                if trainer is None:
                    trainer = Trainer(address, lineage="far")
                    trainer.publish(model)
                ceiling = ceiling or CopyCeiling("cuda:0", "cpu", 2 << 30)
                answer = ceiling.once()
            elif "update" in question:
                assert trainer is not None, "renew comes first"
                answer = trainer.update_weights(**question["update"]).message.SerializeToString().hex()
            else:
                answer = status_of(address)
        except CkptEngineError as error:
            answer = {"problem": str(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    _main(*sys.argv[1:])
