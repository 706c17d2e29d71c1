"""Single rules of sleeping replicas, each in a small story: modes, levels, order, and what happens when it breaks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ckpt_engine.core.problems import internal
from ckpt_engine.core.sleeping import TAGS
from ckpt_engine.machines import events
from ckpt_engine.machines.agent.sleep import SleepingOrWaking
from ckpt_engine.v1 import manager_pb2
from tests.simulation.engine import CLEAN, NONE, Engine
from tests.simulation.members import AgentShell
from tests.simulation.story import NEW, OLD, QUARANTINED, Problem, Story, outcomes
from tests.simulation.world import BrokenPromiseError, Steps

HYBRID, COLOCATED = manager_pb2.MODE_HYBRID, manager_pb2.MODE_COLOCATED


@pytest.fixture
def story() -> Story:
    return Story()


def sleep(story: Story, agent: AgentShell, level: int = 1) -> Any:
    return ask(story, agent, False, level)


def wake(story: Story, agent: AgentShell, *tags: str) -> Any:
    return ask(story, agent, True, 0, tags)


def ask(story: Story, agent: AgentShell, waking: bool, level: int, tags: tuple[str, ...] = ()) -> Any:
    """The problem of the one replica's answer; None if it was done."""
    assert story.cluster.manager is not None
    over = story.cluster.manager.sleep_or_wake(waking, [agent.name], level, tags)
    story.wait(5.0)
    assert not isinstance(over.value, Problem), over.value
    (result,) = over.value.results
    return result.problem if result.HasField("problem") else None


def engine_of(agent: AgentShell) -> Engine:
    assert agent.engine is not None
    return agent.engine


def test_a_call_that_ends_as_it_begins_is_in_nobodys_way(story: Story) -> None:
    """No replica is there that could answer."""
    agent = story.replica()
    agent.crash()
    story.wait(story.deadlines.lease + 1.0)
    assert story.cluster.manager is not None
    for waking in (False, True):
        over = story.cluster.manager.sleep_or_wake(waking, [agent.name])
        story.until(lambda over=over: over.ready)  # type: ignore[misc]
        (result,) = over.value.results
        assert result.problem.message == "it is not connected"


def refuse(monkeypatch: pytest.MonkeyPatch, wanted: Callable[[Any], bool], times: int = 1) -> list[object]:
    """The engine does not do the tasks that are wanted, so many times; the list grows with each of them."""
    original = Engine.call
    refusals: list[object] = []

    def call(self: Engine, task: Any) -> Steps:
        if wanted(task) and len(refusals) < times:
            refusals.append(task)
            yield 0.01
            raise internal("the test says no")
        yield from original(self, task)

    monkeypatch.setattr(Engine, "call", call)
    return refusals


def wakes(tag: str) -> Callable[[Any], bool]:
    return lambda task: isinstance(task, events.WakeEngine) and task.tags == (tag,)


@pytest.mark.parametrize("level", [1, 2])
def test_an_update_wakes_a_hybrid_replica(story: Story, level: int) -> None:
    agent, group = story.replica(HYBRID), story.ranks()
    assert story.update(group).ok
    assert sleep(story, agent, level) is None
    engine = engine_of(agent)
    assert engine.asleep == set(TAGS)
    assert not engine.gate_open
    assert [worker.state for worker in engine.workers] == [NONE if level == 2 else CLEAN] * len(engine.workers)
    group.train()
    report = story.update(group)
    assert outcomes(report) == {agent.name: NEW}
    assert not engine.asleep
    assert not engine.paused
    assert engine.gate_open


def test_an_update_leaves_a_standalone_replica_asleep_and_says_so(story: Story) -> None:
    agent, group = story.replica(), story.ranks()
    before = story.update(group).identity
    group.train()
    assert sleep(story, agent) is None
    report = story.update(group)
    assert outcomes(report) == {agent.name: QUARANTINED}
    assert "asleep" in report.replicas[0].problem.message
    assert report.replicas[0].after == before
    assert wake(story, agent) is None
    assert engine_of(agent).gate_open
    assert story.update(group).ok


def test_discarded_weights_come_back_by_the_version_that_is_still_sealed(story: Story) -> None:
    agent, group = story.replica(), story.ranks(kind="snapshot")
    identity = story.update(group).identity
    assert sleep(story, agent, 2) is None
    story.wait(10.0)
    assert engine_of(agent).asleep == set(TAGS), "nobody wakes it for an update that was not called"
    assert wake(story, agent) is None
    story.wait(5.0)
    assert engine_of(agent).gate_open
    assert engine_of(agent).words().identity == identity


