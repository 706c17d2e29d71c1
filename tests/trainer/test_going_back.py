"""Going back to a version that keepers hold, and asking how an update ended; also after the manager's kill -9."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
import torch
from keeper import Keeper
from plain_replica import PlainReplica
from torch import nn

from ckpt_engine import CkptEngineError, Client, Trainer
from ckpt_engine.channel import ManagerStub
from ckpt_engine.v1 import manager_pb2, weights_pb2
from tests.cluster import eventually
from tests.command_line import run
from tests.ports import free_address

Weights = dict[str, torch.Tensor]
Hold = Callable[..., Keeper]
Start = Callable[..., PlainReplica]

SHORT = "heartbeat=0.3 reconnect_most=0.5 resend=0.5 report=0.5"


class ManagerProcess:
    """A real manager, which can be killed and started again on its ledger."""

    def __init__(self, path: Path) -> None:
        self.address = free_address()
        self._ledger = path / "killed.sqlite3"
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "ckpt_engine", "manager", "--listen", self.address, "--http", ""]
        environment = {**os.environ, "CKPT_ENGINE_DEADLINES": SHORT}
        self._process = subprocess.Popen([*command, "--ledger", str(self._ledger)], env=environment)
        with grpc.insecure_channel(self.address) as channel:
            grpc.channel_ready_future(channel).result(60)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(60)

    def holders(self) -> int:
        """Those that are connected."""
        with grpc.insecure_channel(self.address) as channel:
            stub = ManagerStub(channel)
            status = stub.GetStatus(manager_pb2.GetStatusRequest(), timeout=60)
            return sum(holder.connected for holder in status.holders)

    def latest(self) -> list[weights_pb2.Identity]:
        with grpc.insecure_channel(self.address) as channel:
            stub = ManagerStub(channel)
            first = next(stub.WatchReplicas(manager_pb2.WatchReplicasRequest(watcher="test"), timeout=60))
            return list(first.latest)


@pytest.fixture
def process(tmp_path: Path) -> Iterator[ManagerProcess]:
    made = ManagerProcess(tmp_path)
    yield made
    made.kill()


def trained(model: nn.Module, value: float) -> Weights:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-value, value)
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def same(found: Weights, wanted: Weights) -> bool:
    return found.keys() == wanted.keys() and all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


def trained_on_thread(trainer: Trainer) -> tuple[threading.Event, list[object]]:
    """An update on a thread of its own: whether it has ended, and its report or what it raised."""
    ended, results = threading.Event(), []

    def call() -> None:
        try:
            results.append(trainer.update_weights(timeout=60))
        except CkptEngineError as error:
            results.append(error)
        ended.set()

    threading.Thread(target=call, daemon=True).start()
    return ended, results


def test_replicas_go_back_bit_for_bit_and_numbers_go_on_also_after_a_kill(
    process: ManagerProcess, replica: Start, hold: Hold
) -> None:
    model, address = nn.Linear(6, 4), process.address
    plain = replica(address=address)
    with Trainer(address, lineage="run") as trainer:
        trainer.publish(model)
        trainer.wait_for_replicas(1)
        held: dict[int, Weights] = {}
        for version in (1, 2):
            held[version] = trained(model, float(version))
            assert trainer.update_weights(version, timeout=60).ok
            assert plain.identity is not None
            keeper = hold(address, f"keeper-{version}", plain.identity, held[version])
            eventually("the manager knows what it holds", 90, lambda keeper=keeper: keeper.told)
        assert same(plain.weights, held[2])

        said: list[str] = []
        back = Client(address).rollback(1, timeout=60, on_progress=lambda each: said.append(each.message))
        assert (back.ok, back.verified, back.lineage, back.version) == (True, True, "run", 1)
        assert "recording" in said
        assert same(plain.weights, held[1])
        assert [each.version for each in process.latest()] == [1]
        trained(model, 3.0)
        third = trainer.update_weights(timeout=60)
        assert (third.ok, third.version) == (True, 3)

        process.kill()
        process.start()
        eventually("the keepers are back", 60, lambda: process.holders() == 2)
        shown = run("rollback", "--manager", address, "--version", "1", "--replica", "plain")
        assert shown.exit_code == 0, shown.output
        assert "version 1 of run: " in shown.stdout
        assert "plain: transfer" in shown.stderr
        assert same(plain.weights, held[1])
        assert trainer.wait(3).message == third.message, "the ledger knows it"
        fourth = trainer.update_weights(timeout=60)
        assert (fourth.ok, fourth.version) == (True, 4)

        reading, go_on = threading.Event(), threading.Event()
        plain.before_reading = lambda: (reading.set(), go_on.wait(60))
        ended, _ = trained_on_thread(trainer)
        assert reading.wait(60)
        process.kill()
        again = threading.Timer(0.5, process.start)
        again.start()
        with pytest.raises(CkptEngineError, match=r"the manager ended during update \d+ \(version 5") as raised:
            trainer.wait(5, timeout=60)
        assert raised.value.problem.code == weights_pb2.Problem.CODE_ABORTED
        go_on.set()
        assert ended.wait(60)
        again.join(60)


def test_refusals_name_what_is_held_and_touch_nothing(manager: str, replica: Start, hold: Hold) -> None:
    model, plain = nn.Linear(6, 4), replica()
    with Trainer(manager, lineage="run") as trainer:
        trainer.publish(model)
        trainer.wait_for_replicas(1)
        weights = trained(model, 1.0)
        assert trainer.update_weights(1, timeout=60).ok
    assert plain.identity is not None
    keeper = hold(manager, "one", plain.identity, weights)
    eventually("the manager knows what it holds", 90, lambda: keeper.told)
    nobody = free_address()
    away = run("rollback", "--manager", nobody, "--version", "1")
    assert away.exit_code == 1
    assert f"manager {nobody}: nothing listens there" in away.stderr
    unknown = run("rollback", "--manager", manager, "--version", "7")
    assert unknown.exit_code == 1
    assert "nothing that is connected holds version 7: keeper one holds version 1 of lineage 'run'" in unknown.stderr
    said = json.loads(run("rollback", "--manager", manager, "--version", "1", "--replica", "x", "--json").stdout)
    assert (said["ok"], said["problem"]["code"]) == (False, "CODE_NOT_FOUND")
    there = json.loads(run("rollback", "--manager", manager, "--version", "1", "--json").stdout)
    assert (there["ok"], there["bytes"], there["replicas"][0]["outcome"]) == (True, "0", "OUTCOME_NEW_SERVING")
    assert len(plain.installs) == 1, "it serves that version already"
    client = Client(manager)
    with pytest.raises(CkptEngineError, match="is not a count of steps"):
        client.rollback(-1)
    with pytest.raises(CkptEngineError, match="pause_mode 'stop' is none of"):
        client.rollback(1, pause_mode="stop")  # type: ignore[arg-type]


def test_an_update_is_waited_for_while_another_thread_is_in_it(manager: str, replica: Start) -> None:
    reading, go_on, plain = threading.Event(), threading.Event(), replica()
    plain.before_reading = lambda: (reading.set(), go_on.wait(60))
    with Trainer(manager, lineage="run") as trainer:
        trainer.publish(nn.Linear(6, 4))
        trainer.wait_for_replicas(1)
        with pytest.raises(CkptEngineError, match="no update to version 0 of lineage 'run' is known: none"):
            trainer.wait(0)
        ended, results = trained_on_thread(trainer)
        assert reading.wait(60)
        with pytest.raises(CkptEngineError, match=r"it goes on: update \d+ \(version 0 of lineage 'run'\): installing"):
            trainer.wait(0, timeout=2.0)
        go_on.set()
        report = trainer.wait(0, timeout=60)
        assert ended.wait(60)
        assert results[0] == report
