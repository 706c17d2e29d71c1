"""What a worker gets ready before its engine pauses, so that installing has nothing of that left to do."""

from __future__ import annotations

import mmap
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import pytest

from ckpt_engine.copy.copying import TensorCopy
from ckpt_engine.core.manifest import blob_digest
from ckpt_engine.digest import host as digest_host
from ckpt_engine.digest import prepared as prepared_digests
from ckpt_engine.engine.target import ModuleTarget
from ckpt_engine.install import ready
from ckpt_engine.transport.mapped import MappedRegions
from ckpt_engine.transport.shared_memory.memory import SharedMemoryTransport
from ckpt_engine.v1 import manager_pb2, weights_pb2, worker_pb2
from tests.install.install_models import TensorParallel
from tests.install.install_world import Checkpoint, OneWorker


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often something is opened, mapped, laid out or compiled that a pause should not wait for."""
    counted: ClassVar[Counter[str]] = Counter()

    def count(what: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*arguments: Any, **options: Any) -> Any:
            counted[what] += 1
            return original(*arguments, **options)

        return counting

    monkeypatch.setattr(SharedMemoryTransport, "open", count("open", SharedMemoryTransport.open))
    monkeypatch.setattr(mmap, "mmap", Mapped)
    monkeypatch.setattr(Mapped, "counted", counted)
    monkeypatch.setattr(TensorCopy, "__init__", count("copy", TensorCopy.__init__))
    monkeypatch.setattr(ready, "prepare_digests", count("digests", prepared_digests.prepare_digests))
    loaded = digest_host._loaded
    monkeypatch.setattr(digest_host, "_loaded", cache(count("compile", loaded)))  # as in a process that begins
    return counted


class Mapped(mmap.mmap):
    counted: ClassVar[Counter[str]] = Counter()

    def __new__(cls, *arguments: Any, **options: Any) -> Mapped:
        cls.counted["mmap"] += 1
        return super().__new__(cls, *arguments, **options)


def get_ready(worker: OneWorker, order: worker_pb2.InstallOrder, asleep: bool = False) -> worker_pb2.WorkerReady:
    return worker.installer.ready(
        worker_pb2.ReadyOrder(fence=order.fence, plan=order.plan, deadline_seconds=60.0, asleep=asleep)
    )


def install(worker: OneWorker, order: worker_pb2.InstallOrder) -> None:
    installed = worker.installer.install(order)
    assert not installed.report.HasField("problem"), installed.report.problem.message


@pytest.fixture
def worker(tmp_path: Path) -> OneWorker:
    return OneWorker(ModuleTarget(TensorParallel()), tmp_path)


@pytest.fixture
def checkpoints() -> Iterator[list[Checkpoint]]:
    made = [Checkpoint(TensorParallel().checkpoint(seed)) for seed in (1, 2, 3)]
    yield made
    for checkpoint in made:
        checkpoint.close()


def ordered(worker: OneWorker, checkpoint: Checkpoint) -> worker_pb2.InstallOrder:
    assert not worker.prepare(checkpoint).HasField("problem")
    return worker.order(checkpoint)


def test_the_first_install_after_a_publication_opens_maps_and_compiles_nothing(
    worker: OneWorker, checkpoints: Sequence[Checkpoint], done: Counter[str]
) -> None:
    for _ in range(2):
        order = ordered(worker, checkpoints[0])
        answer = get_ready(worker, order)
        assert not answer.HasField("problem"), answer.problem.message
        assert list(answer.plans) == [blob_digest(order.plan)]
        before = Counter(done)
        install(worker, order)
        assert done == before
    assert {"open", "mmap", "copy", "digests", "compile"} <= done.keys(), "it was done, and counted, before"


def test_without_being_ready_an_install_does_it_all_itself(
    worker: OneWorker, checkpoints: Sequence[Checkpoint], done: Counter[str]
) -> None:
    order = ordered(worker, checkpoints[0])
    before = Counter(done)
    install(worker, order)
    assert {"open", "mmap", "copy", "digests"} <= (done - before).keys()


def test_getting_ready_touches_no_weight_and_no_word(worker: OneWorker, checkpoints: Sequence[Checkpoint]) -> None:
    install(worker, ordered(worker, checkpoints[0]))
    held = {name: tensor.clone() for name, tensor in worker.target.named_tensors()}
    word = worker.page.read()[0]
    get_ready(worker, ordered(worker, checkpoints[1]))
    assert worker.page.read()[0] == word
    assert all(bool((tensor == held[name]).all()) for name, tensor in worker.target.named_tensors())


def test_two_plans_stay_ready_the_one_served_and_the_one_that_comes(
    worker: OneWorker, checkpoints: Sequence[Checkpoint], done: Counter[str]
) -> None:
    one, two, three = checkpoints
    install(worker, ordered(worker, one))
    order = ordered(worker, two)
    assert len(get_ready(worker, order).plans) == 2
    install(worker, order)
    before = Counter(done)
    order = ordered(worker, one)
    assert len(get_ready(worker, order).plans) == 2
    install(worker, order)
    assert "open" not in done - before, "going back and forth opens nothing"
    order = ordered(worker, three)
    assert set(get_ready(worker, order).plans) == {blob_digest(order.plan), blob_digest(worker.order(one).plan)}


def test_the_plan_that_is_served_is_let_go_of_once_nobody_could_open_its_memory_any_more(
    worker: OneWorker, checkpoints: Sequence[Checkpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its owner has published anew and freed the old memory: it is not free before the last reader closes it."""
    one, two, _ = checkpoints
    install(worker, ordered(worker, one))
    one.close()
    closed: list[MappedRegions] = []
    original = MappedRegions.close
    monkeypatch.setattr(MappedRegions, "close", lambda self: (closed.append(self), original(self))[1])
    order = ordered(worker, two)
    assert list(get_ready(worker, order).plans) == [blob_digest(order.plan)]
    assert len(closed) == 1