def test_calls_that_follow_each_other_at_once_wait_for_their_epochs(story: Story) -> None:
    """The ledger makes one epoch ahead durable; the second call finds none, and is not turned away for that."""
    agent, manager = story.replica(HYBRID), story.cluster.manager
    assert manager is not None
    for _ in range(5):
        slept = manager.sleep_or_wake(False, [agent.name])
        while not slept.ready:
            story.wait(0.001)
        woken = manager.sleep_or_wake(True, [agent.name])
        while not woken.ready:
            story.wait(0.001)
        assert isinstance(slept.value, manager_pb2.SleepResponse)
        assert isinstance(woken.value, manager_pb2.WakeResponse)


def test_waking_in_the_wrong_order_is_refused(story: Story) -> None:
    agent, group = story.replica(HYBRID), story.ranks()
    assert story.update(group).ok
    assert sleep(story, agent) is None
    problem = wake(story, agent, "kv_cache")
    assert problem.code == Problem.CODE_FAILED_PRECONDITION
    assert "weights are woken before" in problem.message
    assert wake(story, agent, "weights") is None
    assert not engine_of(agent).gate_open
    assert wake(story, agent, "kv_cache") is None
    assert engine_of(agent).gate_open


def test_torn_weights_do_not_compute_because_somebody_wakes_them(story: Story) -> None:
    """Found by seed 90004: an engine that resumes by being woken did, in the middle of a version."""
    agent, group = story.replica(HYBRID), story.ranks()
    assert story.update(group).ok
    engine_of(agent).in_order = True
    story.faults.worker_late = 1.0
    group.train()
    assert outcomes(story.update(group)) == {agent.name: QUARANTINED}
    story.faults.worker_late = 0.0
    assert sleep(story, agent) is None
    assert wake(story, agent) is None
    assert engine_of(agent).asleep == {"kv_cache"}
    assert sleep(story, agent) is None
    assert wake(story, agent) is None
    assert outcomes(story.update(group)) == {agent.name: NEW}
    assert engine_of(agent).gate_open


def test_a_colocated_replica_serves_its_own_weights_and_no_update_touches_it(story: Story) -> None:
    judge, agent, group = story.replica(COLOCATED), story.replica(), story.ranks()
    assert engine_of(judge).gate_open
    assert not engine_of(agent).gate_open
    assert outcomes(story.update(group)) == {agent.name: NEW}
    assert sleep(story, judge) is None
    assert not engine_of(judge).gate_open
    assert sleep(story, judge, 2).code == Problem.CODE_INVALID_ARGUMENT
    assert wake(story, judge) is None
    assert engine_of(judge).gate_open
    assert [worker.state for worker in engine_of(judge).workers] == [NONE] * len(engine_of(judge).workers)


