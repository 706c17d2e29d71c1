"""Workers install from a relay what the trainer had sealed: bit for bit, whatever became of the trainer."""

from __future__ import annotations

import gc
import os
import signal
from pathlib import Path

import pytest
import torch

from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.core.sealed_record import ProvenRecord
from ckpt_engine.transport.relay_memory import reader as relay_memory
from ckpt_engine.v1 import manager_pb2
from ckpt_engine.v1.worker_pb2 import WorkerInstalled
from tests.install.install_models import TensorParallel, assert_same, state
from tests.install.install_world import Checkpoint
from tests.relay.relay_process import RelayProcess
from tests.relay.relay_world import Replica, seal, tables, wish


def poison(checkpoint: Checkpoint) -> None:
    for arena in checkpoint.arenas:
        arena.tensor(0, (arena.size,), torch.uint8).fill_(0xA5)


def trained(checkpoint: Checkpoint, seed: int) -> None:
    """Other weights; sealed when `seal` is called."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in checkpoint.weights.items():
        checkpoint.weights[name] = torch.randn(weight.shape, generator=generator).to(weight.dtype)


def assert_installed(
    replica: Replica, answers: list[WorkerInstalled], recorded: ProvenRecord, checkpoint: Checkpoint
) -> None:
    for rank, (worker, model, answer) in enumerate(zip(replica.workers, replica.models, answers, strict=True)):
        assert not answer.report.HasField("problem"), answer.report.problem.message
        assert {edge.transport for edge in answer.edges} == {"relay_memory"}
        like = TensorParallel(rank, len(replica.models))
        like.load_weights(checkpoint.weights.items())
        assert_same(state(model), state(like))
        [word] = worker.page.read()
        assert word.state == manager_pb2.WORKER_STATE_CLEAN
        assert word.identity is not None
        assert word.identity.root == recorded.root


@pytest.mark.parametrize(("seed", "widened"), [(None, False), (1, False), (2, True)], ids=["whole", "cut", "cast"])
def test_workers_install_what_the_trainer_has_since_overwritten(
    tmp_path: Path, seed: int | None, widened: bool
) -> None:
    """The trainer's memory is poisoned as soon as the relay holds the version, and nobody reads it any more."""
    checkpoint = Checkpoint(TensorParallel(0, 2).checkpoint(), seed, widened)
    replica = Replica(checkpoint, tmp_path / "engine")
    with RelayProcess(grace=2.0) as relay:
        recorded = seal(checkpoint, [replica])
        filled = relay.fill(0, wish(recorded, 1, tables(checkpoint), [replica]))
        assert filled["missing"] == []
        poison(checkpoint)
        assert_installed(replica, replica.install(filled["table"], recorded, 1), recorded, checkpoint)
        assert relay.ask(retire=0) == 0, "a worker whose install is over holds nothing"


def test_four_replicas_read_one_union_which_left_the_trainer_once(tmp_path: Path) -> None:
    checkpoint = Checkpoint(TensorParallel(0, 2).checkpoint(), 3)
    replicas = [Replica(checkpoint, tmp_path / str(number)) for number in range(4)]
    with RelayProcess() as relay:
        recorded = seal(checkpoint, replicas)
        filled = relay.fill(0, wish(recorded, 1, tables(checkpoint), replicas))
        assert sum(filled["brought"].values()) == filled["bytes"]
        assert filled["bytes"] == sum(weight.nbytes for weight in checkpoint.weights.values())
        poison(checkpoint)
        for replica in replicas:
            assert_installed(replica, replica.install(filled["table"], recorded, 1), recorded, checkpoint)


def test_versions_take_turns_in_two_slots_and_nothing_grows(tmp_path: Path) -> None:
    checkpoint = Checkpoint(TensorParallel(0, 2).checkpoint(), 4)
    replica = Replica(checkpoint, tmp_path / "engine")
    found = []
    with RelayProcess(grace=60.0) as relay:
        for version in range(1, 7):
            trained(checkpoint, version)
            recorded = seal(checkpoint, [replica])
            filled = relay.fill(version % 2, wish(recorded, version, tables(checkpoint), [replica]))
            poison(checkpoint)
            assert filled["overruled"] == 0
            assert_installed(replica, replica.install(filled["table"], recorded, version), recorded, checkpoint)
            gc.collect()
            found.append((len(os.listdir("/proc/self/fd")), relay.ask(reserved=True), relay.ask(readers=True)))
            found[-1] += (filled["table"].SerializeToString(deterministic=True),)
    assert found[2:4] == found[4:6], "descriptors, memory, readers and tables are those of two versions before"
    assert found[-1][2] == 2


def test_a_relay_that_is_killed_leaves_its_workers_as_they_were(tmp_path: Path) -> None:
    checkpoint = Checkpoint(TensorParallel(0, 2).checkpoint(), 5)
    replica = Replica(checkpoint, tmp_path / "engine")
    with RelayProcess() as relay:
        recorded = seal(checkpoint, [replica])
        filled = relay.fill(0, wish(recorded, 1, tables(checkpoint), [replica]))
        assert_installed(replica, replica.install(filled["table"], recorded, 1), recorded, checkpoint)
        os.kill(relay.pid, signal.SIGKILL)
        relay.process.wait(timeout=60)
        for answer in replica.install(filled["table"], recorded, 2):
            assert "relay has gone" in answer.report.problem.message
    for worker in replica.workers:
        [word] = worker.page.read()
        assert (word.state, word.identity and word.identity.version) == (manager_pb2.WORKER_STATE_CLEAN, 1)


def test_a_relay_that_is_stopped_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_memory, "ASK_SECONDS", 0.3)
    checkpoint = Checkpoint(TensorParallel(0, 2).checkpoint(), 5)
    replica = Replica(checkpoint, tmp_path / "engine")
    with RelayProcess() as relay:
        recorded = seal(checkpoint, [replica])
        filled = relay.fill(0, wish(recorded, 1, tables(checkpoint), [replica]))
        os.kill(relay.pid, signal.SIGSTOP)
        for answer in replica.install(filled["table"], recorded, 1):
            assert "did not answer within 0.3 s" in answer.report.problem.message
        os.kill(relay.pid, signal.SIGCONT)
        assert_installed(replica, replica.install(filled["table"], recorded, 1), recorded, checkpoint)


def test_what_a_relay_lacks_is_named_when_a_plan_is_made(tmp_path: Path) -> None:
    checkpoint = Checkpoint(TensorParallel(0, 2).checkpoint(), None)
    replica = Replica(checkpoint, tmp_path / "engine")
    with RelayProcess() as relay:
        recorded = seal(checkpoint, [replica])
        checkpoint.flip("norm.weight", (3,))
        filled = relay.fill(0, wish(recorded, 1, tables(checkpoint), [replica]))
        (why,) = filled["missing"]
        assert why.startswith("[0:24] of tensor norm.weight at rank 0 has other bytes than were sealed"), why
        with pytest.raises(CkptEngineError, match=r"of tensor norm.weight, and no source holds"):
            replica.install(filled["table"], recorded, 1)
