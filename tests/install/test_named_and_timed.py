"""What a worker refuses to begin, whom it names when bytes differ, and where it says that time went."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ckpt_engine.digest import host as digest_host
from ckpt_engine.engine.target import ModuleTarget, Quantised
from ckpt_engine.install.ready import Ready
from ckpt_engine.v1 import weights_pb2, worker_pb2
from tests.install.install_models import Plain, TensorParallel, target_of
from tests.install.install_world import Checkpoint, OneWorker, random_tensor

LOADING = 0.05
"""Seconds that a loader takes here."""


def test_a_prepare_that_was_overtaken_is_refused(tmp_path: Path) -> None:
    """Its update is over; it would push recordings out that are needed."""
    model = TensorParallel()
    checkpoint = Checkpoint(model.checkpoint())
    worker = OneWorker(ModuleTarget(model), tmp_path)
    assert not worker.update(checkpoint).report.HasField("problem")
    fence = weights_pb2.Fence(cluster="test", epoch=worker.epoch - 1)
    order = worker_pb2.PrepareOrder(fence=fence, manifest=checkpoint.manifest_bytes, deadline_seconds=60)
    prepared = worker.installer.prepare(order)
    assert prepared.problem.code == weights_pb2.Problem.CODE_ABORTED
    assert not prepared.needs
    checkpoint.close()


def test_only_tensors_that_were_loaded_to_the_same_place_are_named_besides(tmp_path: Path) -> None:
    def load_one(model: Plain, name: str, weight: Tensor) -> None:
        model.other.data.copy_(weight) if name == "other" else model.w.data.copy_(weight)

    weight = random_tensor((3, 4), torch.float32, 0)
    checkpoint = Checkpoint({"embed": weight, "head": weight.clone(), "other": weight.clone()})
    target = target_of(load_one, w=torch.zeros(3, 4), other=torch.zeros(3, 4))
    worker = OneWorker(target, tmp_path)
    assert not worker.update(checkpoint).report.HasField("problem")
    checkpoint.weights["embed"] = weight + 1
    checkpoint.seal()
    problem = worker.update(checkpoint).report.problem
    assert "also loaded from head)" in problem.message
    assert "other" not in problem.message
    checkpoint.close()


def test_the_time_of_a_loader_that_computes_counts_as_installing(tmp_path: Path) -> None:
    def load_one(model: Plain, name: str, weight: Tensor) -> None:
        time.sleep(LOADING)
        model.w.data.copy_(weight * 2)

    checkpoint = Checkpoint({"w": random_tensor((4, 4), torch.float32, 0)})
    worker = OneWorker(target_of(load_one, w=torch.zeros(4, 4)), tmp_path)
    report = worker.update(checkpoint).report
    assert list(report.by_loader) == ["w"]
    assert report.install_seconds >= LOADING
    checkpoint.close()


def test_a_report_says_which_layers_are_quantised_and_by_whom(tmp_path: Path) -> None:
    engines, published = Quantised(False, "OnlineMethod"), Quantised(True, "BlockMethod")

    class Quantising(ModuleTarget):
        def quantised(self) -> Mapping[str, Quantised]:
            layers = {f"layers.{number}.{name}": engines for number in range(20) for name in ("mlp.2.up", "mlp.2.down")}
            return layers | {f"layers.{number}.experts": published for number in range(3)}

    model = TensorParallel()
    checkpoint = Checkpoint(model.checkpoint())
    report = OneWorker(Quantising(model), tmp_path).update(checkpoint).report
    assert [(each.published, each.method, each.layers, list(each.names)) for each in report.quantised] == [
        (False, "OnlineMethod", 40, ["layers.#.mlp.#.up", "layers.#.mlp.#.down"]),
        (True, "BlockMethod", 3, ["layers.#.experts"]),
    ]
    checkpoint.close()


def test_a_plan_that_cannot_be_read_is_called_so(tmp_path: Path) -> None:
    model = TensorParallel()
    checkpoint = Checkpoint(model.checkpoint())
    worker = OneWorker(ModuleTarget(model), tmp_path)
    assert not worker.update(checkpoint).report.HasField("problem")
    order = worker_pb2.InstallOrder(
        fence=weights_pb2.Fence(cluster="test", epoch=worker.epoch + 1),
        identity=weights_pb2.Identity(lineage="run", version=9, root=bytes(32)),
        plan=b"\xff\xff",
        deadline_seconds=60,
    )
    problem = worker.installer.install(order).report.problem
    assert problem.code == weights_pb2.Problem.CODE_INVALID_ARGUMENT
    assert "the plan cannot be read" in problem.message
    checkpoint.close()


def test_a_copy_ends_at_its_deadline_and_not_after_its_last_byte(tmp_path: Path) -> None:
    """The worker's clock passes the deadline once the first bytes are there."""

    def load_one(model: Plain, name: str, weight: Tensor) -> None:
        model.w.data.copy_(weight)

    checkpoint = Checkpoint({"w": random_tensor((8, 1 << 20), torch.float32, 0)})
    worker = OneWorker(target_of(load_one, w=torch.zeros(8, 1 << 20)), tmp_path)
    assert not worker.update(checkpoint).report.HasField("problem")
    late = 0.0
    clock = time.monotonic

    def progress(stage: int, done: int, total: int) -> None:
        nonlocal late
        late = 1000.0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ckpt_engine.install.installer.time.monotonic", lambda: clock() + late)
        worker.prepare(checkpoint)
        report = worker.installer.install(worker.order(checkpoint), progress).report
    assert report.problem.code == weights_pb2.Problem.CODE_DEADLINE_EXCEEDED
    assert 0 < report.bytes < 32 << 20
    checkpoint.close()


