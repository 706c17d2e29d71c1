"""Single rules of replicas, each in a small story: outcomes, old orders, late replicas."""

from __future__ import annotations

import pytest

from ckpt_engine.machines.agent.machine import AgentMachine
from ckpt_engine.machines.agent.state import AgentReplica as AgentReplica
from ckpt_engine.machines.manager.reconcile import ATTEMPTS_AT_ONCE
from ckpt_engine.v1 import manager_pb2, worker_pb2
from tests.simulation.engine import Engine, Worker
from tests.simulation.invariants import BrokenPromiseError
from tests.simulation.members import AgentShell
from tests.simulation.story import NEW, OLD, QUARANTINED, Problem, Story, outcomes
from tests.simulation.world import Steps

# ------------------------------------------------------------------------------------------------------ replicas


def test_a_replica_that_dies_is_reported_and_holds_up_nobody(story: Story) -> None:
    dead, good = story.replica(), story.replica()
    group = story.ranks()
    assert story.update(group).ok
    group.train()
    results = story.call(group.trainers[0])
    story.wait(0.15)
    assert dead.engine is not None
    dead.engine.kill()
    dead.crash()
    story.wait(8.0)
    assert outcomes(results[0]) == {dead.name: QUARANTINED, good.name: NEW}


def test_an_agent_that_never_installs_is_reported_at_the_deadline(
    story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = AgentMachine._message

    def message(self: AgentMachine, body: object, now: float) -> None:
        if not isinstance(body, manager_pb2.Install):
            original(self, body, now)

    agent, group = story.replica(), story.ranks()
    monkeypatch.setattr(AgentMachine, "_message", message)
    report = story.update(group, 12.0, timeout_seconds=10.0)
    assert outcomes(report) == {agent.name: QUARANTINED}
    assert "no outcome within" in report.replicas[0].problem.message


def test_a_failure_before_the_first_byte_leads_back(story: Story) -> None:
    agent, group = story.replica(), story.ranks()
    before = story.update(group).identity
    group.train()
    story.faults.worker_early = 1.0
    report = story.update(group)
    assert outcomes(report) == {agent.name: OLD}
    assert report.replicas[0].after == before
    assert report.replicas[0].pause_seconds > 0
    assert agent.engine is not None
    assert not agent.engine.paused


def test_a_failure_after_the_first_byte_closes_and_the_next_update_recovers(story: Story) -> None:
    agent, group = story.replica(), story.ranks()
    assert story.update(group).ok
    group.train()
    story.faults.worker_late = 1.0
    report = story.update(group)
    assert outcomes(report) == {agent.name: QUARANTINED}
    assert "in the middle" in report.replicas[0].problem.message
    assert agent.engine is not None
    assert agent.engine.paused
    assert not agent.engine.words().open
    story.faults.worker_late = 0.0
    group.train()
    assert outcomes(story.update(group)) == {agent.name: NEW}


def test_a_trainer_that_trains_on_too_early_spoils_no_replica(story: Story) -> None:
    agent, group = story.replica(), story.ranks()
    assert story.update(group).ok
    group.train()
    results = story.call(group.trainers[0])
    while not any(worker.state == manager_pb2.WORKER_STATE_DIRTY for worker in agent.engine.workers):  # type: ignore[union-attr]
        story.wait(0.001)
    group.train()
    story.wait(5.0)
    assert outcomes(results[0]) == {agent.name: QUARANTINED}
    assert results[0].replicas[0].problem.code == Problem.CODE_DATA_LOSS


def hold_back_first_bytes(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Workers are stopped for so long between looking at the clock and writing their first byte."""
    original = Engine._read

    def read(self: Engine, worker: Worker, order: worker_pb2.InstallOrder, end: float) -> Steps:
        yield seconds
        yield from original(self, worker, order, self.world.now + 1.0)

    monkeypatch.setattr(Engine, "_read", read)


def workers_wake_up_after_their_deadline(story: Story, monkeypatch: pytest.MonkeyPatch) -> AgentShell:
    """An update whose workers write their first byte long after the update has ended."""
    agent, group = story.replica(), story.ranks()
    assert agent.engine is not None
    agent.engine.in_order = False
    assert story.update(group).ok
    group.train()
    hold_back_first_bytes(monkeypatch, 20.0)
    results = story.call(group.trainers[0], timeout_seconds=8.0)
    story.wait(30.0)
    assert agent.outcome() == results[0].replicas[0].outcome
    return agent


def test_an_order_may_be_acted_on_at_any_time(story: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = workers_wake_up_after_their_deadline(story, monkeypatch)
    assert agent.outcome() == QUARANTINED
    assert agent.machine.replica.serving()  # they finished, verified, and so the replica recovered by itself


def test_an_agent_that_forgets_orders_computes_with_half_a_version(
    story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AgentReplica, "orders", property(lambda self: {}, lambda self, value: None), raising=False)
    with pytest.raises(BrokenPromiseError, match="half a version"):
        workers_wake_up_after_their_deadline(story, monkeypatch)


def orders_outlive_their_agent(story: Story, monkeypatch: pytest.MonkeyPatch) -> AgentShell:
    """An agent is killed while a worker has its order and has not begun to write; returns the new agent, which comes
    when the update is over, so that nobody asks it to install."""
    agent, group = story.replica(), story.ranks()
    assert agent.engine is not None
    agent.engine.in_order = False
    assert story.update(group).ok
    group.train()
    hold_back_first_bytes(monkeypatch, 6.0)
    story.call(group.trainers[0], timeout_seconds=3.0)
    while not agent.machine.replica.orders:
        story.wait(0.01)
    story.restart_agent(agent, 3.0)
    story.wait(12.0)
    return story.agents[agent.name]


def test_a_new_agent_waits_for_orders_of_the_one_before(story: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = orders_outlive_their_agent(story, monkeypatch)
    assert agent.machine.replica.serving()


def test_a_new_agent_that_does_not_wait_computes_with_half_a_version(
    story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AgentReplica, "accounted", property(lambda self: True, lambda self, value: None), raising=False)
    with pytest.raises(BrokenPromiseError, match="half a version"):
        orders_outlive_their_agent(story, monkeypatch)


# ------------------------------------------------------------------------------------------------- late replicas


def test_a_late_replica_takes_a_snapshot(story: Story) -> None:
    story.replica()
    group = story.ranks(world_size=2, kind="snapshot")
    identity = story.update(group).identity
    group.train()  # the snapshot stays as it is
    late = story.replica()
    story.wait(3.0)
    assert late.engine is not None
    assert late.engine.words().identity == identity
    assert not late.engine.paused


def test_a_late_replica_takes_files_whose_process_is_gone(story: Story) -> None:
    story.replica()
    group = story.ranks(kind="directory")
    identity = story.update(group).identity
    story.end_group(group, in_good_order=True)
    story.wait(2.0)
    late = story.replica()
    story.wait(3.0)
    assert late.engine is not None
    assert late.engine.words().identity == identity


def test_a_late_replica_takes_nothing_that_may_have_changed(story: Story) -> None:
    story.replica()
    group = story.ranks(kind="live")
    assert story.update(group).ok
    late = story.replica()
    story.wait(5.0)
    assert late.engine is not None
    assert not late.engine.words().open
    group.train()
    assert story.update(group).ok


def test_a_late_replica_is_brought_up_after_the_manager_was_restarted(story: Story) -> None:
    story.replica()
    group = story.ranks(kind="snapshot")
    identity = story.update(group).identity
    assert story.cluster.manager is not None
    story.cluster.manager.crash()
    story.start_manager()
    story.wait(6.0)
    late = story.replica()
    story.wait(3.0)
    assert late.engine is not None
    assert late.engine.words().identity == identity


@pytest.mark.parametrize("held", [False, True])
def test_late_replicas_are_brought_up_a_few_at_a_time(story: Story, held: bool) -> None:
    """held: by a holder; else by ranks, which digest for one attempt at a time."""
    agents = [story.replica() for _ in range(6)]
    group = story.ranks(world_size=2, kind="live" if held else "snapshot")
    holder = story.join_holder()
    identity = story.update(group).identity
    if held:
        story.wait(0.5)
        holder.hold(identity)
    for agent in agents:
        assert agent.engine is not None
        agent.engine.kill()
        agent.engine_died()
        story.start_engine(agent)
    side_by_side = [0]

    def all_are_there() -> bool:
        assert story.cluster.manager is not None
        side_by_side.append(len(story.cluster.manager.machine._updates.attempts()))
        return all(agent.engine is not None and story.held_by(agent) == identity for agent in agents)

    story.until(all_are_there, 60.0)
    assert 1 < max(side_by_side) <= ATTEMPTS_AT_ONCE


def another_engine(story: Story, agent: AgentShell) -> None:
    """Its engine ends, and another one comes up that holds nothing."""
    assert agent.engine is not None
    agent.engine.kill()
    agent.engine_died()
    story.start_engine(agent)
    story.wait(2.1)


def lineage_of(agent: AgentShell) -> str:
    assert agent.engine is not None
    identity = agent.engine.words().identity
    return "nothing" if identity is None else identity.lineage


@pytest.mark.parametrize("restarted", [False, True])
def test_late_replicas_of_two_runs_each_get_their_own(story: Story, restarted: bool) -> None:
    first, second, neither = story.replica(), story.replica(), story.replica()
    runs = {first: story.ranks("one", kind="snapshot"), second: story.ranks("two", kind="snapshot")}
    for agent, group in runs.items():
        assert outcomes(story.update(group, replicas=[agent.name])) == {agent.name: NEW}
    if restarted:
        story.restart_manager()
    for agent in runs:
        another_engine(story, agent)
    story.wait(6.0)
    assert {agent: lineage_of(agent) for agent in runs} == {first: "one", second: "two"}
    assert lineage_of(neither) == "nothing"


@pytest.mark.parametrize("restarted", [False, True])
def test_a_replica_belongs_to_the_run_whose_update_was_for_it_last(story: Story, restarted: bool) -> None:
    taken, kept = story.replica(), story.replica()
    one, two = story.ranks("one", kind="snapshot"), story.ranks("two", kind="snapshot", model="model B")
    assert story.update(one).ok
    assert story.update(two, replicas=[taken.name]).ok
    another_engine(story, kept)  # a late replica of the first run changes nothing for the other one
    story.wait(4.0)
    if restarted:
        story.restart_manager()
    another_engine(story, taken)
    another_engine(story, kept)
    late = story.replica()
    story.wait(8.0)
    assert [lineage_of(agent) for agent in (taken, kept, late)] == ["two", "one", "one"]
    one.train()
    assert story.update(one).ok
    another_engine(story, taken)
    story.wait(4.0)
    assert lineage_of(taken) == "one"


def test_a_replica_that_its_run_left_out_waits_for_the_next_update(story: Story) -> None:
    left, chosen = story.replica(), story.replica()
    run, before = story.ranks("one", kind="snapshot"), story.ranks("zero", kind="snapshot", model="model B")
    assert story.update(before).ok
    assert story.update(run).ok
    run.train()
    version = story.update(run, replicas=[chosen.name]).identity.version
    another_engine(story, left)
    story.wait(5.0)
    assert lineage_of(left) == "nothing"
    assert outcomes(story.update(run, version=version, replicas=[left.name])) == {left.name: NEW}
    another_engine(story, chosen)  # the very version was for it before
    story.wait(5.0)
    assert lineage_of(chosen) == "one"


def test_an_update_cuts_bringing_up_short(story: Story) -> None:
    story.replica()
    group = story.ranks(kind="snapshot")
    assert story.update(group).ok
    group.train()
    story.join_replica(manager_pb2.MODE_STANDALONE)
    for _ in range(4000):
        story.wait(0.001)
        assert story.cluster.manager is not None
        if story.cluster.manager.machine.status().phase.startswith("bringing up"):
            break
    else:
        pytest.fail("the late replica was never brought up")
    report = story.update(group)
    assert report.ok
    assert len(report.replicas) == 2
    assert report.identity.version == 1
