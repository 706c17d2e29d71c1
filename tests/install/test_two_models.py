"""A worker with two models: what it needs of a version with and without a draft, and what an install does to each."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from ckpt_engine.core.parts import in_part
from ckpt_engine.engine.parts import PartsTarget, PartTarget
from ckpt_engine.engine.target import LoadTarget, ModuleTarget
from ckpt_engine.v1 import manager_pb2, weights_pb2
from ckpt_engine.v1.manager_pb2 import PartReport
from tests.install.install_models import TensorParallel, assert_same, state
from tests.install.install_world import Checkpoint, OneWorker, manifest_of
from tests.install.test_staging import Repacking, RepackingTarget

Needs = weights_pb2.WorkerNeeds


class TwoModels:
    """A target and a draft of other size, as a worker has them; `shared`: they have one embedding."""

    def __init__(self, directory: Path, shared: bool = False, of_target_checkpoint: bool = False) -> None:
        self.target, self.draft = TensorParallel(layers=2), TensorParallel()
        if shared:
            self.draft.embed_tokens = self.target.embed_tokens
        part = PartTarget(ModuleTarget(self.draft), "a draft", of_target_checkpoint)
        self.worker = OneWorker(PartsTarget(ModuleTarget(self.target), {"draft": part}), directory)

    def needs(self, weights: dict[str, Tensor]) -> Needs:
        prepared = self.worker.prepare(Checkpoint(weights))
        assert not prepared.HasField("problem"), prepared.problem.message
        return Needs.FromString(prepared.needs)

    def weights(self, seed: int) -> dict[str, Tensor]:
        return joined(self.target.checkpoint(seed), self.draft.checkpoint(seed + 100))


def joined(target: dict[str, Tensor], draft: dict[str, Tensor]) -> dict[str, Tensor]:
    return target | {in_part("draft", name): tensor for name, tensor in draft.items()}


def like(model: TensorParallel, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The state of such a model that has loaded these weights by itself."""
    other = TensorParallel(layers=len(model.layers))
    other.load_weights(weights.items())
    return state(other)


def by_part(report: manager_pb2.WorkerReport) -> dict[str, PartReport]:
    return {each.part: each for each in report.parts}


def test_both_models_are_installed_and_verified_together(tmp_path: Path) -> None:
    models = TwoModels(tmp_path)
    for seed in (1, 2):
        weights = models.weights(seed)
        report = models.worker.update(Checkpoint(weights, seed)).report
        assert not report.HasField("problem"), report.problem.message
        assert_same(state(models.target), like(models.target, models.target.checkpoint(seed)))
        assert_same(state(models.draft), like(models.draft, models.draft.checkpoint(seed + 100)))
        parts = by_part(report)
        assert [each.handling for each in parts.values()] == [PartReport.HANDLING_INSTALLED] * 2
        assert parts[""].bytes + parts["draft"].bytes == report.bytes
        assert parts["draft"].bytes == sum(each.nbytes for each in models.draft.checkpoint().values())
        assert parts[""].verified + parts["draft"].verified == report.verified


def test_a_draft_with_torn_values_is_named_and_nothing_is_clean(tmp_path: Path) -> None:
    models = TwoModels(tmp_path)
    checkpoint = Checkpoint(models.weights(1))
    models.worker.prepare(checkpoint)
    order = models.worker.order(checkpoint)
    checkpoint.flip("draft::norm.weight", (3,))
    report = models.worker.installer.install(order).report
    assert list(report.problem.tensors) == ["draft::norm.weight"]
    (word,) = models.worker.page.read()
    assert word.state == manager_pb2.WORKER_STATE_DIRTY


def test_a_worker_without_a_draft_leaves_the_part(tmp_path: Path) -> None:
    target = TensorParallel()
    worker = OneWorker(ModuleTarget(target), tmp_path)
    checkpoint = Checkpoint(joined(target.checkpoint(1), TensorParallel(hidden=8).checkpoint(2)))
    needs = Needs.FromString(worker.prepare(checkpoint).needs)
    assert (list(needs.absent_parts), list(needs.unfilled_parts), list(needs.elsewhere)) == (["draft"], [], [])
    report = worker.update(checkpoint).report
    assert not report.HasField("problem"), report.problem.message
    assert by_part(report)["draft"] == PartReport(part="draft", handling=PartReport.HANDLING_LEFT)
    assert_same(state(target), like(target, target.checkpoint(1)))


def test_a_draft_that_the_version_lacks_is_kept_bit_for_bit(tmp_path: Path) -> None:
    models = TwoModels(tmp_path)
    assert not models.worker.update(Checkpoint(models.weights(1))).report.HasField("problem")
    before = {name: tensor.clone() for name, tensor in state(models.draft).items()}
    needs = models.needs(models.target.checkpoint(2))
    assert list(needs.unfilled_parts) == ["draft"]
    rows = {row.name: row.kind for row in needs.accounted}
    assert rows["draft::norm.weight"] == weights_pb2.Accounted.KIND_KEPT
    report = models.worker.update(Checkpoint(models.target.checkpoint(2))).report
    assert by_part(report)["draft"].handling == PartReport.HANDLING_KEPT
    assert_same(state(models.draft), before)
    assert_same(state(models.target), like(models.target, models.target.checkpoint(2)))


def test_half_a_draft_is_refused_by_name(tmp_path: Path) -> None:
    models = TwoModels(tmp_path)
    weights = models.weights(1)
    del weights["draft::norm.weight"]
    problem = models.worker.prepare(Checkpoint(weights)).problem
    assert list(problem.tensors) == ["draft::norm.weight"]
    assert "draft::norm.weight: 48 of 48 bytes come from nowhere" in problem.message


