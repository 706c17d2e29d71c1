"""What a worker brings into stage memory before its engine pauses: all of it verified, and no weight touched."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.engine.target import LoadTarget, ModuleTarget
from ckpt_engine.install import early_copy, stage_memory
from ckpt_engine.install.stage_memory import StageMemory
from ckpt_engine.transport.mapped import MappedRegions
from ckpt_engine.v1 import manager_pb2, weights_pb2, worker_pb2
from tests.install.install_models import TensorParallel
from tests.install.install_world import Checkpoint, OneWorker
from tests.install.test_staging import Repacking, RepackingTarget, assert_holds, weights

CPU = torch.device("cpu")


@pytest.fixture
def checkpoint() -> Iterator[Checkpoint]:
    made = Checkpoint(TensorParallel().checkpoint(1), seed=3)
    yield made
    made.close()


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often sources were looked at."""
    counted: Counter[str] = Counter()
    check = MappedRegions.check

    def counting(self: MappedRegions) -> None:
        counted["check"] += 1
        check(self)

    monkeypatch.setattr(MappedRegions, "check", counting)
    return counted


def ordered(worker: OneWorker, checkpoint: Checkpoint) -> worker_pb2.InstallOrder:
    assert not worker.prepare(checkpoint).HasField("problem")
    return worker.order(checkpoint)


def renew(checkpoint: Checkpoint, seed: int) -> None:
    checkpoint.weights.update(TensorParallel().checkpoint(seed))
    checkpoint.seal()


def installed(worker: OneWorker, order: worker_pb2.InstallOrder) -> manager_pb2.WorkerReport:
    report = worker.installer.install(order).report
    assert not report.HasField("problem"), report.problem.message
    assert worker.page.read()[0].state == manager_pb2.WORKER_STATE_CLEAN
    return report


def held(target: LoadTarget) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in target.named_tensors()}


def same(target: LoadTarget, before: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(tensor.nan_to_num(), before[name].nan_to_num()) for name, tensor in target.named_tensors())


def test_an_install_reads_no_source_of_what_was_brought_early(
    tmp_path: Path, checkpoint: Checkpoint, reads: Counter[str]
) -> None:
    worker, plain = (
        OneWorker(ModuleTarget(TensorParallel()), tmp_path / kind, memory)
        for kind, memory in (("early", "auto"), ("plain", "0"))
        if not (tmp_path / kind).mkdir()
    )
    for seed in (1, 2):
        renew(checkpoint, seed)
        order, other = ordered(worker, checkpoint), ordered(plain, checkpoint)
        before = held(worker.target)
        assert worker.brought(order).verified
        assert same(worker.target, before), "getting ready touches no weight"
        installed(plain, other)
        for arena in checkpoint.arenas:
            arena.tensor(0, (arena.size,), torch.uint8).fill_(0xA5)
        looked = Counter(reads)
        report = installed(worker, order)
        assert reads == looked
        assert report.early_bytes == report.bytes
        assert report.early_seconds > 0
        assert same(worker.target, held(plain.target))
        assert "lay in stage memory" in worker.installer.install(order).edges[0].reason


def test_a_flipped_bit_is_found_before_the_pause(tmp_path: Path, checkpoint: Checkpoint) -> None:
    worker = OneWorker(ModuleTarget(TensorParallel()), tmp_path, "auto")
    installed(worker, ordered(worker, checkpoint))
    renew(checkpoint, 2)
    order = ordered(worker, checkpoint)
    checkpoint.flip("layers.0.down", (3, 5))
    before, word = held(worker.target), worker.page.read()[0]
    news = worker.brought(order)
    assert news.problem.code == weights_pb2.Problem.CODE_DATA_LOSS
    assert "layers.0.down" in news.problem.message
    assert not news.verified
    assert same(worker.target, before)
    assert worker.page.read()[0] == word
    checkpoint.flip("layers.0.down", (3, 5))
    assert worker.brought(order).verified
    installed(worker, order)


def test_what_lies_there_of_another_version_is_not_installed(tmp_path: Path, checkpoint: Checkpoint) -> None:
    worker = OneWorker(ModuleTarget(TensorParallel()), tmp_path, "auto")
    assert worker.brought(ordered(worker, checkpoint)).verified
    renew(checkpoint, 2)
    report = installed(worker, ordered(worker, checkpoint))
    assert not report.early_bytes, "it was read in the pause"
    reference = TensorParallel()
    reference.load_weights(checkpoint.weights.items())
    assert same(worker.target, held(ModuleTarget(reference)))


def test_a_stage_that_is_too_small_leaves_the_rest_to_the_pause(tmp_path: Path, checkpoint: Checkpoint) -> None:
    whole = sum(tensor.nbytes for tensor in checkpoint.weights.values())
    worker = OneWorker(ModuleTarget(TensorParallel()), tmp_path, f"{whole // 2}B")
    order = ordered(worker, checkpoint)
    assert worker.brought(order).verified
    answer = worker.installer.install(order)
    report = answer.report
    assert not report.HasField("problem"), report.problem.message
    assert whole // 4 < report.early_bytes <= whole // 2 < report.bytes
    assert f"--stage-memory {whole // 2}B is less than the" in answer.edges[0].reason


