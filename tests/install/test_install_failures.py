"""What goes wrong during an install is named, and the worker's state word never says more than is true."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ckpt_engine.copy.prepared import PreparedCopy
from ckpt_engine.core.stages import STAGES
from ckpt_engine.engine.target import ModuleTarget
from ckpt_engine.install.installer import Installer
from ckpt_engine.transport.base import Availability, Move, OpenedRegions
from ckpt_engine.transport.shared_memory.memory import SharedMemoryTransport
from ckpt_engine.v1 import manager_pb2, weights_pb2, worker_pb2
from tests.install.install_models import Plain, TensorParallel, assert_same, state
from tests.install.install_world import Checkpoint, OneWorker, random_tensor

Code = weights_pb2.Problem


def word(worker: OneWorker) -> tuple[manager_pb2.WorkerState, int]:
    [found] = worker.page.read()
    return found.state, found.epoch


def problem_of(installed: worker_pb2.WorkerInstalled) -> weights_pb2.Problem:
    assert installed.report.HasField("problem")
    return installed.report.problem


@pytest.mark.parametrize("name", ["layers.0.k", "layers.0.experts.1.down", "embed_tokens.weight", "norm.weight"])
def test_a_bit_flipped_after_sealing(tmp_path: Path, name: str) -> None:
    model = TensorParallel()
    checkpoint = Checkpoint(model.checkpoint(), seed=1)
    worker = OneWorker(ModuleTarget(model), tmp_path)
    assert not worker.update(checkpoint).report.HasField("problem")
    worker.prepare(checkpoint)
    order = worker.order(checkpoint)
    checkpoint.flip(name, (3,) if name == "norm.weight" else (3, 5))
    problem = problem_of(worker.installer.install(order))
    assert problem.code == Code.CODE_DATA_LOSS
    assert list(problem.tensors) == [name]
    assert name in problem.message
    assert word(worker) == (manager_pb2.WORKER_STATE_DIRTY, worker.epoch)
    # A full good update recovers it.
    checkpoint.seal()
    assert not worker.update(checkpoint).report.HasField("problem")
    assert word(worker) == (manager_pb2.WORKER_STATE_CLEAN, worker.epoch)
    checkpoint.close()


def test_bytes_outside_of_a_workers_slices_do_not_matter(tmp_path: Path) -> None:
    model = TensorParallel(0, 2)
    checkpoint = Checkpoint(model.checkpoint())
    worker = OneWorker(ModuleTarget(model), tmp_path)
    worker.prepare(checkpoint)
    order = worker.order(checkpoint)
    checkpoint.flip("layers.0.q", (31, 0))
    assert not worker.installer.install(order).report.HasField("problem")
    checkpoint.close()


def test_two_tensors_loaded_to_one_place_must_be_equal(tmp_path: Path) -> None:
    def load_one(model: Plain, name: str, weight: Tensor) -> None:
        model.w.data.copy_(weight)

    weight = random_tensor((3, 4), torch.float32, 0)
    equal = Checkpoint({"embed": weight, "head": weight.clone()})
    worker = OneWorker(ModuleTarget(Plain(load_one, w=torch.zeros(3, 4))), tmp_path)
    assert not worker.update(equal).report.HasField("problem")
    equal.weights["embed"] = weight + 1
    equal.seal()
    problem = problem_of(worker.update(equal))
    assert problem.code == Code.CODE_DATA_LOSS
    assert list(problem.tensors) == ["embed"]
    assert "also loaded from head" in problem.message
    equal.close()


def test_what_post_load_breaks_is_seen(tmp_path: Path) -> None:
    """Bytes are verified where the engine computes with them, after everything that could change them."""
    model = TensorParallel()
    target = ModuleTarget(model, post_load=lambda: model.layers[0].down[0].add_(1))
    checkpoint = Checkpoint(model.checkpoint())
    worker = OneWorker(target, tmp_path)
    problem = problem_of(worker.update(checkpoint))
    assert (problem.code, list(problem.tensors)) == (Code.CODE_DATA_LOSS, ["layers.0.down"])
    assert word(worker)[0] == manager_pb2.WORKER_STATE_DIRTY
    checkpoint.close()


@pytest.mark.parametrize("bit", [0, 15, 16, 31])
def test_a_bit_of_a_widened_tensor_that_differs_is_seen(tmp_path: Path, bit: int) -> None:
    """Also one of those that the sealed bfloat16 does not have."""
    kept = torch.zeros(2, 3)
    target = ModuleTarget(
        Plain(lambda model, _, weight: model.w.data.copy_(weight), w=kept),
        post_load=lambda: kept.view(torch.int32)[1, 2:].bitwise_xor_(1 << bit if bit < 31 else -1 << 31),
    )
    checkpoint = Checkpoint({"w": torch.full((2, 3), -0.0, dtype=torch.bfloat16)})
    worker = OneWorker(target, tmp_path)
    problem = problem_of(worker.update(checkpoint))
    assert (problem.code, list(problem.tensors)) == (Code.CODE_DATA_LOSS, ["w"])
    assert word(worker)[0] == manager_pb2.WORKER_STATE_DIRTY
    checkpoint.close()


def test_an_exception_after_loading_is_reported_and_not_raised(tmp_path: Path) -> None:
    model = TensorParallel()

    def post_load() -> None:
        raise RuntimeError("no kernel for this shape")

    checkpoint = Checkpoint(model.checkpoint())
    worker = OneWorker(ModuleTarget(model, post_load=post_load), tmp_path)
    problem = problem_of(worker.update(checkpoint))
    assert problem.code == Code.CODE_INTERNAL
    assert "RuntimeError: no kernel for this shape" in problem.message
    assert word(worker)[0] == manager_pb2.WORKER_STATE_DIRTY
    checkpoint.close()


class Watched:
    """A transport that notes the worker's state word before and after its first byte is written."""

    name = "shared_memory"

    def __init__(self, worker: OneWorker) -> None:
        self._real = SharedMemoryTransport()
        self._worker = worker
        self.seen: list[manager_pb2.WorkerState] = []

    def availability(self) -> Availability:
        return self._real.availability()

    def open(self, regions: Sequence[weights_pb2.Region], seconds: float = 60.0) -> OpenedRegions:
        self.seen.append(word(self._worker)[0])
        opened = self._real.open(regions)
        prepare = opened.prepare

        def prepare_watched(moves: Sequence[Move]) -> PreparedCopy:
            self.seen.append(word(self._worker)[0])
            copy = prepare(moves)
            run = copy.run

            def run_watched(on_bytes: Callable[[int], None] | None = None) -> int:
                self.seen.append(word(self._worker)[0])
                return run(on_bytes)

            copy.run = run_watched  # type: ignore[method-assign]
            return copy

        opened.prepare = prepare_watched  # type: ignore[method-assign]
        return opened


