"""Engines that keep weights in another form than their loader writes: layers given one by one, hashed as handed over.

`Repacking` does what vLLM does on a CPU: after loading, a linear layer's weight is packed for its kernel and its
parameter is left empty; to load again, the loader's form is made anew, filled, packed into the kernel's memory.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from ckpt_engine.engine.target import ModuleTarget, StagedLayer, Weights
from ckpt_engine.v1 import manager_pb2, weights_pb2
from tests.install.install_world import Checkpoint, OneWorker, random_tensor

LAYERS, OUT, IN = 3, 6, 4


class Repacking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Parameter(torch.zeros(IN), requires_grad=False)
        self.packed = [torch.zeros(IN, 2 * OUT) for _ in range(LAYERS)]
        for number in range(LAYERS):
            self.register_parameter(f"fused{number}", nn.Parameter(torch.empty(0), requires_grad=False))

    def load_weights(self, weights: Weights) -> None:
        for name, weight in weights:
            if name == "norm":
                self.norm.data.copy_(weight)
            else:
                half, number = name[0], name[1:]
                parameter: Tensor = getattr(self, f"fused{number}")
                assert parameter.shape == (2 * OUT + 1, IN)
                parameter.data.narrow(0, OUT * (half == "b"), OUT).copy_(weight)
                parameter.data[2 * OUT :].zero_()


class RepackingTarget(ModuleTarget):
    def __init__(self, model: Repacking) -> None:
        super().__init__(model)
        self.model = model
        self.log: list[str] = []
        self.break_at = -1
        self.skip = -1

    def _put(self, number: int, tensor: Tensor) -> None:
        setattr(self.model, f"fused{number}", nn.Parameter(tensor, requires_grad=False))

    @contextmanager
    def recording(self) -> Iterator[None]:
        with super().recording():
            for number in range(LAYERS):
                self._put(number, torch.empty(2 * OUT + 1, IN, device="meta"))
            yield

    def staged(self) -> Collection[str]:
        return [f"fused{number}" for number in range(LAYERS)]

    @contextmanager
    def staging(self) -> Iterator[Iterator[StagedLayer]]:
        self.log.append("enter")
        try:
            yield self._layers()
        finally:
            for number in range(LAYERS):
                self._put(number, torch.empty(0))
            self.log.append("leave")

    def _layers(self) -> Iterator[StagedLayer]:
        for number in reversed(range(LAYERS)):
            if number == self.skip:
                continue
            tensor = torch.full((2 * OUT + 1, IN), float("nan"))
            self._put(number, tensor)

            def finish(number: int = number, tensor: Tensor = tensor) -> None:
                if number == self.break_at:
                    raise RuntimeError("packing failed")
                assert not tensor[2 * OUT :].any()
                self.model.packed[number].copy_(tensor[: 2 * OUT].t())
                tensor.fill_(float("nan"))  # from here on nothing can be read back
                self.log.append(f"packed {number}")

            yield StagedLayer({f"fused{number}": tensor}, finish)

    def derived(self) -> Mapping[str, str]:
        return {}


def weights(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    names = [f"{half}{number}" for half in "ab" for number in range(LAYERS)]
    found = {name: random_tensor((OUT, IN), dtype, seed + place) for place, name in enumerate(names)}
    return found | {"norm": random_tensor((IN,), dtype, seed + 99)}


def assert_holds(model: Repacking, given: dict[str, Tensor]) -> None:
    for number in range(LAYERS):
        assert torch.equal(model.packed[number], torch.cat([given[f"a{number}"], given[f"b{number}"]]).t().float())
    assert torch.equal(model.norm, given["norm"].float())


@pytest.mark.parametrize("published", [torch.float32, torch.bfloat16])
def test_staged_layers_are_hashed_as_handed_over_and_resident_ones_where_they_lie(
    tmp_path: Path, published: torch.dtype
) -> None:
    model = Repacking()
    target = RepackingTarget(model)
    checkpoint = Checkpoint(weights(0, published), seed=1)
    worker = OneWorker(target, tmp_path)
    for seed in (0, 100):
        checkpoint.weights.update(weights(seed, published))
        checkpoint.seal()
        target.log.clear()
        report = worker.update(checkpoint).report
        assert not report.HasField("problem"), report.problem.message
        assert (report.verified_as_loaded, report.verified) == (2 * LAYERS, 1)
        assert report.bytes == published.itemsize * (2 * LAYERS * OUT * IN + IN)
        assert target.log == ["enter", "packed 2", "packed 1", "packed 0", "leave"]
        assert_holds(model, checkpoint.weights)
        assert all(getattr(model, f"fused{number}").numel() == 0 for number in range(LAYERS))
    checkpoint.close()


def test_a_staged_layer_of_other_bytes_is_never_handed_over(tmp_path: Path) -> None:
    model = Repacking()
    target = RepackingTarget(model)
    checkpoint = Checkpoint(weights(0))
    worker = OneWorker(target, tmp_path)
    worker.prepare(checkpoint)
    order = worker.order(checkpoint)
    checkpoint.flip("b1", (2, 3))
    problem = worker.installer.install(order).report.problem
    assert (problem.code, list(problem.tensors)) == (weights_pb2.Problem.CODE_DATA_LOSS, ["b1"])
    assert target.log == ["enter", "packed 2", "leave"]
    assert worker.page.read()[0].state == manager_pb2.WORKER_STATE_DIRTY
    checkpoint.seal()
    assert not worker.update(checkpoint).report.HasField("problem")
    assert_holds(model, checkpoint.weights)
    checkpoint.close()


@pytest.mark.parametrize(
    ("attribute", "says"), [("break_at", "RuntimeError: packing failed"), ("skip", "staged no tensor fused1")]
)
def test_an_engine_that_fails_in_the_middle_is_left_tidy_and_dirty(tmp_path: Path, attribute: str, says: str) -> None:
    model = Repacking()
    target = RepackingTarget(model)
    setattr(target, attribute, 1)
    checkpoint = Checkpoint(weights(0))
    worker = OneWorker(target, tmp_path)
    problem = worker.update(checkpoint).report.problem
    assert problem.code == weights_pb2.Problem.CODE_INTERNAL
    assert says in problem.message
    assert target.log[-1] == "leave"
    assert worker.page.read()[0].state == manager_pb2.WORKER_STATE_DIRTY
    setattr(target, attribute, -1)
    assert not worker.update(checkpoint).report.HasField("problem")
    assert_holds(model, checkpoint.weights)
    checkpoint.close()