def test_a_plan_that_cannot_be_ready_is_not_called_ready(worker: OneWorker, checkpoints: Sequence[Checkpoint]) -> None:
    install(worker, ordered(worker, checkpoints[0]))
    order = ordered(worker, checkpoints[1])
    checkpoints[1].close()
    answer = get_ready(worker, order)
    assert "is gone or closed it" in answer.problem.message
    assert blob_digest(order.plan) not in answer.plans
    assert worker.page.read()[0].state == manager_pb2.WORKER_STATE_CLEAN
    order.plan = b"\xff"
    assert "cannot be read" in get_ready(worker, order).problem.message
    order.fence.epoch = 0
    assert get_ready(worker, order).problem.code == weights_pb2.Problem.CODE_ABORTED


def test_memory_that_is_given_up_is_not_looked_at(
    worker: OneWorker, checkpoints: Sequence[Checkpoint], done: Counter[str]
) -> None:
    order = ordered(worker, checkpoints[0])
    before = Counter(done)
    assert list(get_ready(worker, order, asleep=True).plans) == [blob_digest(order.plan)]
    assert (done - before).keys() >= {"open", "mmap"}
    assert not (done - before).keys() & {"copy", "digests"}
    before = Counter(done)
    install(worker, order)
    assert "open" not in done - before


def test_an_order_of_a_collective_is_refused_before_a_weight_is_touched(
    worker: OneWorker, checkpoints: Sequence[Checkpoint]
) -> None:
    install(worker, ordered(worker, checkpoints[0]))
    word = worker.page.read()[0]
    order = ordered(worker, checkpoints[1])
    order.collective.member = 1
    answer = worker.installer.ready(
        worker_pb2.ReadyOrder(fence=order.fence, plan=order.plan, deadline_seconds=60.0, collective=order.collective)
    )
    assert "0 slots are too few" in answer.problem.message
    assert "was not made ready for this collective" in worker.installer.install(order).report.problem.message
    assert worker.page.read()[0] == word