@pytest.mark.parametrize("memory", ["auto", "100B"])
def test_staged_layers_are_filled_from_stage_memory_one_by_one(tmp_path: Path, memory: str) -> None:
    model = Repacking()
    target = RepackingTarget(model)
    checkpoint = Checkpoint(weights(0), seed=1)
    worker = OneWorker(target, tmp_path, memory)
    for seed in (0, 100):
        checkpoint.weights.update(weights(seed))
        checkpoint.seal()
        order = ordered(worker, checkpoint)
        assert worker.brought(order).verified
        report = installed(worker, order)
        assert (report.early_bytes == report.bytes) == (memory == "auto")
        assert_holds(model, checkpoint.weights)
    checkpoint.close()


def test_an_agent_that_waits_no_more_ends_it(
    tmp_path: Path, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(early_copy, "TELL_SECONDS", 0.0)
    worker = OneWorker(ModuleTarget(TensorParallel()), tmp_path, "auto")
    worker.waits = False
    news = worker.brought(ordered(worker, checkpoint))
    assert news.problem.code == weights_pb2.Problem.CODE_ABORTED
    assert not news.verified


def test_another_order_ends_it_and_waits_for_its_end(
    tmp_path: Path, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An install must not read from what is being written."""
    worker = OneWorker(ModuleTarget(TensorParallel()), tmp_path, "auto")
    order = ordered(worker, checkpoint)
    go = held_up(worker, order, monkeypatch)
    report = installed(worker, order)
    assert go.is_set()
    assert not report.early_bytes
    assert not [news for news in all_news(worker) if news.HasField("problem")], "its agent has ordered something else"


def test_a_sleep_ends_it_and_its_agent_is_told(
    tmp_path: Path, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = OneWorker(ModuleTarget(TensorParallel()), tmp_path, "auto")
    go = held_up(worker, ordered(worker, checkpoint), monkeypatch)
    worker.installer.give_back()
    assert go.is_set()
    assert not worker.stage.size
    assert "was stopped" in all_news(worker)[-1].problem.message


def held_up(worker: OneWorker, order: worker_pb2.InstallOrder, patch: pytest.MonkeyPatch) -> threading.Event:
    """Makes it ready. When this returns, its first bytes are about to come; they do a moment later, and the event is
    set."""
    entered, go = threading.Event(), threading.Event()
    bring = early_copy.Batch.bring

    def waiting(self: early_copy.Batch, on_bytes: Callable[[int], None]) -> None:
        entered.set()
        assert go.wait(60)
        bring(self, on_bytes)

    patch.setattr(early_copy.Batch, "bring", waiting)
    assert worker.ready(order).early_bytes
    assert entered.wait(60)
    threading.Timer(0.1, go.set).start()
    return go


def all_news(worker: OneWorker) -> list[worker_pb2.WorkerEarly]:
    found = []
    while not worker.news.empty():
        found.append(worker.news.get())
    return found


def test_what_was_brought_for_an_order_lies_there_when_it_comes_again(
    tmp_path: Path, checkpoint: Checkpoint, reads: Counter[str]
) -> None:
    """As from an agent that was started again."""
    worker = OneWorker(ModuleTarget(TensorParallel()), tmp_path, "auto")
    order = ordered(worker, checkpoint)
    assert worker.brought(order).verified
    for arena in checkpoint.arenas:
        arena.tensor(0, (arena.size,), torch.uint8).fill_(0xA5)
    assert worker.brought(order).verified
    assert installed(worker, order).early_bytes


def test_a_sleep_gives_it_back_and_the_next_plan_takes_it_again(tmp_path: Path, checkpoint: Checkpoint) -> None:
    worker = OneWorker(ModuleTarget(TensorParallel()), tmp_path, "1MB")
    assert worker.stage.size == 10**6, "a given size is taken at once"
    order = ordered(worker, checkpoint)
    assert worker.brought(order).verified
    worker.installer.give_back()
    assert not worker.stage.size
    assert not installed(worker, order).early_bytes
    renew(checkpoint, 2)
    order = ordered(worker, checkpoint)
    assert not worker.ready(order, asleep=True).early_bytes
    assert not worker.stage.size, "asleep"
    assert worker.brought(order).verified
    assert worker.stage.size == 10**6
    assert installed(worker, order).early_bytes


def test_without_stage_memory_nothing_is_brought(tmp_path: Path, checkpoint: Checkpoint) -> None:
    worker = OneWorker(ModuleTarget(TensorParallel()), tmp_path)
    answer = worker.ready(ordered(worker, checkpoint))
    assert not answer.stages
    assert not answer.early_bytes


def test_a_size_that_cannot_be_had_is_refused_with_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_memory, "memory_room", lambda: 3 << 30)
    with pytest.raises(CkptEngineError, match="asks for 16 GiB on cpu, where 3 GiB are free"):
        StageMemory("16GiB", CPU)
    with pytest.raises(CkptEngineError, match="--stage-memory 'much' is not an amount of memory"):
        StageMemory("much", CPU)


def test_auto_takes_at_most_half_of_what_is_free_and_says_what_it_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_memory, "memory_room", lambda: 3 << 20)
    stage = StageMemory("auto", CPU)
    assert not stage.size
    stage.provide(1 << 20)
    assert stage.size == 1 << 20
    assert not stage.note
    memory = stage.provide(1 << 24)
    assert stage.size == 3 << 19
    assert stage.note == (
        "--stage-memory auto: 1.5 MiB of the 16 MiB that this version wants, half of the 3 MiB that were free on cpu"
    )
    monkeypatch.setattr(stage_memory, "memory_room", lambda: 1 << 30)
    assert stage.provide(1 << 24) is memory, "it is not taken anew for each version"
