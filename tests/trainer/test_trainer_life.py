"""A trainer's life: bad calls, managers that are away or come back, closing, and several ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
import torch
from plain_replica import PlainReplica
from trainer_world import DEADLINES, manager_config

from ckpt_engine import CkptEngineError, Trainer
from ckpt_engine.machines.events import TimerFired, TrainerEvent
from ckpt_engine.machines.trainer.machine import TrainerMachine
from ckpt_engine.manager.service import running_manager
from ckpt_engine.v1 import manager_pb2, weights_pb2
from tests.cluster import eventually
from tests.command_line import run
from tests.line_process import LineProcess
from tests.ports import free_address

Problem = weights_pb2.Problem
StartReplica = Callable[..., PlainReplica]

NOBODY = "127.0.0.1:1"


def code_of(error: pytest.ExceptionInfo[CkptEngineError]) -> Problem.Code:
    return error.value.problem.code


def test_importing_the_package_loads_neither_grpc_nor_torch() -> None:
    check = "import ckpt_engine, sys; sys.exit(any(m in sys.modules for m in ('grpc', 'torch', 'numpy')))"
    assert subprocess.run([sys.executable, "-c", check], timeout=60, check=False).returncode == 0


@pytest.mark.parametrize(("rank", "world_size"), [(-1, 1), (1, 1), (0, 0), (4, 4)])
def test_ranks_must_be_in_the_world(rank: int, world_size: int) -> None:
    with pytest.raises(CkptEngineError, match="rank") as caught:
        Trainer(NOBODY, rank, world_size, "run")
    assert code_of(caught) == Problem.CODE_INVALID_ARGUMENT


def test_bad_calls_say_what_is_wrong() -> None:
    with Trainer(NOBODY, lineage="run") as trainer:
        with pytest.raises(CkptEngineError, match="publish") as caught:
            trainer.update_weights(1)
        assert code_of(caught) == Problem.CODE_FAILED_PRECONDITION
        for seconds in (float("inf"), float("nan"), 1e308, -1.0):
            for call in (
                partial(trainer.update_weights, 1),
                trainer.wait_for_replicas,
                trainer.withdraw,
                trainer.sleep,
                trainer.wake,
            ):
                with pytest.raises(CkptEngineError, match="cannot be waited for") as caught:
                    call(timeout=seconds)
                assert code_of(caught) == Problem.CODE_INVALID_ARGUMENT
        for weights, code in (
            (torch.ones(3), Problem.CODE_INVALID_ARGUMENT),
            ({"a": torch.ones(2, device="meta")}, Problem.CODE_INVALID_ARGUMENT),
            ("/does/not/exist", Problem.CODE_NOT_FOUND),
        ):
            with pytest.raises(CkptEngineError) as caught:
                trainer.publish(weights)
            assert code_of(caught) == code
        with pytest.raises(CkptEngineError, match="publish"):
            trainer.update_weights(1)


def test_a_manager_that_is_not_there_is_named() -> None:
    with Trainer(NOBODY, lineage="run", deadlines=DEADLINES) as trainer:
        trainer.publish({"a": torch.ones(3)})
        eventually("it knows why it has no session", 60, lambda: trainer._background._lost)
        with pytest.raises(CkptEngineError, match=r"127\.0\.0\.1:1: nothing listens there") as caught:
            trainer.update_weights(timeout=1.0)
        assert code_of(caught) == Problem.CODE_UNAVAILABLE
        with pytest.raises(CkptEngineError, match="0 of 1 replicas") as caught:
            trainer.wait_for_replicas(timeout=0.5)
        assert code_of(caught) == Problem.CODE_DEADLINE_EXCEEDED


def test_closing_says_goodbye_and_frees_shared_memory(manager: str) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        # The same rank again: refused, unless the one before has left.
        with Trainer(manager, lineage="run", deadlines=DEADLINES) as trainer:
            trainer.publish({"a": torch.ones(1000)})
            with pytest.raises(CkptEngineError, match="replica"):
                trainer.update_weights(timeout=60)
        answer = json.loads(run("status", "--manager", manager, "--json").stdout)
        assert answer["trainers"] == []
    assert len(os.listdir("/proc/self/fd")) <= before + 4


@pytest.mark.parametrize("publishes", [False, True])
def test_trainers_that_end_at_once_leave_nothing_behind(
    manager: str, caplog: pytest.LogCaptureFixture, publishes: bool
) -> None:
    """No rank in the status, and no traceback in the manager's log, whenever it was that they ended."""
    for number in range(8):
        with Trainer(manager, deadlines=DEADLINES) as trainer:
            if publishes:
                trainer.publish({"a": torch.ones(3)})
            time.sleep(0.002 * number)
    answer = json.loads(run("status", "--manager", manager, "--json").stdout)
    assert answer["trainers"] == []
    # Several loops in one process: grpc.aio's own noise, which no manager of its own process has.
    assert [
        record.message for record in caplog.records if record.levelname == "ERROR" and record.name != "asyncio"
    ] == []


