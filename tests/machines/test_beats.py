"""Heartbeats that say what was said before begin nothing; whatever they tell that is new counts at once."""

from __future__ import annotations

from typing import Any

import pytest

from ckpt_engine.core.manifest import DIGEST_FORMAT
from ckpt_engine.machines.events import Message, Peer
from ckpt_engine.machines.manager.ledger_recovery import MOST_SKIPPED
from ckpt_engine.machines.manager.machine import ManagerMachine
from ckpt_engine.v1 import manager_pb2, weights_pb2

PEER = Peer("replica")
IDENTITY = weights_pb2.Identity(lineage="run", version=1, root=bytes(32))


def worker(epoch: int = 0, state: manager_pb2.WorkerState = manager_pb2.WORKER_STATE_CLEAN) -> manager_pb2.WorkerStatus:
    identity = IDENTITY if state == manager_pb2.WORKER_STATE_CLEAN else None
    return manager_pb2.WorkerStatus(boot_id=bytes(16), state=state, epoch=epoch, identity=identity)


class Manager:
    """A machine with one replica. looks: how often it looked what can begin."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.machine = ManagerMachine("cluster", 0)
        self.looks = 0
        look = self.machine._next

        def counted(now: float) -> None:
            self.looks += 1
            look(now)

        monkeypatch.setattr(self.machine, "_next", counted)
        hello = manager_pb2.ReplicaHello(
            digest_format=DIGEST_FORMAT, name="a", session_id="s", agent_epoch=1, workers=[worker()]
        )
        self.machine.handle(Message(PEER, hello), 0.0)

    def beat(self, **said: Any) -> int:
        """How often it looks because of a heartbeat."""
        before, changes = self.looks, self.machine.changes
        said = {"workers": [worker()], "serving": True, **said}
        out = self.machine.handle(Message(PEER, manager_pb2.ReplicaHeartbeat(sequence=5, **said)), 1.0)
        assert [type(each.body) for each in out if hasattr(each, "body")] == [manager_pb2.Heartbeat], "it is answered"
        assert self.machine.changes - changes == self.looks - before
        return self.looks - before


def test_what_was_said_before_begins_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = Manager(monkeypatch)
    assert [manager.beat() for _ in range(3)] == [1, 0, 0]
    trainer = Peer("trainer")
    manager.machine.handle(
        Message(trainer, manager_pb2.TrainerHello(digest_format=DIGEST_FORMAT, lineage="run", world_size=1)), 1.0
    )
    looks = manager.looks
    manager.machine.handle(Message(trainer, manager_pb2.Heartbeat(sequence=1)), 1.0)
    assert manager.looks == looks


@pytest.mark.parametrize(
    "said",
    [
        {"serving": False},
        {"asleep": True},
        {"closed_reason": "a worker is dirty"},
        {"label_problem": "its engine says another version"},
        {"workers": [worker(1)]},
        {"workers": [worker(0, manager_pb2.WORKER_STATE_DIRTY)]},
        {"workers": []},
        {"workers": [worker(), worker()]},
    ],
)
def test_what_is_new_counts_at_once(monkeypatch: pytest.MonkeyPatch, said: dict[str, Any]) -> None:
    manager = Manager(monkeypatch)
    manager.beat()
    assert [manager.beat(**said), manager.beat(**said), manager.beat()] == [1, 0, 1]


def test_an_epoch_that_is_believed_later_counts_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its heartbeat says what it said before, and means that all that goes on is begun again."""
    manager = Manager(monkeypatch)
    far = MOST_SKIPPED + 10
    said = {"workers": [worker(far)]}
    assert [manager.beat(**said), manager.beat(**said)] == [1, 0]
    assert manager.machine.status().warnings
    hello = manager_pb2.ReplicaHello(
        digest_format=DIGEST_FORMAT, name="b", session_id="t", agent_epoch=1, workers=[worker(20)]
    )
    manager.machine.handle(Message(Peer("other"), hello), 1.0)
    assert [manager.beat(**said), manager.beat(**said)] == [1, 0]
    assert not manager.machine.status().warnings
