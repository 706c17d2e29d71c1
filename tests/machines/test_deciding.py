"""A machine that raises, which is a defect: nothing of that event is left for the next one."""

from __future__ import annotations

from typing import Any

import pytest

from ckpt_engine.core.manifest import DIGEST_FORMAT
from ckpt_engine.machines.agent.machine import AgentMachine
from ckpt_engine.machines.events import Message, Peer, Send, SetTimer, Start, Stop, TimerFired
from ckpt_engine.machines.manager.machine import ManagerMachine
from ckpt_engine.machines.manager.publications import Publications
from ckpt_engine.machines.manager.reconcile import CatchUpRetry
from ckpt_engine.machines.session import Session
from ckpt_engine.machines.trainer.machine import TrainerMachine
from ckpt_engine.v1 import manager_pb2, weights_pb2

LEFT = SetTimer(("left",), 1.0)
HOST = weights_pb2.Host(name="here")


@pytest.mark.parametrize(
    "machine",
    [
        AgentMachine("replica", "session", 1, manager_pb2.MODE_STANDALONE, HOST, ()),
        TrainerMachine("run", 0, 1, "session", HOST),
    ],
    ids=["agent", "trainer"],
)
def test_a_member_keeps_nothing_of_an_event_that_raised(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(self: Session, now: float) -> None:
        self._emit(LEFT)
        raise ZeroDivisionError

    monkeypatch.setattr(Session, "start", start)
    with pytest.raises(ZeroDivisionError):
        machine.handle(Start(), 0.0)
    assert LEFT not in machine.handle(Stop("over"), 1.0)


def test_a_manager_keeps_nothing_of_an_event_that_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = ManagerMachine("cluster", 0)

    def offered(self: Publications, trainer: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(Publications, "offered", offered)
    hello = manager_pb2.TrainerHello(digest_format=DIGEST_FORMAT, lineage="run", world_size=1, session_id="session")
    with pytest.raises(ZeroDivisionError):
        machine.handle(Message(Peer("stream"), hello), 0.0)
    commands = machine.handle(TimerFired(CatchUpRetry()), 1.0)
    assert not [command for command in commands if isinstance(command, Send)]