def test_an_engine_whose_own_step_took_too_long_is_not_verified_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = 0.0
    clock = time.monotonic

    class Slow(ModuleTarget):
        def post_load(self) -> None:
            nonlocal late
            late = 1000.0

    model = TensorParallel()
    checkpoint = Checkpoint(model.checkpoint())
    worker = OneWorker(Slow(model), tmp_path)
    monkeypatch.setattr("ckpt_engine.install.installer.time.monotonic", lambda: clock() + late)
    monkeypatch.setattr(Ready, "mismatches", lambda *_: pytest.fail("it was read back after its deadline"))
    assert worker.update(checkpoint).report.problem.code == weights_pb2.Problem.CODE_DEADLINE_EXCEEDED
    checkpoint.close()


def test_a_transport_that_the_worker_lacks_is_named_beside_those_that_it_has(tmp_path: Path) -> None:
    model = TensorParallel()
    checkpoint = Checkpoint(model.checkpoint())
    worker = OneWorker(ModuleTarget(model), tmp_path)
    worker.prepare(checkpoint)
    order = worker.order(checkpoint)
    plan = weights_pb2.WorkerPlan.FromString(order.plan)
    plan.sources[0].transport = "carrier_pigeon"
    order.plan = plan.SerializeToString(deterministic=True)
    problem = worker.installer.install(order).report.problem
    assert "no transport carrier_pigeon (it has " in problem.message
    assert "shared_memory" in problem.message.partition("it has ")[2]
    checkpoint.close()


def test_what_digests_need_is_compiled_when_a_loader_is_recorded(tmp_path: Path) -> None:
    """It takes seconds the first time, which must not be seconds of a pause."""
    model = TensorParallel()
    checkpoint = Checkpoint(model.checkpoint())
    worker = OneWorker(ModuleTarget(model), tmp_path)
    digest_host._loaded.cache_clear()  # as in a process that has not digested anything
    assert not worker.prepare(checkpoint).HasField("problem")
    assert digest_host._loaded.cache_info().currsize == 1
    checkpoint.close()