def test_weights_that_cannot_be_woken_leave_it_asleep_with_a_reason(
    story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent, group = story.replica(HYBRID), story.ranks()
    assert story.update(group).ok
    assert sleep(story, agent) is None
    refused = refuse(monkeypatch, wakes("weights"))
    group.train()
    report = story.update(group)
    assert refused
    assert outcomes(report) == {agent.name: QUARANTINED}
    assert "the test says no" in report.replicas[0].problem.message
    assert engine_of(agent).asleep == set(TAGS)
    assert not engine_of(agent).gate_open
    assert story.update(group).ok


def test_an_install_that_fails_leaves_the_old_version_awake(story: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    agent, group = story.replica(HYBRID), story.ranks()
    before = story.update(group).identity
    assert sleep(story, agent) is None
    refused = refuse(monkeypatch, lambda task: isinstance(task, events.PauseEngine))
    group.train()
    report = story.update(group)
    assert refused
    assert outcomes(report) == {agent.name: OLD}
    assert engine_of(agent).words().identity == before
    assert engine_of(agent).gate_open


def test_caches_that_are_not_woken_are_asked_for_again(story: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within the update, and if that was not enough, after it."""
    agent, group = story.replica(HYBRID), story.ranks()
    assert story.update(group).ok
    assert sleep(story, agent, 2) is None
    refused = refuse(monkeypatch, wakes("kv_cache"), times=40)
    group.train()
    report = story.update(group, seconds=8.0, timeout_seconds=5.0)
    assert outcomes(report) == {agent.name: QUARANTINED}
    assert "does not wake its caches" in report.replicas[0].problem.message
    story.wait(40.0)
    assert len(refused) == 40
    assert engine_of(agent).gate_open
    assert agent.machine.replica.serving()


def test_an_agent_goes_on_with_what_the_one_before_it_began(story: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mark outlives agents: asleep stays asleep, and a half woken engine with whole weights is woken."""
    agent, group = story.replica(HYBRID), story.ranks()
    assert story.update(group).ok
    assert sleep(story, agent, 2) is None
    agent = restarted(story, agent)
    assert engine_of(agent).asleep == set(TAGS)
    assert agent.machine.replica.asleep
    refuse(monkeypatch, wakes("kv_cache"), times=1000)
    group.train()
    report = story.update(group, seconds=8.0, timeout_seconds=5.0)
    assert outcomes(report) == {agent.name: QUARANTINED}
    monkeypatch.undo()
    agent = restarted(story, agent)
    story.wait(10.0)
    assert engine_of(agent).gate_open
    assert agent.machine.replica.serving()


def restarted(story: Story, agent: AgentShell) -> AgentShell:
    story.restart_agent(agent, 0.5)
    story.wait(6.0)
    new = story.agents[agent.name]
    assert new is not agent
    return new


def test_the_simulator_notices_memory_that_goes_before_the_gate_closes(
    story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rule is broken on purpose: no mark, and workers that do not say by themselves that they hold nothing."""
    agent, group = story.replica(HYBRID), story.ranks()
    assert story.update(group).ok
    monkeypatch.setattr(SleepingOrWaking, "_next", lambda self, now: self.run("SLEEP", events.SleepEngine(2, 1.0)))
    monkeypatch.setattr(Engine, "_discard", lambda self: None)
    with pytest.raises(BrokenPromiseError):
        sleep(story, agent, 2)


def test_memory_does_not_go_while_a_worker_calls_its_weights_clean(
    story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent, group = story.replica(HYBRID), story.ranks()
    assert story.update(group).ok
    monkeypatch.setattr(Engine, "_discard", lambda self: None)
    problem = sleep(story, agent, 2)
    assert "still call their weights clean" in problem.message
    assert not engine_of(agent).asleep
    assert engine_of(agent).gate_open
    assert agent.machine.replica.serving()
    monkeypatch.undo()
    group.train()
    assert outcomes(story.update(group)) == {agent.name: NEW}


def test_an_install_that_cannot_mark_what_it_woke_goes_back_and_ends(
    story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its weights are awake already; the caches follow, and the old version serves."""
    agent, group = story.replica(HYBRID), story.ranks()
    before = story.update(group).identity
    assert sleep(story, agent) is None
    original, failed = AgentShell._mark, []

    def mark(self: AgentShell, task: events.MarkEngine) -> Steps:
        if task.sleeping.rousing and not failed:
            failed.append(task)
            raise internal("the test says no")
        yield from original(self, task)

    monkeypatch.setattr(AgentShell, "_mark", mark)
    group.train()
    report = story.update(group)
    assert failed
    assert outcomes(report) == {agent.name: OLD}
    assert "the test says no" in report.replicas[0].problem.message
    assert engine_of(agent).words().identity == before
    assert engine_of(agent).gate_open
    group.train()
    assert outcomes(story.update(group)) == {agent.name: NEW}


def test_a_replica_of_which_nobody_knows_what_its_page_says_counts_as_closed(
    story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the mark nor taking it back could be written, as far as the agent knows. Waking it writes it anew."""
    agent, group = story.replica(HYBRID), story.ranks()
    assert story.update(group).ok

    def mark(self: AgentShell, task: events.MarkEngine) -> Steps:
        yield 0.01
        raise internal("the test says no")

    monkeypatch.setattr(AgentShell, "_mark", mark)
    assert "the test says no" in sleep(story, agent).message
    assert not engine_of(agent).asleep
    assert not agent.machine.replica.serving()
    monkeypatch.undo()
    assert wake(story, agent) is None
    assert agent.machine.replica.serving()
    assert engine_of(agent).gate_open


def test_a_replica_is_known_to_sleep_as_soon_as_it_says_so(story: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not from its next heartbeat on: an attempt to bring it up may wait for the end of that call."""
    agent, group = story.replica(mode=HYBRID), story.ranks()
    group.train()
    assert story.update(group).ok
    manager = story.cluster.manager
    assert manager is not None
    feed = manager.feed
    known: list[bool] = []

    def heard(event: Any) -> None:
        body = event.body if isinstance(event, events.Message) else None
        if isinstance(body, manager_pb2.ReplicaHeartbeat) and body.asleep:
            return  # the network is slow
        feed(event)
        if isinstance(body, manager_pb2.SleepWakeDone):
            known.append(manager.machine._members.replicas[agent.name].asleep)

    monkeypatch.setattr(manager, "feed", heard)
    assert sleep(story, agent) is None
    assert known[0]
