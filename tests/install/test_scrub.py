"""The scrub of one worker, on a real installer: a byte that changes is found, named, and closes the worker; no other
is."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.core.scrub import MOST_WORK, rest_seconds, scrub_seconds
from ckpt_engine.engine.target import LoadTarget, ModuleTarget
from ckpt_engine.install import scrub as scrubs
from ckpt_engine.install import scrub_share
from ckpt_engine.v1 import manager_pb2
from tests.install.install_models import TensorParallel
from tests.install.install_world import Checkpoint, OneWorker
from tests.install.test_staging import Repacking, RepackingTarget, weights
from tests.waiting import PATIENCE, eventually

CLEAN, DIRTY = manager_pb2.WORKER_STATE_CLEAN, manager_pb2.WORKER_STATE_DIRTY
SECONDS = 0.1

Start = Callable[..., OneWorker]


@pytest.fixture(autouse=True)
def talkative(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has scrubs look and tell often, so that tests wait less."""
    monkeypatch.setattr(scrubs, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(scrubs, "TELL_LEAST_SECONDS", 0.02)


@pytest.fixture
def checkpoint() -> Iterator[Checkpoint]:
    made = Checkpoint(TensorParallel().checkpoint(1), seed=3)
    yield made
    made.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    workers: list[OneWorker] = []

    def make(target: LoadTarget, seconds: float = SECONDS) -> OneWorker:
        workers.append(OneWorker(target, tmp_path, scrub_seconds=seconds))
        return workers[-1]

    yield make
    for worker in workers:
        worker.installer.close()


def install(worker: OneWorker, checkpoint: Checkpoint) -> None:
    report = worker.update(checkpoint).report
    assert not report.HasField("problem"), report.problem.message


def told(worker: OneWorker) -> manager_pb2.WorkerScrub:
    return worker.scrubbed[-1] if worker.scrubbed else manager_pb2.WorkerScrub()


def hashes_all(worker: OneWorker, times: int = 2) -> None:
    """Waits until so many more whole passes have ended."""
    now = told(worker).passes
    eventually("it hashes all again", PATIENCE, lambda: told(worker).passes >= now + times)


def flip(tensor: torch.Tensor) -> None:
    tensor.detach().view(-1).view(torch.uint8)[3] ^= 1


def closed_by(worker: OneWorker, number: int) -> manager_pb2.ScrubDifference:
    """Waits until the scrub has closed the worker for its `number`th difference."""
    eventually("the difference is told", PATIENCE, lambda: told(worker).differences == number)
    assert worker.page.read()[0].state == DIRTY, "it is told after the worker was marked"
    return told(worker).last


def test_every_flipped_byte_is_found_named_and_mended(start: Start, checkpoint: Checkpoint) -> None:
    model = TensorParallel()
    worker = start(ModuleTarget(model))
    cases = [("layers.0.o_proj", "layers.0.o_proj"), ("norm.weight", "norm.weight"), ("layers.0.qkv", "layers.0.q")]
    for number, (parameter, name) in enumerate(cases, 1):
        install(worker, checkpoint)
        identity = worker.slot.identity
        hashes_all(worker)
        assert (worker.page.read()[0].state, told(worker).differences) == (CLEAN, number - 1)
        flip(model.get_parameter(parameter))
        last = closed_by(worker, number)
        assert (last.tensor, last.epoch, last.identity) == (name, worker.epoch, identity)
        assert (list(last.start), list(last.stop)) == ([0] * len(last.stop), list(checkpoint.weights[name].shape))
        assert told(worker).idle == scrubs.NOT_CLEAN
    install(worker, checkpoint)
    hashes_all(worker)
    assert (worker.page.read()[0].state, told(worker).differences) == (CLEAN, 3)


def test_installs_of_other_weights_at_once_are_no_difference(
    start: Start, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With pieces of a few elements, without a rest, so that nearly every install comes in the middle of a need."""
    monkeypatch.setattr(scrubs, "rest_seconds", lambda *_: 0.0)
    monkeypatch.setattr(scrubs, "HOST_PIECE_BYTES", 256)
    worker = start(ModuleTarget(TensorParallel()))
    for seed in range(25):
        checkpoint.weights.update(TensorParallel().checkpoint(seed))
        checkpoint.seal()
        install(worker, checkpoint)
    hashes_all(worker, 1)
    assert {each.differences for each in worker.scrubbed} == {0}
    assert worker.page.read()[0].state == CLEAN


def test_a_pass_goes_on_over_installs(start: Start, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each install comes after one more piece: without progress that survives it, no pass would ever end."""
    turn = threading.Semaphore(0)

    def rest(*_: object) -> float:
        turn.release()
        return 60.0  # until an install

    monkeypatch.setattr(scrubs, "rest_seconds", rest)
    monkeypatch.setattr(scrubs, "PIECE_BOXES", 4)
    worker = start(ModuleTarget(TensorParallel()))
    needs = 0
    while not told(worker).passes:
        install(worker, checkpoint)
        assert turn.acquire(timeout=PATIENCE)
        needs += 1
    assert needs > 2, "several pieces"


def test_a_need_that_an_install_cuts_is_hashed_again_as_a_whole(
    start: Start, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A need of many pieces, with an install of other weights after the first: half of each would be a difference."""
    steps = 0

    def rest(*_: object) -> float:
        nonlocal steps
        steps += 1
        return 60.0 if steps == 1 else 0.0

    monkeypatch.setattr(scrubs, "rest_seconds", rest)
    monkeypatch.setattr(scrubs, "HOST_PIECE_BYTES", 64)
    worker = start(ModuleTarget(TensorParallel()))
    install(worker, checkpoint)
    eventually("it has hashed one piece", PATIENCE, lambda: steps)
    checkpoint.weights.update(TensorParallel().checkpoint(77))
    checkpoint.seal()
    install(worker, checkpoint)
    hashes_all(worker, 1)
    assert told(worker).differences == 0


def test_nothing_is_read_while_an_engine_has_given_memory_up(start: Start, checkpoint: Checkpoint) -> None:
    """With its agent's mark until that is gone; without one, as of an engine put to sleep past its agent, until the
    next install."""
    model = TensorParallel()
    worker = start(ModuleTarget(model))
    install(worker, checkpoint)
    hashes_all(worker)
    worker.asleep = True
    worker.installer.give_back()
    eventually("it rests", PATIENCE, lambda: told(worker).idle == scrubs.ASLEEP)
    flip(model.norm.weight)
    assert worker.page.read()[0].state == CLEAN
    flip(model.norm.weight)  # as if it had come back from the host
    worker.asleep = False
    hashes_all(worker)
    worker.installer.give_back()
    eventually("it rests", PATIENCE, lambda: told(worker).idle == scrubs.AWAITS_UPDATE)
    before = told(worker).passes
    install(worker, checkpoint)
    hashes_all(worker)
    assert told(worker).passes > before
    assert told(worker).differences == 0


def test_discarded_weights_are_let_go_and_stay_none(start: Start, checkpoint: Checkpoint) -> None:
    worker = start(ModuleTarget(TensorParallel()))
    install(worker, checkpoint)
    hashes_all(worker)
    with worker.scrub.halted():
        worker.slot.none()
    worker.installer.discarding()
    eventually("it rests", PATIENCE, lambda: told(worker).idle)
    assert worker.page.read()[0].state == manager_pb2.WORKER_STATE_NONE
    install(worker, checkpoint)
    hashes_all(worker)


def test_tensors_that_moved_are_not_compared(start: Start, checkpoint: Checkpoint) -> None:
    """What an engine does not compute with any more says nothing about what it serves."""
    model = TensorParallel()
    worker = start(ModuleTarget(model))
    install(worker, checkpoint)
    hashes_all(worker)
    old = model.norm.weight.data
    model.norm.weight.data = old.clone()
    flip(old)
    eventually("it rests", PATIENCE, lambda: told(worker).idle == scrubs.MOVED)
    assert worker.page.read()[0].state == CLEAN
    install(worker, checkpoint)
    hashes_all(worker)


def test_a_wrong_read_is_no_wrong_weight(
    start: Start, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = TensorParallel()
    worker = start(ModuleTarget(model))
    install(worker, checkpoint)
    again = scrubs._ScrubPass.differs

    def mended_meanwhile(current: scrubs._ScrubPass, check: int) -> bool:
        flip(model.norm.weight)
        return again(current, check)

    monkeypatch.setattr(scrubs._ScrubPass, "differs", mended_meanwhile)
    flip(model.norm.weight)
    eventually("it is logged", PATIENCE, lambda: "read norm.weight wrong" in caplog.text)
    monkeypatch.setattr(scrubs._ScrubPass, "differs", again)
    hashes_all(worker)
    assert (worker.page.read()[0].state, told(worker).differences) == (CLEAN, 0)


def test_a_widened_tensor_is_compared_too(tmp_path: Path, start: Start) -> None:
    checkpoint = Checkpoint(TensorParallel().checkpoint(1))
    model = TensorParallel(dtype=torch.float32)
    worker = start(ModuleTarget(model))
    install(worker, checkpoint)
    hashes_all(worker)
    assert told(worker).differences == 0
    flip(model.layers[0].w2)
    assert closed_by(worker, 1).tensor.endswith(".down")
    checkpoint.close()


def test_what_cannot_be_compared_is_told_with_its_bytes(start: Start) -> None:
    """Repacked layers exist in the loader's form for a moment only."""
    checkpoint = Checkpoint(weights(0), seed=1)
    model = Repacking()
    worker = start(RepackingTarget(model))
    install(worker, checkpoint)
    hashes_all(worker)
    assert told(worker).bytes == model.norm.nbytes
    (left,) = told(worker).unscrubbed
    assert (left.reason, left.tensors, left.bytes) == (scrub_share.STAGED, 3, 3 * 13 * 4 * 4)
    checkpoint.close()


def test_constants_and_padding_are_told(start: Start, checkpoint: Checkpoint) -> None:
    model = TensorParallel()
    worker = start(ModuleTarget(model))
    install(worker, checkpoint)
    hashes_all(worker)
    left = {each.reason: each.bytes for each in told(worker).unscrubbed}
    rows = model.embed_tokens.weight.shape[0] - model.vocabulary
    padding = 2 * rows * model.hidden * 2  # of the embedding and the head
    assert left == {scrub_share.CONSTANT: model.inv_freq.nbytes, scrub_share.FILLED: padding}
    total = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    assert told(worker).bytes + sum(left.values()) == total


def test_without_an_interval_there_is_no_thread(start: Start, checkpoint: Checkpoint) -> None:
    worker = start(ModuleTarget(TensorParallel()), 0.0)
    install(worker, checkpoint)
    assert not [each for each in threading.enumerate() if each.name == "ckpt-engine scrub"]


def test_a_pass_takes_its_interval_and_catches_up_within_its_share() -> None:
    on_time = rest_seconds(60.0, 1 << 20, 1 << 30, 0.0, 1e-4)
    assert on_time == pytest.approx(60 * 0.8 / 1024)
    assert rest_seconds(60.0, 1 << 20, 1 << 30, 50.0, 1e-4) == pytest.approx(1e-4 * (1 / MOST_WORK - 1))


@pytest.mark.parametrize(("text", "seconds"), [("", 60.0), ("0", 0.0), ("0.5", 0.5)])
def test_intervals_are_read(text: str, seconds: float) -> None:
    assert scrub_seconds(text) == seconds


@pytest.mark.parametrize("text", ["-1", "nan", "inf", "a minute"])
def test_an_interval_that_is_none_is_refused_with_what_to_write(text: str) -> None:
    with pytest.raises(CkptEngineError, match="write one such as 60, or 0 for no scrub"):
        scrub_seconds(text)


@pytest.mark.parametrize(
    ("shape", "stride"),
    [((700, 300), (300, 1)), ((300, 700), (1, 300)), ((7, 5, 4000), (20000, 4000, 1)), ((1 << 20,), (1,))],
)
def test_pieces_tile_a_box_and_are_small(shape: tuple[int, ...], stride: tuple[int, ...]) -> None:
    view = torch.empty(math.prod(shape), dtype=torch.float32).as_strided(shape, stride)
    parts = list(scrubs._cut(view, (10,) * len(shape)))
    assert all(part.nbytes <= scrubs.HOST_PIECE_BYTES for part, _ in parts)
    assert sum(part.numel() for part, _ in parts) == view.numel()
    marks = torch.zeros(shape, dtype=torch.int8)
    for part, at in parts:
        marks[tuple(slice(one - 10, one - 10 + length) for one, length in zip(at, part.shape, strict=True))] += 1
    assert bool((marks == 1).all())