def test_the_state_word_is_dirty_from_before_the_first_byte_until_all_is_verified(tmp_path: Path) -> None:
    model = TensorParallel()
    checkpoint = Checkpoint(model.checkpoint())
    seen: list[manager_pb2.WorkerState] = []
    worker = OneWorker(ModuleTarget(model, post_load=lambda: seen.append(word(worker)[0])), tmp_path)
    watched = Watched(worker)
    worker.installer = Installer(worker.target, worker.slot, {"shared_memory": watched})
    assert not worker.update(checkpoint).report.HasField("problem")
    none, dirty = manager_pb2.WORKER_STATE_NONE, manager_pb2.WORKER_STATE_DIRTY
    assert watched.seen == [none, none, dirty]
    assert not worker.update(checkpoint).report.HasField("problem")
    assert watched.seen == [none, none, dirty, dirty]
    assert seen == [dirty, dirty]
    assert word(worker)[0] == manager_pb2.WORKER_STATE_CLEAN
    checkpoint.close()


def change_manifest(order: worker_pb2.InstallOrder, plan: weights_pb2.WorkerPlan) -> None:
    plan.manifest_digest = b"x" * 32


def change_needs(order: worker_pb2.InstallOrder, plan: weights_pb2.WorkerPlan) -> None:
    plan.needs_digest = b"x" * 32


def drop_piece(order: worker_pb2.InstallOrder, plan: weights_pb2.WorkerPlan) -> None:
    del plan.pieces[4]


def repeat_piece(order: worker_pb2.InstallOrder, plan: weights_pb2.WorkerPlan) -> None:
    plan.pieces.append(plan.pieces[4])


def move_piece(order: worker_pb2.InstallOrder, plan: weights_pb2.WorkerPlan) -> None:
    plan.pieces[4].start[0] += 1
    plan.pieces[4].stop[0] += 1


def read_beyond(order: worker_pb2.InstallOrder, plan: weights_pb2.WorkerPlan) -> None:
    plan.pieces[4].offset = plan.sources[0].regions[0].size


def unknown_need(order: worker_pb2.InstallOrder, plan: weights_pb2.WorkerPlan) -> None:
    plan.pieces[4].need = 1000


def unknown_region(order: worker_pb2.InstallOrder, plan: weights_pb2.WorkerPlan) -> None:
    plan.pieces[4].region = 1000


def unknown_transport(order: worker_pb2.InstallOrder, plan: weights_pb2.WorkerPlan) -> None:
    plan.sources[0].transport = "carrier_pigeon"


