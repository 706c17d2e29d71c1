"""What an agent says of its replica, and that it answers what is asked again."""

from __future__ import annotations

from typing import Any

import pytest
from test_agent_turns import CLUSTER, WORDS, Agent

from ckpt_engine.core.manifest import DIGEST_FORMAT
from ckpt_engine.machines import events
from ckpt_engine.v1 import manager_pb2, weights_pb2

TORN = events.Words((), False, "worker 0 is being updated", None)


def sent(agent: Agent, kind: type) -> list[Any]:
    """All messages of a kind that it has sent, in order."""
    sends = [command.body for command in agent.commands if isinstance(command, events.Send)]
    return [body for body in sends if isinstance(body, kind)]


def look(agent: Agent, words: events.Words = WORDS) -> None:
    """Its running tasks end well, and those that they bring about; the page says these words."""
    done: set[int] = set()
    for _ in range(20):
        runs = [each for each in agent.commands if isinstance(each, events.Run) and id(each) not in done]
        for run in runs:
            done.add(id(run))
            agent.tell(events.Done(run.key, words if isinstance(run.task, events.ReadWords) else None))


def seal() -> manager_pb2.SealForReaders:
    table, atoms = (manager_pb2.BlobRef(digest=letter * 32) for letter in (b"t", b"a"))
    fence = weights_pb2.Fence(cluster=CLUSTER, epoch=2)
    return manager_pb2.SealForReaders(fence=fence, table=table, atoms=atoms, deadline_seconds=5)


@pytest.mark.parametrize("fails", [False, True])
def test_who_asks_again_for_digests_of_files_gets_the_answer_again(fails: bool) -> None:
    """The first answer may have been lost. Nothing is digested twice, and nothing answered while it is."""
    agent = Agent()
    agent.welcome()
    given = agent.tell(events.Message(agent.peer, seal()))
    (run,) = [command for command in given if isinstance(command, events.Run)]
    agent.tell(events.Message(agent.peer, seal()))
    assert not sent(agent, manager_pb2.Sealed)
    problem = weights_pb2.Problem(code=weights_pb2.Problem.CODE_NOT_FOUND, message="no such file") if fails else None
    digests = events.SealResult(manager_pb2.BlobRef(digest=b"d" * 32), 0.0, 0.0)
    agent.tell(events.Done(run.key, None if fails else digests, problem))
    again = agent.tell(events.Message(agent.peer, seal()))
    assert not [command for command in again if isinstance(command, events.Run)]
    first, second = sent(agent, manager_pb2.Sealed)
    assert first == second
    assert first.problem.message == ("no such file" if fails else "")


def test_a_replica_that_does_not_serve_says_why() -> None:
    agent = Agent()
    agent.welcome()
    assert agent.machine.closed_reason == "the engine has not started"
    agent.engine_ready(paused=False)
    look(agent)
    assert agent.machine.closed_reason == ""
    agent.tell(events.TimerFired(("words",)))
    look(agent, TORN)
    assert agent.machine.closed_reason == "worker 0 is being updated"
    agent.tell(events.EngineExited("it ran out of memory"))
    assert agent.machine.closed_reason == "it ran out of memory"
    beats = sent(agent, manager_pb2.ReplicaHeartbeat)
    reasons = [beat.closed_reason for beat in beats]
    assert [beats[-1].serving, reasons[-1]] == [False, "it ran out of memory"]
    assert [beat.serving for beat in beats] == [reason == "" for reason in reasons]


def test_an_agent_is_heard_as_often_as_its_manager_wants() -> None:
    agent = Agent()
    welcome = manager_pb2.Welcome(
        digest_format=DIGEST_FORMAT, fence=weights_pb2.Fence(cluster=CLUSTER), lease_seconds=9, heartbeat_seconds=0.25
    )
    given = agent.tell(events.Message(agent.peer, welcome))
    for _ in range(3):
        (timer,) = [each for each in given if isinstance(each, events.SetTimer) and each.key == ("session", "beat")]
        assert timer.seconds == 0.25
        given = agent.tell(events.TimerFired(timer.key), 8.0)
        assert [each for each in given if isinstance(each, events.Send)]
    given = agent.tell(events.TimerFired(timer.key), 9.0)
    assert [each for each in given if isinstance(each, events.ClosePeer)], "it has heard nothing for a lease"
