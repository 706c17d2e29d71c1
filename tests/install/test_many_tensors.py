"""Every one of many tensors is verified, whichever group its digest is computed in."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from ckpt_engine.engine.target import ModuleTarget
from ckpt_engine.v1 import weights_pb2
from tests.install.install_models import Plain
from tests.install.install_world import Checkpoint, OneWorker, random_tensor


@pytest.mark.parametrize("number", [0, 255, 256, 511, 512, 599])
def test_a_bit_flipped_in_any_of_many_tensors_is_seen(tmp_path: Path, number: int) -> None:
    """Digests of a CPU are computed in groups."""

    def load_one(model: Plain, name: str, weight: Tensor) -> None:
        getattr(model, name).data.copy_(weight)

    weights = {f"w{index:03}": random_tensor((4,), torch.float32, index) for index in range(600)}
    checkpoint = Checkpoint(weights)
    worker = OneWorker(ModuleTarget(Plain(load_one, **{name: torch.zeros(4) for name in weights})), tmp_path)
    worker.prepare(checkpoint)
    order = worker.order(checkpoint)
    checkpoint.flip(f"w{number:03}", (2,))
    problem = worker.installer.install(order).report.problem
    assert (problem.code, list(problem.tensors)) == (weights_pb2.Problem.CODE_DATA_LOSS, [f"w{number:03}"])
    checkpoint.close()
