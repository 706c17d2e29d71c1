"""Installing a recording gives bit for bit what running the loader itself gives."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from ckpt_engine.core.boxes import Box, whole
from ckpt_engine.engine.target import ModuleTarget
from ckpt_engine.v1 import manager_pb2, weights_pb2
from tests.install.install_models import Plain, TensorParallel, assert_same, state
from tests.install.install_world import Checkpoint, OneWorker, random_tensor, randomly_cut, slices

SAME_DIRECTORY = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def install_and_compare(model: torch.nn.Module, like: torch.nn.Module, checkpoint: Checkpoint, path: Path) -> None:
    """`model` gets the checkpoint by our install, `like` (of the same kind) by its own loader."""
    like.load_weights(checkpoint.weights.items())
    worker = OneWorker(ModuleTarget(model), path)
    before = state(model)
    assert not worker.prepare(checkpoint).HasField("problem")
    recording = worker.recording(checkpoint)
    assert_same(state(model), before)  # recording has touched nothing
    order = worker.order(checkpoint)
    read = checkpoint.poison_what_no_piece_reads(checkpoint.plan(recording), recording)
    installed = worker.installer.install(order)
    assert not installed.report.HasField("problem"), installed.report.problem.message
    assert_same(state(model), state(like))
    assert installed.report.verified == len(recording.needs)
    assert installed.report.verified_as_loaded == 0
    assert installed.report.copies == 1
    assert installed.report.tensors == len({need.tensor for need in recording.needs}) > 0
    assert sum(edge.bytes for edge in installed.edges) == installed.report.bytes
    assert installed.report.bytes == read or len(recording.copies) > len(recording.needs)
    [word] = worker.page.read()
    assert (word.state, word.epoch, word.identity) == (manager_pb2.WORKER_STATE_CLEAN, worker.epoch, order.identity)
    checkpoint.close()


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_rank_of_a_tensor_parallel_model(tmp_path: Path, size: int, tied: bool, dtype: torch.dtype) -> None:
    for rank in range(size):
        model, like = (TensorParallel(rank, size, tied=tied, dtype=dtype, layers=2) for _ in range(2))
        path = tmp_path / str(rank)
        path.mkdir()
        install_and_compare(model, like, Checkpoint(model.checkpoint(), seed=rank), path)


@given(
    head_groups=st.integers(1, 3),
    per_group=st.integers(1, 4),
    head=st.sampled_from([1, 2, 5]),
    size=st.sampled_from([1, 2, 3]),
    vocabulary=st.integers(1, 70),
    seed=st.integers(0, 1000),
)
@SAME_DIRECTORY
def test_any_head_count_and_vocabulary(
    tmp_path: Path, head_groups: int, per_group: int, head: int, size: int, vocabulary: int, seed: int
) -> None:
    rank = seed % size
    kv_heads = head_groups * size
    shape = {"heads": kv_heads * per_group, "kv_heads": kv_heads, "head": head, "inner": 6 * size, "hidden": 7}
    model, like = (TensorParallel(rank, size, vocabulary=vocabulary, **shape) for _ in range(2))
    install_and_compare(model, like, Checkpoint(model.checkpoint(seed), seed), tmp_path)


@given(st.data(), st.lists(st.integers(1, 6), min_size=1, max_size=3), st.integers(0, 10_000))
@SAME_DIRECTORY
def test_any_tiling_of_a_parameter_by_views_of_larger_tensors(
    tmp_path: Path, data: st.DataObject, shape: list[int], seed: int
) -> None:
    """Each tile of a parameter (of any memory order) comes from somewhere inside another tensor, permuted, maybe
    through a clone, maybe flattened, maybe widened."""
    rng = random.Random(seed)
    dtype = data.draw(st.sampled_from([torch.bfloat16, torch.float32, torch.uint8, torch.float8_e4m3fn, torch.int64]))
    kept = torch.float32 if dtype == torch.bfloat16 and data.draw(st.booleans()) else dtype
    tiles = randomly_cut(whole(shape), rng)
    order = data.draw(st.permutations(range(len(shape))))
    steps: dict[str, tuple[Box, list[int], list[int], str]] = {}
    weights: dict[str, Tensor] = {}
    for number, tile in enumerate(tiles):
        axes = rng.sample(range(len(shape)), len(shape))  # axis d of the tile is axes[d] of the checkpoint tensor
        around = [rng.randrange(3) for _ in shape]
        sizes = [0] * len(shape)
        for axis, where in enumerate(axes):
            sizes[where] = tile.shape[axis] + around[axis] + rng.randrange(2)
        steps[f"w{number}"] = (tile, axes, around, rng.choice(["view", "clone", "contiguous", "flat", "device"]))
        weights[f"w{number}"] = random_tensor(tuple(sizes), torch.float32, seed + number).mul(40).to(dtype)

    def load_one(model: Plain, name: str, weight: Tensor) -> None:
        tile, axes, around, how = steps[name]
        part = weight.permute(axes)
        part = part[tuple(slice(first, first + size) for first, size in zip(around, tile.shape, strict=True))]
        into = model.weight.data[slices(tile)]
        if how == "clone":
            part = part.clone()
        elif how == "contiguous":
            part = part.contiguous()
        elif how == "device":
            part = part.to(into.device)
        elif how == "flat" and into.is_contiguous():
            into, part = into.view(-1), part.reshape(-1)
        into.copy_(part)

    def model() -> Plain:
        backwards = [order.index(axis) for axis in range(len(shape))]
        memory = torch.full([shape[axis] for axis in order], 0.3).to(kept)
        return Plain(load_one, weight=memory.permute(backwards))

    install_and_compare(model(), model(), Checkpoint(weights, seed), tmp_path)


def test_a_tensor_loaded_to_two_places_is_read_for_both(tmp_path: Path) -> None:
    def load_one(model: Plain, name: str, weight: Tensor) -> None:
        model.a.data.copy_(weight)
        model.b.data.copy_(weight.t())

    def model() -> Plain:
        return Plain(load_one, a=torch.zeros(3, 4), b=torch.zeros(4, 3))

    install_and_compare(model(), model(), Checkpoint({"w": random_tensor((3, 4), torch.float32, 1)}), tmp_path)


def test_a_float32_tensor_of_the_model_gets_exactly_what_was_sealed_in_bfloat16(tmp_path: Path) -> None:
    """Sliced, transposed, padded, tied to one that stays bfloat16, a scalar; every bit pattern that bfloat16 has."""

    def load_one(model: Plain, name: str, weight: Tensor) -> None:
        if name == "embed":
            model.embed.data.copy_(weight)
            model.head.data[:9].copy_(weight)
            model.head.data[9:].fill_(1.1)
        elif name == "turned":
            model.turned.data.copy_(weight.t())
        else:
            getattr(model, name).data.copy_(weight)

    def model() -> Plain:
        old = torch.full((12, 3), 1 / 3)  # whose lower bits would be noticed
        return Plain(
            load_one,
            embed=torch.zeros(9, 3, dtype=torch.bfloat16),
            head=old.clone(),
            turned=torch.full((4, 6), 1 / 3),
            scalar=torch.full((), 1 / 3),
            none=torch.zeros(0, 4),
            every=torch.full((1 << 16,), 1 / 3),
        )

    weights = {
        "embed": random_tensor((9, 3), torch.bfloat16, 1),
        "turned": random_tensor((6, 4), torch.bfloat16, 2),
        "scalar": torch.tensor(-0.0, dtype=torch.bfloat16),
        "none": torch.zeros(0, 4, dtype=torch.bfloat16),
        "every": torch.arange(-1 << 15, 1 << 15, dtype=torch.int16).view(torch.bfloat16),
    }
    install_and_compare(model(), model(), Checkpoint(weights, 1), tmp_path)


def test_scalars_and_broadcasts_and_empty_tensors(tmp_path: Path) -> None:
    def load_one(model: Plain, name: str, weight: Tensor) -> None:
        getattr(model, name).data.copy_(weight)

    def model() -> Plain:
        return Plain(load_one, scalar=torch.zeros(()), each=torch.zeros(5, 2), none=torch.zeros(0, 4))

    weights = {"scalar": torch.tensor(3.5), "each": torch.tensor([7.0, 8.0]), "none": torch.zeros(0, 4)}
    install_and_compare(model(), model(), Checkpoint(weights), tmp_path)


def test_padding_by_zero_and_by_a_value_and_before_loading(tmp_path: Path) -> None:
    def load_one(model: Plain, name: str, weight: Tensor) -> None:
        model.a.data.zero_()
        model.a.data[1:3].copy_(weight)
        model.b.data[0] = 2.5
        model.b.data[3:] = torch.tensor(-1.0)
        model.b.data[1:3] = weight

    def model() -> Plain:
        return Plain(load_one, a=torch.full((5, 4), 9.0), b=torch.full((5, 4), 9.0))

    install_and_compare(model(), model(), Checkpoint({"w": random_tensor((2, 4), torch.float32, 1)}), tmp_path)


@pytest.mark.parametrize("made", [False, True])
@pytest.mark.parametrize("installed", [False, True])
def test_engines_that_run_in_inference_mode(tmp_path: Path, made: bool, installed: bool) -> None:
    with torch.inference_mode(made):
        model, like = TensorParallel(), TensorParallel()
    with torch.inference_mode(installed or made):
        like.load_weights(model.checkpoint().items())
    checkpoint = Checkpoint(model.checkpoint())
    worker = OneWorker(ModuleTarget(model), tmp_path)
    with torch.inference_mode(installed):
        report = worker.update(checkpoint).report
    assert not report.HasField("problem"), report.problem.message
    assert_same(state(model), state(like))
    checkpoint.close()


def test_second_update_reuses_the_plan_and_brings_new_bytes(tmp_path: Path) -> None:
    model, like = TensorParallel(1, 2), TensorParallel(1, 2)
    checkpoint = Checkpoint(model.checkpoint(0), seed=3)
    worker = OneWorker(ModuleTarget(model), tmp_path)
    for seed in (0, 1, 2):
        checkpoint.weights.update(model.checkpoint(seed))
        checkpoint.seal()
        installed = worker.update(checkpoint)
        assert not installed.report.HasField("problem"), installed.report.problem.message
        like.load_weights(checkpoint.weights.items())
        assert_same(state(model), state(like))
    checkpoint.close()


def test_parameters_that_moved_between_updates_are_found_again(tmp_path: Path) -> None:
    model, like = TensorParallel(), TensorParallel()
    checkpoint = Checkpoint(model.checkpoint(0))
    worker = OneWorker(ModuleTarget(model), tmp_path)
    assert not worker.update(checkpoint).report.HasField("problem")
    model.norm.weight.data = torch.zeros_like(model.norm.weight)
    model.layers[0].qkv = torch.nn.Parameter(torch.zeros_like(model.layers[0].qkv), requires_grad=False)
    checkpoint.weights.update(model.checkpoint(1))
    checkpoint.seal()
    assert not worker.update(checkpoint).report.HasField("problem")
    like.load_weights(checkpoint.weights.items())
    assert_same(state(model), state(like))
    checkpoint.close()


def test_derived_tensors_are_recomputed_after_loading(tmp_path: Path) -> None:
    def load_one(model: Plain, name: str, weight: Tensor) -> None:
        model.weight.data.copy_(weight)

    model = Plain(load_one, weight=torch.zeros(3, 4), absorbed=torch.zeros(4, 3))
    target = ModuleTarget(
        model,
        derived={"absorbed": "weight transposed"},
        post_load=lambda: model.absorbed.copy_(model.weight.t()),
    )
    checkpoint = Checkpoint({"w": random_tensor((3, 4), torch.float32, 1)})
    worker = OneWorker(target, tmp_path)
    assert not worker.update(checkpoint).report.HasField("problem")
    assert torch.equal(model.absorbed, checkpoint.weights["w"].t())
    needs = weights_pb2.WorkerNeeds.FromString(worker.recording(checkpoint).needs_bytes)
    kinds = {row.name: (row.kind, row.note) for row in needs.accounted}
    assert kinds == {
        "weight": (weights_pb2.Accounted.KIND_LOADED, ""),
        "absorbed": (weights_pb2.Accounted.KIND_DERIVED, "weight transposed"),
    }
    checkpoint.close()
