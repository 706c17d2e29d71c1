"""A trainer on a host of its own, driven by one JSON line at a time; run as a script with the manager's address.

Answers {"train": [folder, seed], "shape": sizes, "publish": wishes, "advertise": address, "share": [rank, ranks]}
(weights of a tiny model, as after a step; the last two at the first one only; of several ranks each has other tensors),
{"update": wishes},
{"spoil": true} (all weights are NaN), {"status": true}, {"members": true} (the manager's whole answer, in hexadecimal
digits), {"close": true}: it ends, and its memory with it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import grpc
import torch

from ckpt_engine import Trainer
from ckpt_engine.channel import ManagerStub
from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.v1 import manager_pb2
from tests.end_to_end.conftest import PADDED_VOCABULARY
from tests.tiny_model import make_tiny_qwen3, named_weights


def _members(address: str) -> Any:
    with grpc.insecure_channel(address) as channel:
        stub = ManagerStub(channel)
        return stub.GetStatus(manager_pb2.GetStatusRequest(), timeout=60)


def status_of(address: str) -> dict[str, Any]:
    """What relays hold, and who serves what at which URL."""
    answer = _members(address)
    return {
        "relays": {each.name: [held.version for held in each.held] for each in answer.holders if each.connected},
        "replicas": {
            each.name: {"version": each.identity.version if each.HasField("identity") else None, "url": each.engine.url}
            for each in answer.replicas
            if each.serving or each.engine.url
        },
    }


def _told(report: Any) -> dict[str, Any]:
    return {
        "held": report.held,
        "outcomes": {each.name: each.outcome for each in report.replicas},
        "problems": {each.name: str(each.problem) for each in report.replicas if each.problem is not None},
        "collective": report.collective,
        "transports": {each.name: [use.transport for use in each.transports] for each in report.replicas},
        "prefetch": report.prefetch,
        "relays": {
            each.relay: {
                "stage": each.stage,
                "upstream": list(each.upstream),
                "replicas": list(each.replicas),
                "brought": {one.source: one.bytes for one in each.filled.brought},
            }
            for each in report.message.relays
        },
    }


def _main(address: str) -> None:
    torch.set_num_threads(1)
    trainer: Trainer | None = None
    model: Any = None
    for line in sys.stdin:
        question = json.loads(line)
        answer: Any = True
        try:
            if "train" in question:
                folder, seed = question["train"]
                rank, ranks = question.get("share", (0, 1))
                trainer = trainer or Trainer(address, rank, ranks, "far", advertise=question.get("advertise"))
                shape = {"vocabulary": PADDED_VOCABULARY, **question.get("shape", {})}
                model = make_tiny_qwen3(Path(folder), seed, weights=False, **shape)
                weights = model if ranks == 1 else list(named_weights(model))[rank::ranks]
                trainer.publish(weights, move=ranks == 1, **question.get("publish", {}))
            elif "update" in question:
                assert trainer is not None
                answer = _told(trainer.update_weights(**question["update"]))
            elif "spoil" in question:
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.fill_(float("nan"))
            elif "status" in question:
                answer = status_of(address)
            elif "members" in question:
                answer = _members(address).SerializeToString().hex()
            elif trainer is not None:
                trainer.close()
                trainer = None
        except (CkptEngineError, grpc.RpcError) as error:
            answer = {"problem": str(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    _main(*sys.argv[1:])
