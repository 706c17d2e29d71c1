"""Weights that a worker makes by itself, brought by an install of ours and by the engine's own loader."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from ckpt_engine.core.manifest import blob_digest
from ckpt_engine.engine.target import ModuleTarget
from ckpt_engine.install.self_check import SeededWeights, SelfCheck
from ckpt_engine.v1 import manager_pb2, worker_pb2
from tests.install.install_models import TensorParallel, assert_same, state
from tests.install.install_world import Checkpoint, OneWorker, manifest_of

CPU = torch.device("cpu")


class Checked:
    """One worker that has recorded a checkpoint's manifest, and its part in the check."""

    def __init__(self, target: ModuleTarget, weights: dict[str, Tensor], path: Path) -> None:
        path.mkdir(exist_ok=True)
        self.worker = OneWorker(target, path)
        self.model = target.root
        checkpoint = Checkpoint(weights)
        assert not self.worker.prepare(checkpoint).HasField("problem")
        checkpoint.close()
        self.digest = blob_digest(checkpoint.manifest_bytes)
        self.check = SelfCheck(target, self.worker.installer, self.worker.slot, 1)

    def load(self, seed: int, by_engine: bool) -> dict[str, Tensor]:
        order = worker_pb2.CheckOrder(
            fence=self.worker.fence(),
            manifest_digest=self.digest,
            seed=seed,
            by_engine=by_engine,
            deadline_seconds=60,
        )
        checked = self.check.load(order)
        assert not checked.HasField("problem"), checked.problem.message
        return state(self.model)


@pytest.mark.parametrize("rank", [0, 1])
def test_both_ways_lead_to_the_same_model(tmp_path: Path, rank: int) -> None:
    model = TensorParallel(rank, 2, tied=True)
    worker = Checked(ModuleTarget(model), model.checkpoint(), tmp_path)
    own_a, ours_b = worker.load(1, True), worker.load(2, False)
    own_b, ours_a = worker.load(2, True), worker.load(1, False)
    assert_same(own_a, ours_a)
    assert_same(own_b, ours_b)
    differ = [name for name, tensor in own_a.items() if not torch.equal(tensor, own_b[name])]
    assert len(differ) == len(dict(model.named_parameters(remove_duplicate=False))), "every parameter has new values"
    assert all(torch.isfinite(tensor).all() for tensor in own_a.values()), "padding is filled, too"


def test_the_state_word_says_that_it_holds_nothing(tmp_path: Path) -> None:
    model = TensorParallel()
    worker = Checked(ModuleTarget(model), model.checkpoint(), tmp_path)
    worker.load(1, False)
    assert worker.worker.slot.state == manager_pb2.WORKER_STATE_NONE
    assert worker.worker.page.read()[0].state == manager_pb2.WORKER_STATE_NONE
    assert worker.worker.slot.epoch == 0, "an install afterwards is not overtaken"
    checkpoint = Checkpoint(model.checkpoint(3))
    try:
        assert not worker.worker.update(checkpoint).report.HasField("problem")
    finally:
        checkpoint.close()


def test_a_worker_that_holds_a_version_takes_no_made_weights(tmp_path: Path) -> None:
    """Its agent never orders that; but if it did, made weights would be served under the version's name."""
    model = TensorParallel()
    worker = Checked(ModuleTarget(model), model.checkpoint(), tmp_path)
    checkpoint = Checkpoint(model.checkpoint(3))
    assert not worker.worker.update(checkpoint).report.HasField("problem")
    before = {name: tensor.clone() for name, tensor in state(model).items()}
    for by_engine in (False, True):
        order = worker_pb2.CheckOrder(
            fence=worker.worker.fence(), manifest_digest=worker.digest, seed=1, by_engine=by_engine, deadline_seconds=60
        )
        assert "worker 0 holds version" in worker.check.load(order).problem.message
    assert_same(state(model), before)
    broken = worker.worker.slot
    broken.dirty(broken.epoch)  # an install that did not end: there is no version that could be overwritten
    worker.load(1, False)
    checkpoint.close()


def test_a_tensor_that_is_not_derived_anew_shows(tmp_path: Path) -> None:
    """What an adapter of ours forgets and the engine does: the fault that equal tokens would hide."""
    model = TensorParallel()
    model.register_buffer("absorbed", torch.zeros_like(model.norm.weight), persistent=False)

    class Forgets(ModuleTarget):
        def reload(self, weights: object) -> None:
            super().reload(weights)  # type: ignore[arg-type]
            model.absorbed.copy_(model.norm.weight * 2)

    worker = Checked(Forgets(model, derived={"absorbed": "twice the norm"}), model.checkpoint(), tmp_path)
    own_a = worker.load(1, True)
    worker.load(2, False)
    ours_a = worker.load(1, False)
    assert torch.equal(own_a["absorbed"], ours_a["absorbed"]), "A was there before: it takes B in between to see it"
    own_b = worker.load(2, True)
    ours_a = worker.load(1, False)
    assert not torch.equal(own_a["absorbed"], ours_a["absorbed"])
    assert not torch.equal(own_a["absorbed"], own_b["absorbed"])


def test_a_loader_that_fails_is_told_and_not_raised(tmp_path: Path) -> None:
    model = TensorParallel()
    worker = Checked(ModuleTarget(model), model.checkpoint(), tmp_path)
    order = worker_pb2.CheckOrder(fence=worker.worker.fence(), manifest_digest=bytes(32), seed=1, deadline_seconds=60)
    assert "has not recorded this manifest" in worker.check.load(order).problem.message

    class Fails(ModuleTarget):
        def reload(self, weights: object) -> None:
            raise ZeroDivisionError("a loader's own")

    worker = Checked(Fails(model), model.checkpoint(), tmp_path / "fails")
    order.manifest_digest, order.by_engine = worker.digest, True
    assert "ZeroDivisionError: a loader's own" in worker.check.load(order).problem.message


def test_values_depend_on_name_place_and_seed() -> None:
    """So a box that lands elsewhere, or in a tensor of the same shape, is seen; and every worker makes the same."""
    same = {name: torch.zeros(64, 48, dtype=torch.bfloat16) for name in ("a", "b")} | {"n": torch.zeros(48)}
    one, again, other = (SeededWeights(manifest_of(same), seed, CPU) for seed in (1, 1, 2))
    found = [dict(each.named()) for each in (one, again, other)]
    assert torch.equal(found[0]["a"], found[1]["a"])
    assert not torch.equal(found[0]["a"], found[2]["a"])
    assert not torch.equal(found[0]["a"], found[0]["b"])
    rows = found[0]["a"].float()
    assert len({tuple(row.tolist()) for row in rows}) == 64, "no two rows are equal"
    assert rows.abs().max() <= 2 / 48**0.5 + 0.01
    assert found[0]["n"].min() >= 0.5
    assert found[0]["n"].max() <= 1.5


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.int8, torch.int32, torch.bool, torch.float8_e4m3fn]
)
def test_every_dtype_is_made_and_finite(dtype: torch.dtype) -> None:
    weights = SeededWeights(manifest_of({"w": torch.zeros(16, 8, dtype=dtype)}), 1, CPU)
    ((_, tensor),) = weights.named()
    assert (tensor.dtype, tuple(tensor.shape)) == (dtype, (16, 8))
    assert torch.isfinite(tensor.float()).all()
    assert tensor.float().unique().numel() > 1
