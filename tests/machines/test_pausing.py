"""A pause mode that an engine does not have is turned down before anything is paused."""

from __future__ import annotations

import pytest

from ckpt_engine.core.deadlines import Deadlines
from ckpt_engine.core.manifest import DIGEST_FORMAT
from ckpt_engine.core.pausing import check_pause_mode, mode_name
from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.machines import events
from ckpt_engine.machines.agent.machine import AgentMachine
from ckpt_engine.v1 import manager_pb2, weights_pb2
from tests.machines.test_agent_turns import CLUSTER, IDENTITY, WORDS

ENGINE = manager_pb2.Engine(
    kind="sglang", version="0.5.23", pause_modes=[manager_pb2.PAUSE_MODE_KEEP, manager_pb2.PAUSE_MODE_IN_PLACE]
)


def test_a_mode_that_is_not_declared_is_refused_in_words() -> None:
    with pytest.raises(CkptEngineError) as refused:
        check_pause_mode("one", ENGINE, manager_pb2.PAUSE_MODE_WAIT)
    problem = refused.value.problem
    assert problem.code == weights_pb2.Problem.CODE_INVALID_ARGUMENT
    assert problem.replica == "one"
    assert "sglang 0.5.23, which cannot be paused in mode 'wait'; it can in: keep, in_place" in problem.message


def test_a_mode_that_this_server_lacks_is_refused_with_the_reason() -> None:
    engine = manager_pb2.Engine(
        kind="vllm",
        version="0.32.0",
        pause_modes=[manager_pb2.PAUSE_MODE_KEEP],
        refused_modes={manager_pb2.PAUSE_MODE_IN_PLACE: "its connector finds blocks by tokens alone"},
    )
    with pytest.raises(CkptEngineError, match=r"'in_place' \(its connector finds .* alone\); it can in: keep"):
        check_pause_mode("one", engine, manager_pb2.PAUSE_MODE_IN_PLACE)
    with pytest.raises(CkptEngineError, match="mode 'wait'; it can in: keep"):
        check_pause_mode("one", engine, manager_pb2.PAUSE_MODE_WAIT)


@pytest.mark.parametrize(
    "mode", [manager_pb2.PAUSE_MODE_UNSPECIFIED, manager_pb2.PAUSE_MODE_KEEP, manager_pb2.PAUSE_MODE_IN_PLACE]
)
def test_declared_modes_and_the_default_are_taken(mode: manager_pb2.PauseMode) -> None:
    check_pause_mode("one", ENGINE, mode)


def test_an_engine_whose_agent_said_nothing_is_not_judged() -> None:
    check_pause_mode("one", manager_pb2.Engine(kind="old"), manager_pb2.PAUSE_MODE_WAIT)


def test_a_mode_of_a_newer_version_has_a_name() -> None:
    assert mode_name(99) == "number 99"  # type: ignore[arg-type]


def test_an_agent_whose_engine_changed_meanwhile_turns_the_install_down_and_pauses_nothing() -> None:
    host = weights_pb2.Host(boot_id="host")
    machine = AgentMachine("one", "session", 1, manager_pb2.MODE_STANDALONE, host, ("shared_memory",), Deadlines())
    given: list[events.AgentCommand] = []

    def tell(event: events.AgentEvent) -> None:
        """Also answers every look at the state words."""
        fresh = list(machine.handle(event, 0.0))
        while fresh:
            command = fresh.pop(0)
            given.append(command)
            if isinstance(command, events.Run):
                read = isinstance(command.task, events.ReadWords)
                fresh += machine.handle(events.Done(command.key, WORDS if read else None), 0.0)

    fence = weights_pb2.Fence(cluster=CLUSTER, epoch=2)
    tell(events.Start())
    (peer,) = [command.peer for command in given if isinstance(command, events.OpenStream)]
    welcome = manager_pb2.Welcome(
        digest_format=DIGEST_FORMAT,
        fence=weights_pb2.Fence(cluster=CLUSTER, epoch=1),
        lease_seconds=8,
        heartbeat_seconds=1,
    )
    tell(events.Message(peer, welcome))
    tell(events.EngineReady(ENGINE, 1, False, False))
    install = manager_pb2.Install(
        fence=fence, identity=IDENTITY, pause_mode=manager_pb2.PAUSE_MODE_WAIT, deadline_seconds=30
    )
    install.workers.add(rank=0)
    tell(events.Message(peer, install))
    outcomes = [each.body for each in given if isinstance(each, events.Send)]
    (outcome,) = [each for each in outcomes if isinstance(each, manager_pb2.ReplicaOutcome)]
    assert outcome.outcome == manager_pb2.OUTCOME_OLD_SERVING
    assert "cannot be paused in mode 'wait'" in outcome.problem.message
    assert not [each for each in given if isinstance(each, events.Run) and isinstance(each.task, events.PauseEngine)]