def gone_source(order: worker_pb2.InstallOrder, plan: weights_pb2.WorkerPlan) -> None:
    locator = weights_pb2.SharedMemoryLocator.FromString(plan.sources[0].regions[0].locator)
    locator.inode += 1
    plan.sources[0].regions[0].locator = locator.SerializeToString()


def fewer_digests(order: worker_pb2.InstallOrder, plan: weights_pb2.WorkerPlan) -> None:
    order.expected = weights_pb2.Digests(values=[1, 2]).SerializeToString()


def no_digests(order: worker_pb2.InstallOrder, plan: weights_pb2.WorkerPlan) -> None:
    order.expected = b"\xff\xff"


def no_root(order: worker_pb2.InstallOrder, plan: weights_pb2.WorkerPlan) -> None:
    order.identity.root = b""


def no_time(order: worker_pb2.InstallOrder, plan: weights_pb2.WorkerPlan) -> None:
    order.deadline_seconds = 0


def other_cluster(order: worker_pb2.InstallOrder, plan: weights_pb2.WorkerPlan) -> None:
    order.fence.cluster, order.fence.epoch = "another", order.fence.epoch - 1  # that of the install before


def old_epoch(order: worker_pb2.InstallOrder, plan: weights_pb2.WorkerPlan) -> None:
    order.fence.epoch = 0


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (change_manifest, Code.CODE_FAILED_PRECONDITION),
        (change_needs, Code.CODE_FAILED_PRECONDITION),
        (drop_piece, Code.CODE_INVALID_ARGUMENT),
        (repeat_piece, Code.CODE_INVALID_ARGUMENT),
        (move_piece, Code.CODE_INVALID_ARGUMENT),
        (read_beyond, Code.CODE_INVALID_ARGUMENT),
        (unknown_need, Code.CODE_INVALID_ARGUMENT),
        (unknown_region, Code.CODE_INVALID_ARGUMENT),
        (unknown_transport, Code.CODE_INVALID_ARGUMENT),
        (gone_source, Code.CODE_UNAVAILABLE),
        (fewer_digests, Code.CODE_INVALID_ARGUMENT),
        (no_digests, Code.CODE_INVALID_ARGUMENT),
        (no_root, Code.CODE_INVALID_ARGUMENT),
        (no_time, Code.CODE_DEADLINE_EXCEEDED),
        (other_cluster, Code.CODE_ABORTED),
        (old_epoch, Code.CODE_ABORTED),
    ],
)
def test_a_bad_order_touches_nothing(
    tmp_path: Path,
    change: Callable[[worker_pb2.InstallOrder, weights_pb2.WorkerPlan], None],
    code: weights_pb2.Problem.Code,
) -> None:
    model = TensorParallel()
    checkpoint = Checkpoint(model.checkpoint())
    worker = OneWorker(ModuleTarget(model), tmp_path)
    assert not worker.update(checkpoint).report.HasField("problem")
    before, was = state(model), word(worker)
    checkpoint.weights.update(model.checkpoint(7))
    checkpoint.seal()
    worker.prepare(checkpoint)
    order = worker.order(checkpoint)
    plan = weights_pb2.WorkerPlan.FromString(order.plan)
    change(order, plan)
    order.plan = plan.SerializeToString(deterministic=True)
    assert problem_of(worker.installer.install(order)).code == code
    assert word(worker) == was
    assert_same(state(model), before)
    # And the next good one works.
    assert not worker.update(checkpoint).report.HasField("problem")
    checkpoint.close()


def test_a_worker_is_moved_to_another_cluster_with_higher_epochs(tmp_path: Path) -> None:
    model = TensorParallel()
    checkpoint = Checkpoint(model.checkpoint())
    worker = OneWorker(ModuleTarget(model), tmp_path)
    assert not worker.update(checkpoint).report.HasField("problem")
    worker.prepare(checkpoint)
    order = worker.order(checkpoint)
    order.fence.cluster = "another"
    assert not worker.installer.install(order).report.HasField("problem")
    assert word(worker) == (manager_pb2.WORKER_STATE_CLEAN, order.fence.epoch)
    checkpoint.close()


def test_a_tensor_that_changed_its_layout_since_it_was_recorded(tmp_path: Path) -> None:
    model = TensorParallel()
    checkpoint = Checkpoint(model.checkpoint())
    worker = OneWorker(ModuleTarget(model), tmp_path)
    worker.prepare(checkpoint)
    order = worker.order(checkpoint)
    model.layers[0].down.data = model.layers[0].down.data.t().contiguous().t()
    problem = problem_of(worker.installer.install(order))
    assert (problem.code, list(problem.tensors)) == (Code.CODE_FAILED_PRECONDITION, ["layers.0.down"])
    assert word(worker)[0] == manager_pb2.WORKER_STATE_NONE
    assert not worker.update(checkpoint).report.HasField("problem")  # prepared anew, for the new layout
    checkpoint.close()