def test_a_tensor_that_the_draft_does_not_take_is_named(tmp_path: Path) -> None:
    models = TwoModels(tmp_path)
    weights = models.weights(1) | {"draft::layers.7.down": torch.zeros(2)}
    problem = models.worker.prepare(Checkpoint(weights)).problem
    assert "draft::layers.7.down" in problem.tensors


def test_a_shared_tensor_is_the_targets_and_may_be_left_out_of_the_draft(tmp_path: Path) -> None:
    models = TwoModels(tmp_path, shared=True)
    weights = models.weights(1)
    del weights["draft::embed_tokens.weight"]
    report = models.worker.update(Checkpoint(weights)).report
    assert not report.HasField("problem"), report.problem.message
    assert list(by_part(report)["draft"].shared) == ["draft::embed_tokens.weight"]
    expected = like(models.target, models.target.checkpoint(1))
    assert torch.equal(models.draft.embed_tokens.weight, expected["embed_tokens.weight"])


def test_a_shared_tensor_with_two_values_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    models = TwoModels(tmp_path, shared=True)
    equal = models.weights(1)
    equal["draft::embed_tokens.weight"] = equal["embed_tokens.weight"].clone()
    assert not models.worker.update(Checkpoint(equal)).report.HasField("problem")
    checkpoint = Checkpoint(models.weights(2))
    models.worker.prepare(checkpoint)
    order = models.worker.order(checkpoint)
    for problem in (models.worker.ready(order).problem, models.worker.installer.install(order).report.problem):
        assert list(problem.tensors) == ["embed_tokens.weight", "draft::embed_tokens.weight"] or list(
            problem.tensors
        ) == ["draft::embed_tokens.weight", "embed_tokens.weight"]
        assert "the version has two values for what is one tensor in this server" in problem.message
    (word,) = models.worker.page.read()
    assert word.state == manager_pb2.WORKER_STATE_CLEAN
    assert_same(state(models.target), like(models.target, models.target.checkpoint(1)))


def test_a_draft_in_the_targets_checkpoint_needs_no_names_of_its_own(tmp_path: Path) -> None:
    """Both loaders are given the checkpoint, and each takes its tensors, as those of multi-token prediction do."""
    models = TwoModels(tmp_path, of_target_checkpoint=True)

    def only(model: TensorParallel, prefix: str) -> None:
        load = model.load_weights
        model.load_weights = lambda weights: load(  # type: ignore[method-assign]
            (name.removeprefix(prefix), weight) for name, weight in weights if name.startswith("mtp.") == bool(prefix)
        )

    only(models.target, "")
    only(models.draft, "mtp.")
    draft = ModuleTarget(models.draft)
    target: LoadTarget = PartsTarget(
        ModuleTarget(models.target), {"draft": PartTarget(draft, "layers of its own", True)}
    )
    (tmp_path / "worker").mkdir()
    worker = OneWorker(target, tmp_path / "worker")
    weights = models.target.checkpoint(1) | {f"mtp.{name}": each for name, each in models.draft.checkpoint(2).items()}
    report = worker.update(Checkpoint(weights)).report
    assert not report.HasField("problem"), report.problem.message
    assert by_part(report)["draft"].handling == PartReport.HANDLING_INSTALLED
    assert_same(state(models.draft), like(models.draft, models.draft.checkpoint(2)))
    without = Needs.FromString(worker.prepare(Checkpoint(models.target.checkpoint(1))).needs)
    assert list(without.unfilled_parts) == ["draft"]


def test_weights_that_were_discarded_cannot_be_kept(tmp_path: Path) -> None:
    models = TwoModels(tmp_path)
    assert not models.worker.update(Checkpoint(models.weights(1))).report.HasField("problem")
    models.worker.installer.discarding()
    only_target = Checkpoint(models.target.checkpoint(2))
    problem = models.worker.update(only_target).report.problem
    assert "the weights of this server's draft were discarded while it slept" in problem.message
    assert not models.worker.update(Checkpoint(models.weights(3))).report.HasField("problem")
    assert not models.worker.update(only_target).report.HasField("problem")


def test_staged_layers_of_a_kept_draft_are_not_touched(tmp_path: Path) -> None:
    """`staging` takes layers out of the form that the engine computes with: only those that get weights."""
    target, draft = Repacking(), Repacking()
    draft_target = RepackingTarget(draft)
    worker = OneWorker(PartsTarget(RepackingTarget(target), {"draft": PartTarget(draft_target, "a draft")}), tmp_path)
    generator = torch.Generator().manual_seed(1)

    def weights() -> dict[str, Tensor]:
        found = {"norm": torch.randn(4, generator=generator)}
        halves = (f"{half}{number}" for half in "ab" for number in range(3))
        return found | {name: torch.randn(6, 4, generator=generator) for name in halves}

    assert not worker.update(Checkpoint(joined(weights(), weights()))).report.HasField("problem")
    packed = [each.clone() for each in draft.packed]
    target_before = [each.clone() for each in target.packed]
    draft_target.log.clear()
    report = worker.update(Checkpoint(weights())).report
    assert not report.HasField("problem"), report.problem.message
    assert draft_target.log == []
    assert all(torch.equal(one, two) for one, two in zip(draft.packed, packed, strict=True))
    assert not torch.equal(target.packed[0], target_before[0])


def test_the_names_of_one_part_are_handed_out_without_a_gap(tmp_path: Path) -> None:
    """In a manifest they lie between names of the target."""
    models = TwoModels(tmp_path)
    names = [spec.name for spec in manifest_of(models.weights(1)).tensors]
    assert names != sorted(names, key=lambda name: (name.startswith("draft::"), name)), "nothing is tried here"
    assert not models.worker.update(Checkpoint(models.weights(1))).report.HasField("problem")
