"""A worker that cannot open what it is offered: it takes another way, or says what it could not open. Real files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpt_engine.core.manifest import blob_digest, canonical
from ckpt_engine.engine.target import ModuleTarget
from ckpt_engine.install.installer import Installer
from ckpt_engine.transport.file.files import FileTransport, file_region
from ckpt_engine.transport.shared_memory.memory import SharedMemoryTransport
from ckpt_engine.v1 import manager_pb2, weights_pb2, worker_pb2
from tests.install.install_models import TensorParallel, assert_same, state
from tests.install.install_world import Checkpoint, OneWorker


@pytest.fixture
def checkpoint() -> Iterator[Checkpoint]:
    made = Checkpoint(TensorParallel().checkpoint(1))
    yield made
    made.close()


@pytest.fixture
def model() -> TensorParallel:
    return TensorParallel()


@pytest.fixture
def worker(model: TensorParallel, tmp_path: Path) -> OneWorker:
    made = OneWorker(ModuleTarget(model), tmp_path)
    readers = {"file": FileTransport(), "shared_memory": SharedMemoryTransport()}
    made.installer = Installer(made.target, made.slot, readers)
    return made


def from_files(checkpoint: Checkpoint, order: worker_pb2.InstallOrder, path: Path) -> weights_pb2.WorkerPlan:
    """The order's plan, in which the same bytes are read from files first and from shared memory else."""
    plan = weights_pb2.WorkerPlan.FromString(order.plan)
    for rank, source in enumerate(plan.sources):
        source.others.add(transport="shared_memory", reason=source.reason, regions=source.regions)
        file = path / f"{rank}.bin"
        arena = checkpoint.arenas[rank]
        file.write_bytes(bytes(arena.lendable().bytes.numpy()))
        (region,) = source.regions
        source.regions[0].CopyFrom(file_region(region.id, str(file), 0, arena.size))
        source.transport, source.reason = "file", "the files are near"
    order.plan = canonical(plan)
    return plan


def get_ready(worker: OneWorker, order: worker_pb2.InstallOrder) -> worker_pb2.WorkerReady:
    ready = worker_pb2.ReadyOrder(fence=order.fence, plan=order.plan, deadline_seconds=60.0)
    return worker.installer.ready(ready)


def test_the_same_memory_is_opened_another_way_before_the_pause(
    model: TensorParallel, worker: OneWorker, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    worker.prepare(checkpoint)
    order = worker.order(checkpoint)
    plan = from_files(checkpoint, order, tmp_path)
    (tmp_path / "0.bin").unlink()
    ready = get_ready(worker, order)
    assert not ready.HasField("problem"), ready.problem.message
    assert list(ready.plans) == [blob_digest(order.plan)], "it is ready for the plan that it was given"
    (told,) = ready.unopened
    assert (told.worker_rank, told.transport, told.source) == (0, "file", "rank 0")
    assert told.locator == blob_digest(plan.sources[0].regions[0].locator)
    assert "0.bin" in told.reason
    assert list(get_ready(worker, order).unopened) == [told], "asked again, it tells it again: its answer may be lost"
    installed = worker.installer.install(order)
    assert not installed.report.HasField("problem"), installed.report.problem.message
    first, second = installed.edges
    assert (first.transport, second.transport) == ("shared_memory", "file"), "only what cannot be opened moves"
    assert "could not open file: cannot read" in first.reason
    like = TensorParallel()
    like.load_weights(checkpoint.weights.items())
    assert_same(state(model), state(like))


def test_without_another_way_it_says_what_it_could_not_open_and_touches_nothing(
    worker: OneWorker, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    worker.prepare(checkpoint)
    order = worker.order(checkpoint)
    plan = from_files(checkpoint, order, tmp_path)
    for source in plan.sources:
        del source.others[:]
    order.plan = canonical(plan)
    (tmp_path / "1.bin").unlink()
    ready = get_ready(worker, order)
    assert ready.problem.code == weights_pb2.Problem.CODE_UNAVAILABLE
    assert "1.bin" in ready.problem.message
    assert [(each.transport, each.source) for each in ready.unopened] == [("file", "rank 1")]
    assert not ready.plans
    [word] = worker.page.read()
    assert word.state == manager_pb2.WORKER_STATE_NONE


def test_an_owner_that_has_gone_is_no_reason_to_read_it_another_way(worker: OneWorker, checkpoint: Checkpoint) -> None:
    worker.prepare(checkpoint)
    order = worker.order(checkpoint)
    checkpoint.close()
    ready = get_ready(worker, order)
    assert "gone" in ready.problem.message
    assert not ready.unopened