def test_an_order_that_was_carried_out_is_answered_again_and_not_repeated(tmp_path: Path) -> None:
    model = TensorParallel()
    checkpoint = Checkpoint(model.checkpoint())
    worker = OneWorker(ModuleTarget(model), tmp_path)
    worker.prepare(checkpoint)
    order = worker.order(checkpoint)
    first = worker.installer.install(order)
    model.norm.weight.zero_()
    assert worker.installer.install(order) == first
    assert model.norm.weight.sum() == 0
    checkpoint.close()


def test_too_late_in_the_middle_of_copying_stays_dirty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker's clock passes the deadline after the first byte."""
    late, clock = 0.0, time.monotonic
    model = TensorParallel()
    checkpoint = Checkpoint(model.checkpoint(), seed=1)
    worker = OneWorker(ModuleTarget(model), tmp_path)
    worker.prepare(checkpoint)
    order = worker.order(checkpoint)
    seen: list[tuple[int, int]] = []

    def on_progress(stage: manager_pb2.Stage, done: int, total: int) -> None:
        nonlocal late
        seen.append((done, total))
        late = 1000.0

    monkeypatch.setattr("ckpt_engine.install.installer.time.monotonic", lambda: clock() + late)
    problem = problem_of(worker.installer.install(order, on_progress))
    assert problem.code == Code.CODE_DEADLINE_EXCEEDED
    assert word(worker)[0] == manager_pb2.WORKER_STATE_DIRTY
    assert seen
    assert 0 < seen[-1][0] <= seen[-1][1]
    checkpoint.close()


def test_a_worker_tells_that_it_goes_on_while_it_verifies(tmp_path: Path) -> None:
    """No bytes are counted then, and whatever tells nothing counts as stopped."""
    model = TensorParallel()
    checkpoint = Checkpoint(model.checkpoint(), seed=1)
    worker = OneWorker(ModuleTarget(model), tmp_path)
    worker.prepare(checkpoint)
    stages: list[manager_pb2.Stage] = []
    report = worker.installer.install(
        worker.order(checkpoint), lambda stage, _done, _total: stages.append(stage)
    ).report
    assert not report.HasField("problem")
    assert stages == sorted(stages, key=STAGES.index)
    assert {manager_pb2.STAGE_TRANSFER, manager_pb2.STAGE_VERIFY} <= set(stages)
    checkpoint.close()


def test_preparing_reports_problems_and_does_not_raise(tmp_path: Path) -> None:
    model = TensorParallel()
    weights = model.checkpoint()
    del weights["layers.0.k"]
    checkpoint = Checkpoint(weights)
    worker = OneWorker(ModuleTarget(model), tmp_path)
    problem = worker.prepare(checkpoint).problem
    assert (problem.code, list(problem.tensors)) == (Code.CODE_INVALID_ARGUMENT, ["layers.0.qkv"])
    order = worker_pb2.PrepareOrder(fence=worker.fence(), manifest=b"\xff", deadline_seconds=10)
    assert worker.installer.prepare(order).problem.code == Code.CODE_INVALID_ARGUMENT
    assert worker.prepare(Checkpoint(model.checkpoint()), seconds=0).problem.code == Code.CODE_DEADLINE_EXCEEDED
    assert word(worker) == (manager_pb2.WORKER_STATE_NONE, 0)
    assert worker.prepare(Checkpoint(model.checkpoint())).HasField("host")
    checkpoint.close()


def test_memory_of_sources_is_let_go_when_a_plan_no_longer_names_it(tmp_path: Path) -> None:
    model = TensorParallel()
    first, second = Checkpoint(model.checkpoint(1)), Checkpoint(model.checkpoint(2))
    worker = OneWorker(ModuleTarget(model), tmp_path)

    def mapped(checkpoint: Checkpoint) -> bool:
        locator = weights_pb2.SharedMemoryLocator.FromString(checkpoint.arenas[0].region(0).locator)
        lines = Path("/proc/self/maps").read_text().splitlines()
        return any(line.split()[1].startswith("r--") and int(line.split()[4]) == locator.inode for line in lines)

    worker.update(first)
    assert mapped(first)
    worker.update(second)
    assert mapped(second)
    worker.update(second)
    assert not mapped(first), "it is neither served nor does it come"
    worker.installer.release()
    assert not mapped(second)
    assert not worker.update(second).report.HasField("problem")
    first.close()
    second.close()
