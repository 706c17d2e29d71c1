"""An installer whose model lives on a GPU: what it installs is what the model's own loader gives, bit for bit; the last
bit of it is checked; nothing is staged through the host, and a second update only replays."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_engine.copy import copy_kernel
from ckpt_engine.engine.target import ModuleTarget
from ckpt_engine.install import ready
from ckpt_engine.v1 import manager_pb2

sys.path.insert(0, str(Path(__file__).parents[1] / "install"))

from tests.install.install_models import TensorParallel, assert_same, state
from tests.install.install_world import Checkpoint, OneWorker

pytestmark = pytest.mark.timeout(120)

SIZES: dict[str, Any] = {"hidden": 264, "inner": 520, "vocabulary": 1003, "layers": 3, "head": 32}


def models(rank: int = 0, size: int = 1, tied: bool = False) -> tuple[TensorParallel, TensorParallel]:
    """One on the GPU, and its like on the CPU. Both hold NaN."""
    model, like = (TensorParallel(rank, size, tied=tied, **SIZES) for _ in range(2))
    return model.to("cuda"), like


def on_host(model: torch.nn.Module) -> Any:
    return state(model.to("cpu"))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("rank", "size"), [(0, 1), (1, 2)])
def test_it_is_what_the_loader_gives(tmp_path: Path, rank: int, size: int, tied: bool) -> None:
    model, like = models(rank, size, tied)
    checkpoint = Checkpoint(model.checkpoint(), seed=rank)
    worker = OneWorker(ModuleTarget(model), tmp_path)
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    for _ in range(3):
        checkpoint.weights = {name: torch.randn_like(weight) for name, weight in checkpoint.weights.items()}
        checkpoint.seal()
        installed = worker.update(checkpoint)
        assert not installed.report.HasField("problem"), installed.report.problem.message
        recording = worker.recording(checkpoint)
        assert installed.report.verified == len(recording.needs)
        assert installed.report.bytes == sum(edge.bytes for edge in installed.edges) > 0
        assert all(edge.reason == "same host" for edge in installed.edges), "memory was registered, nothing to tell"
    assert [parameter.data_ptr() for parameter in model.parameters()] == addresses
    like.load_weights(checkpoint.weights.items())
    assert_same(on_host(model), state(like))
    checkpoint.close()


def test_one_bit_is_noticed_and_the_next_update_heals(tmp_path: Path) -> None:
    model, like = models()
    checkpoint = Checkpoint(model.checkpoint(), seed=5)
    worker = OneWorker(ModuleTarget(model), tmp_path)
    worker.prepare(checkpoint)
    order = worker.order(checkpoint)
    checkpoint.flip("layers.1.o_proj", (7, 3))
    installed = worker.installer.install(order)
    assert "layers.1.o_proj" in installed.report.problem.message
    assert worker.page.read()[0].state == manager_pb2.WORKER_STATE_DIRTY
    checkpoint.seal()
    installed = worker.update(checkpoint)
    assert not installed.report.HasField("problem"), installed.report.problem.message
    assert worker.page.read()[0].state == manager_pb2.WORKER_STATE_CLEAN
    like.load_weights(checkpoint.weights.items())
    assert_same(on_host(model), state(like))


def test_a_deadline_leaves_the_worker_dirty(tmp_path: Path) -> None:
    model, _ = models()
    checkpoint = Checkpoint(model.checkpoint(), seed=5)
    worker = OneWorker(ModuleTarget(model), tmp_path)
    worker.update(checkpoint)
    worker.prepare(checkpoint)
    order = worker.order(checkpoint)
    order.deadline_seconds = 1e-3

    def slow(_stage: object, _done: int, _total: int) -> None:
        time.sleep(2e-3)

    installed = worker.installer.install(order, slow)
    assert installed.report.HasField("problem")
    assert worker.page.read()[0].state != manager_pb2.WORKER_STATE_NONE


def test_a_second_update_prepares_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = models()
    checkpoint = Checkpoint(model.checkpoint(), seed=5)
    worker = OneWorker(ModuleTarget(model), tmp_path)
    assert not worker.update(checkpoint).report.HasField("problem")
    order = worker.order(checkpoint)
    made: list[object] = []
    for module, name in ((copy_kernel, "CopyTable"), (ready, "prepare_digests")):
        kind = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *given, kind=kind, **named: made.append(kind) or kind(*given, **named))
    worker.prepare(checkpoint)
    order.fence.CopyFrom(worker.fence())
    assert not worker.installer.install(order).report.HasField("problem")
    assert made == []