def test_a_rank_that_is_taken_is_refused_for_good(manager: str) -> None:
    with Trainer(manager, lineage="run", deadlines=DEADLINES) as first:
        first.publish({"a": torch.ones(3)})
        with pytest.raises(CkptEngineError, match="replica"):
            first.update_weights(timeout=60)
        with Trainer(manager, lineage="run", deadlines=DEADLINES) as second:
            second.publish({"a": torch.ones(3)})
            for _ in range(2):
                with pytest.raises(CkptEngineError) as caught:
                    second.update_weights(timeout=60)
                assert code_of(caught) in (Problem.CODE_ABORTED, Problem.CODE_FAILED_PRECONDITION)
                assert "rank 0" in caught.value.problem.message


def test_a_trainer_whose_machine_fails_says_so_at_once(manager: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The defect is put in; there is none that could be provoked."""
    original = TrainerMachine._message

    def message(self: TrainerMachine, body: object, now: float) -> None:
        if isinstance(body, manager_pb2.PublicationAccepted):
            raise ZeroDivisionError("a defect of ours")
        original(self, body, now)

    monkeypatch.setattr(TrainerMachine, "_message", message)
    with Trainer(manager, lineage="run", deadlines=DEADLINES) as trainer:
        trainer.publish({"a": torch.ones(3)})
        with pytest.raises(CkptEngineError, match="a defect of ours") as caught:
            trainer.update_weights()
        assert code_of(caught) == Problem.CODE_INTERNAL


def test_a_call_waits_for_no_machine_that_raised(manager: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The defect is put in. The call waits for a second rank, which never comes, and would for longer than the test."""
    broken = threading.Event()
    original = TrainerMachine._take

    def take(self: TrainerMachine, event: TrainerEvent, now: float) -> None:
        if broken.is_set() and isinstance(event, TimerFired):
            self._session.send(manager_pb2.Goodbye(reason="half of what was decided"))
            raise ZeroDivisionError("a defect of ours")
        original(self, event, now)

    monkeypatch.setattr(TrainerMachine, "_take", take)
    patient = DEADLINES.changed("update=1000 gather=900 settle=0.1")
    with Trainer(manager, 0, 2, lineage="run", deadlines=patient) as trainer:
        trainer.publish({"a": torch.ones(3)})
        timer = threading.Timer(1.0, broken.set)
        timer.start()
        for _ in range(2):
            with pytest.raises(CkptEngineError, match="the trainer failed on TimerFired") as caught:
                trainer.update_weights()
            assert code_of(caught) == Problem.CODE_INTERNAL
        timer.join()
        gone = lambda: not trainer._background.status().trainers[0].connected  # noqa: E731
        eventually("the manager has heard that its stream ended", 60, gone)


def test_a_forked_child_is_refused(manager: str) -> None:
    with Trainer(manager, lineage="run", deadlines=DEADLINES) as trainer:
        trainer.publish({"a": torch.ones(3)})
        child = os.fork()
        if child == 0:
            try:
                trainer.close()
                trainer.update_weights()
            except CkptEngineError as error:
                os._exit(0 if "belongs to process" in error.problem.message else 1)
            finally:
                os._exit(2)
        end = time.monotonic() + 60
        while (done := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < end:
            time.sleep(0.05)
        assert done == (child, 0)
        with pytest.raises(CkptEngineError, match="replica"):
            trainer.update_weights(timeout=60)


def test_a_manager_that_comes_later_and_one_that_is_restarted(tmp_path: Path) -> None:
    address = free_address()
    weights = {"a": torch.ones(3)}
    config = manager_config(tmp_path / "ledger.sqlite3", listen=address)
    reader = PlainReplica(address).start()
    try:
        with Trainer(address, lineage="run", deadlines=DEADLINES) as trainer:
            trainer.publish(weights)
            time.sleep(0.3)
            with running_manager(config):
                trainer.wait_for_replicas(timeout=60)
                first = trainer.update_weights(timeout=60)
                assert first.ok
            eventually("it knows that its session has ended", 60, lambda: trainer._background._lost)
            with pytest.raises(CkptEngineError) as caught:
                trainer.update_weights(timeout=0.5)
            assert code_of(caught) == Problem.CODE_UNAVAILABLE
            weights["a"].add_(1)
            with running_manager(config):
                trainer.wait_for_replicas(timeout=60)
                second = trainer.update_weights(timeout=60)
                assert second.ok
                assert second.version == first.version + 1
                assert torch.equal(reader.weights["a"], weights["a"])
    finally:
        reader.stop()


def test_a_manager_that_ends_during_an_update_ends_the_call(tmp_path: Path) -> None:
    reached, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        reached.set()
        go_on.wait(60)

    address = free_address()
    config = manager_config(tmp_path / "ledger.sqlite3", listen=address)
    reader = PlainReplica(address)
    reader.before_reading = wait
    try:
        with Trainer(address, lineage="run", deadlines=DEADLINES) as trainer, ExitStack() as running:
            trainer.publish({"a": torch.ones(3)})
            running.enter_context(running_manager(config))
            reader.start()
            trainer.wait_for_replicas(timeout=60)

            def stop() -> None:
                reached.wait(60)
                running.close()

            stopping = threading.Thread(target=stop)
            stopping.start()
            with pytest.raises(CkptEngineError) as caught:
                trainer.update_weights(timeout=60)
            assert code_of(caught) == Problem.CODE_UNAVAILABLE
            stopping.join(60)
            go_on.set()
            with running_manager(config):
                trainer.wait_for_replicas(timeout=60)
                assert trainer.update_weights(timeout=60).ok
    finally:
        reader.stop()


def test_two_ranks_in_two_processes_send_their_halves(manager: str, replica: StartReplica, tmp_path: Path) -> None:
    reader = replica()
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(LineProcess("tests.trainer.half_rank", manager, str(rank), str(tmp_path)))
            for rank in range(2)
        ]
        said = [rank.answer() for rank in ranks]
        assert [rank.process.wait(300) for rank in ranks] == [0, 0]
    assert said[0] == said[1]
    assert [(report["identity"]["version"], report["ok"], report["verified"]) for report in said[0]["reports"]] == [
        ("1", True, True),
        ("2", True, True),
    ]
    assert said[0]["lineage"].startswith("run-")
    assert "shape" in said[0]["refused"]
    # Rank r holds row r; after the second update it is filled with 10 * 2 + r.
    assert torch.equal(reader.weights["halves"], torch.tensor([[20.0] * 3, [21.0] * 3]))
    assert torch.equal(reader.weights["both"], torch.full((4,), 2.0))
