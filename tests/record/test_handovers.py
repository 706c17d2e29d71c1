"""Loaders that compute on values: what they compute on goes through them at every install, and nothing else does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from ckpt_engine.core.boxes import whole
from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.engine.target import ModuleTarget, Weights
from ckpt_engine.record.record import record
from ckpt_engine.record.recording import handover_name
from ckpt_engine.v1 import manager_pb2, weights_pb2
from tests.install.install_models import Plain, accounted, target_of
from tests.install.install_world import Checkpoint, OneWorker, random_tensor
from tests.install.test_staging import LAYERS, Repacking, RepackingTarget, weights

Load = Callable[[Plain, str, Tensor], None]


def arithmetic(model: Plain, name: str, weight: Tensor) -> None:
    model.w.data.copy_(weight + 1)


def cast(model: Plain, name: str, weight: Tensor) -> None:
    model.w.data.copy_(weight.to(torch.bfloat16))


def item(model: Plain, name: str, weight: Tensor) -> None:
    model.w.data.fill_(weight[0, 0].item())


def decide(model: Plain, name: str, weight: Tensor) -> None:
    if weight[0, 0] > 0:
        model.w.data.copy_(weight)


def concatenate(model: Plain, name: str, weight: Tensor) -> None:
    model.w.data.copy_(torch.cat([weight[:2], weight[2:]]))


def compute_in_parameter(model: Plain, name: str, weight: Tensor) -> None:
    model.w.data.copy_(weight)
    model.w.data.mul_(2)


def change_weight(model: Plain, name: str, weight: Tensor) -> None:
    weight[0] = 1
    model.w.data.copy_(weight)


def through_buffer(model: Plain, name: str, weight: Tensor) -> None:
    buffer = torch.zeros(4, 4)
    buffer.copy_(weight)
    model.w.data.copy_(buffer)


def overwrite_with_padding(model: Plain, name: str, weight: Tensor) -> None:
    model.w.data.copy_(weight)
    model.w.data[3:].zero_()


def index(model: Plain, name: str, weight: Tensor) -> None:
    model.w.data.copy_(weight[torch.tensor([1, 0, 2, 3])])


def swallow(model: Plain, name: str, weight: Tensor) -> None:
    try:
        model.w.data.copy_(weight * 2)
    except Exception:
        model.w.data.copy_(weight)


def other_bits(model: Plain, name: str, weight: Tensor) -> None:
    model.w.data.copy_(weight.view(torch.int32))


def composed(model: Plain, name: str, weight: Tensor) -> None:
    """As vLLM loads the A of Mamba."""
    model.w.data.copy_(weight)
    model.w.data.copy_(-torch.exp(model.w.float()))


def add_to_padding(model: Plain, name: str, weight: Tensor) -> None:
    model.w.data.zero_()
    model.w.data.add_(weight)


def check_all(model: Plain, name: str, weight: Tensor) -> None:
    if not torch.equal(weight, weight) or bool(weight.isnan().any()):
        raise ValueError(name)
    model.w.data.copy_(weight)


COMPUTING: list[Load] = [
    arithmetic,
    cast,
    item,
    decide,
    concatenate,
    compute_in_parameter,
    change_weight,
    through_buffer,
    overwrite_with_padding,
    index,
    swallow,
    other_bits,
    composed,
    add_to_padding,
    check_all,
]


def described(**shapes: tuple[int, ...]) -> weights_pb2.Manifest:
    tensors = [weights_pb2.TensorSpec(name=name, dtype="float32", shape=shapes[name]) for name in sorted(shapes)]
    return weights_pb2.Manifest(tensors=tensors)


@pytest.mark.parametrize("load_one", COMPUTING)
def test_what_a_loader_computes_arrives_as_if_it_had_loaded_it(load_one: Load, tmp_path: Path) -> None:
    """Twice, with other weights: what the model held before must not matter."""
    target = target_of(load_one, w=torch.arange(16.0).view(4, 4))
    model = target._model
    checkpoint = Checkpoint({"w": random_tensor((4, 4), torch.float32, 1).abs()}, seed=3)
    worker = OneWorker(target, tmp_path)
    for seed in (1, 2):
        checkpoint.weights["w"] = random_tensor((4, 4), torch.float32, seed).abs()
        checkpoint.seal()
        expected = Plain(load_one, w=torch.zeros(4, 4))
        expected.load_weights([("w", checkpoint.weights["w"].clone())])
        report = worker.update(checkpoint).report
        assert not report.HasField("problem"), report.problem.message
        assert torch.equal(model.w, expected.w)
        assert (report.verified_as_loaded, report.verified, list(report.by_loader)) == (1, 0, ["w"])
        assert worker.page.read()[0].state == manager_pb2.WORKER_STATE_CLEAN
    checkpoint.close()


class Mixed(nn.Module):
    """Two layers: a plain one, and one with a fused tensor of which one half is computed; a shared scale."""

    def __init__(self, whole_model: bool = False) -> None:
        super().__init__()
        self.whole_model = whole_model
        self.plain = nn.Parameter(torch.zeros(4, 3), requires_grad=False)
        self.fused = nn.Parameter(torch.zeros(6, 3), requires_grad=False)
        self.scaled = nn.Parameter(torch.zeros(2, 2), requires_grad=False)
        self.calls: list[list[str]] = []
        self.forget = ""

    def load_weights(self, weights: Weights) -> None:
        scales: dict[str, Tensor] = {}
        self.calls.append([])
        given = dict(weights) if self.whole_model else weights
        for name, weight in given.items() if isinstance(given, dict) else given:
            self.calls[-1].append(name)
            if name == self.forget:
                continue
            if name == "a":
                self.fused.data[:3].copy_(weight + weight)
            elif name == "b":
                self.fused.data[3:].copy_(weight)
            elif name == "plain":
                self.plain.data.copy_(weight)
            else:
                scales[name] = weight
        if len(scales) == 2:  # a loader that waits for two tensors
            self.scaled.data.copy_(scales["scaled"] * scales["scale"])
        if self.whole_model:
            self.plain.data.mul_(given["scale"].sum())  # type: ignore[index]


def mixed_weights(seed: int) -> dict[str, Tensor]:
    shapes: dict[str, tuple[int, ...]] = {"a": (3, 3), "b": (3, 3), "plain": (4, 3), "scale": (2, 2), "scaled": (2, 2)}
    return {name: random_tensor(shape, torch.float32, seed + n) for n, (name, shape) in enumerate(shapes.items())}


def test_only_what_depends_on_computed_values_is_handed_over() -> None:
    recording = record(described(**{n: tuple(t.shape) for n, t in mixed_weights(0).items()}), ModuleTarget(Mixed()))
    names = [[recording.manifest.tensors[i].name for i in each.tensors] for each in recording.handovers]
    assert sorted(names) == [["a", "b"], ["scale", "scaled"]]
    assert {copy.tensor for copy in recording.copies} == {"plain", *map(handover_name, ("a", "b", "scale", "scaled"))}
    assert {need.box for need in recording.needs} == {whole((3, 3)), whole((4, 3)), whole((2, 2))}
    notes = {row.name: row.note for row in accounted(recording)}
    assert notes["plain"] == ""
    assert notes["fused"] == "by the engine's own loader, from whole tensors: aten.add.Tensor"
    assert {row.kind for row in accounted(recording)} == {weights_pb2.Accounted.KIND_LOADED}


def test_plain_tensors_are_copied_and_the_others_loaded(tmp_path: Path) -> None:
    model = Mixed()
    worker = OneWorker(ModuleTarget(model), tmp_path)
    checkpoint = Checkpoint(mixed_weights(0), seed=5)
    for seed in (10, 20):
        checkpoint.weights.update(mixed_weights(seed))
        checkpoint.seal()
        order = worker.prepare(checkpoint) and worker.order(checkpoint)
        model.calls.clear()
        report = worker.installer.install(order).report
        assert not report.HasField("problem"), report.problem.message
        assert sorted(model.calls) == [["a", "b"], ["scale", "scaled"]]
        given = checkpoint.weights
        assert torch.equal(model.fused, torch.cat([2 * given["a"], given["b"]]))
        assert torch.equal(model.scaled, given["scale"] * given["scaled"])
        assert torch.equal(model.plain, given["plain"])
        assert (report.verified_as_loaded, report.verified) == (4, 1)
        assert sorted(report.by_loader) == ["fused", "scaled"]
    checkpoint.close()


@pytest.mark.parametrize(
    ("without", "missing"),
    [("b", "fused: 36 of 72 bytes"), ("a", "fused: 36 of 72 bytes"), ("scale", "scaled: 16 of 16")],
)
def test_a_missing_leg_of_a_computed_tensor_refuses(without: str, missing: str) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in mixed_weights(0).items() if name != without}
    with pytest.raises(CkptEngineError) as caught:
        record(described(**shapes), ModuleTarget(Mixed()))
    assert missing in str(caught.value.problem.message) or without == "scale"


def test_a_tensor_computed_from_itself_is_no_more_complete() -> None:
    def load_one(model: Plain, name: str, weight: Tensor) -> None:
        model.w.data[: weight.shape[0]].copy_(weight)
        model.w.data.copy_(-torch.exp(model.w))

    with pytest.raises(CkptEngineError, match="w: 32 of 64 bytes come from nowhere"):
        record(described(half=(2, 4)), target_of(load_one, w=torch.zeros(4, 4)))


def test_a_loader_that_needs_everything_gets_everything(tmp_path: Path) -> None:
    """With only some of the tensors it would do other things, which a rehearsal finds."""
    model = Mixed(whole_model=True)
    worker = OneWorker(ModuleTarget(model), tmp_path)
    checkpoint = Checkpoint(mixed_weights(3))
    recording = worker.recording(checkpoint)
    assert [each.everything for each in recording.handovers] == [True]
    report = worker.update(checkpoint).report
    assert not report.HasField("problem"), report.problem.message
    given = checkpoint.weights
    assert torch.equal(model.plain, given["plain"] * given["scale"].sum())
    assert sorted(report.by_loader) == ["fused", "plain", "scaled"]
    checkpoint.close()


def test_a_loader_that_leaves_something_out_this_time_leaves_the_worker_dirty(tmp_path: Path) -> None:
    model = Mixed()
    worker = OneWorker(ModuleTarget(model), tmp_path)
    checkpoint = Checkpoint(mixed_weights(3))
    worker.prepare(checkpoint)
    order = worker.order(checkpoint)
    model.forget = "b"
    problem = worker.installer.install(order).report.problem
    assert problem.message == "the engine's loader wrote less of the model's tensor fused than when it was recorded"
    assert worker.page.read()[0].state == manager_pb2.WORKER_STATE_DIRTY
    model.forget = ""
    assert not worker.update(checkpoint).report.HasField("problem")
    checkpoint.close()


def test_values_that_decide_otherwise_than_assumed_leave_the_worker_dirty(tmp_path: Path) -> None:
    target = target_of(decide, w=torch.zeros(4, 4))
    checkpoint = Checkpoint({"w": -torch.ones(4, 4)})
    worker = OneWorker(target, tmp_path)
    problem = worker.update(checkpoint).report.problem
    assert "less of the model's tensor w" in problem.message
    assert worker.page.read()[0].state == manager_pb2.WORKER_STATE_DIRTY
    checkpoint.close()


def test_bytes_that_are_not_those_sealed_never_reach_the_loader(tmp_path: Path) -> None:
    """Also when the loader swallows what the iterator raises."""

    class Swallowing(Mixed):
        def load_weights(self, weights: Weights) -> None:
            try:
                super().load_weights(weights)
            except Exception:
                self.calls.append(["swallowed"])

    model = Swallowing()
    worker = OneWorker(ModuleTarget(model), tmp_path)
    checkpoint = Checkpoint(mixed_weights(3))
    worker.prepare(checkpoint)
    order = worker.order(checkpoint)
    checkpoint.flip("b", (1, 1))
    model.calls.clear()
    problem = worker.installer.install(order).report.problem
    assert (problem.code, list(problem.tensors)) == (weights_pb2.Problem.CODE_DATA_LOSS, ["b"])
    assert model.calls[-2:] == [["a"], ["swallowed"]]
    assert worker.page.read()[0].state == manager_pb2.WORKER_STATE_DIRTY
    checkpoint.close()


def test_tensors_that_are_made_beside_the_model_are_refused_and_put_back() -> None:
    class Fusing(Mixed):
        def load_weights(self, weights: Weights) -> None:
            super().load_weights(weights)
            self.together = torch.cat([self.plain, self.fused])
            self.more = self.plain * 2

    model = Fusing()
    model.together = torch.zeros(10, 3)
    kept = model.together
    shapes = {name: tuple(tensor.shape) for name, tensor in mixed_weights(0).items()}
    with pytest.raises(CkptEngineError, match="the loader makes together, more of weights, beside"):
        record(described(**shapes), ModuleTarget(model))
    assert model.together is kept
    assert not hasattr(model, "more")


class ComputingTarget(RepackingTarget):
    """Staged layers, of which one is loaded with arithmetic: `across`, from a tensor that two layers share."""

    def __init__(self, across: bool) -> None:
        super().__init__(Repacking())
        self.across = across

    def load_weights(self, weights: Weights) -> None:
        for name, weight in weights:
            if name == "a1":
                weight = weight * 2
            super().load_weights([(name, weight)])
            if self.across and name == "a1":
                self.model.fused2.data[:1].copy_(weight[:1])


@pytest.mark.parametrize("across", [False, True])
def test_staged_layers_are_loaded_before_they_are_handed_over(across: bool, tmp_path: Path) -> None:
    target = ComputingTarget(across)
    worker = OneWorker(target, tmp_path)
    checkpoint = Checkpoint(weights(5), seed=2)
    report = worker.update(checkpoint).report
    assert not report.HasField("problem"), report.problem.message
    given = checkpoint.weights
    for number in range(LAYERS):
        expected = torch.cat([given[f"a{number}"] * (2 if number == 1 else 1), given[f"b{number}"]])
        if across and number == 2:
            expected[:1] = given["a2"][:1]  # handed over in order, so a2 comes after a1
        assert torch.equal(target.model.packed[number], expected.t())
    assert list(report.by_loader) == (["fused1", "fused2"] if across else ["fused1"])
    assert target.log[-1] == "leave"
    assert sorted(target.log[1:-1]) == [f"packed {number}" for number in range(LAYERS)]
    checkpoint.close()
