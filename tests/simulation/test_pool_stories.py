"""Updates of two pools that go on side by side: who waits for whom, and who does not, each in a small story."""

from __future__ import annotations

from typing import Any

import pytest

from ckpt_engine.machines.events import RecordIntent
from ckpt_engine.v1 import manager_pb2
from tests.simulation.manager import ManagerShell
from tests.simulation.members import AgentShell
from tests.simulation.story import NEW, Problem, Story, outcomes, refused
from tests.simulation.training import Group
from tests.simulation.world import Steps

HELD = manager_pb2.UNTIL_HELD


def manager_of(story: Story) -> ManagerShell:
    assert story.cluster.manager is not None
    return story.cluster.manager


@pytest.fixture
def story() -> Story:
    """Who is stopped for some seconds keeps its session, and the ledger may take as long."""
    return Story(lease=30.0, ledger=8.0)


@pytest.fixture
def two(story: Story) -> tuple[AgentShell, AgentShell, Group, Group]:
    """A replica of each of two pools, and a run for each."""
    actor, judge = story.replica(pool="actor"), story.replica(pool="judge")
    return actor, judge, story.ranks("actor's run"), story.ranks("judge's run")


Two = tuple[AgentShell, AgentShell, Group, Group]


def in_its_install(story: Story, agent: AgentShell, group: Group, **wishes: object) -> list[object]:
    """A call whose replica has stopped in the middle of its install."""
    result = story.call(group.trainers[0], **wishes)
    story.until(lambda: getattr(agent.machine.replica.operation, "kind", "") == "install")
    agent.stop_for(6.0)
    return result


def test_a_whole_update_of_one_pool_fits_into_an_install_of_another(story: Story, two: Two) -> None:
    actor, judge, first, second = two
    slow = in_its_install(story, actor, first, pool="actor")
    for _ in range(3):
        report = story.trained(second, seconds=1.0, pool="judge")
        assert outcomes(report) == {judge.name: NEW}
        assert "in pool 'actor'): installing" in story.phase
    assert not slow
    story.wait(8.0)
    assert outcomes(slow[0]) == {actor.name: NEW}
    assert story.held_by(judge) == report.identity


def test_both_are_in_the_status_and_either_is_waited_for(story: Story, two: Two) -> None:
    actor, judge, first, second = two
    results = [in_its_install(story, actor, first, pool="actor"), in_its_install(story, judge, second, pool="judge")]
    assert story.phase.count(": installing") == 2
    waits = [manager_of(story).wait_for(0, lineage) for lineage in ("actor's run", "judge's run")]
    story.wait(8.0)
    assert [wait.value.identity for wait in waits] == [result[0].identity for result in results]
    assert story.phase == "idle"


@pytest.mark.parametrize("in_time", [True, False], ids=["late", "too late"])
def test_the_seal_of_a_commit_on_its_way_outlives_another_pools_commit(
    story: Story, two: Two, in_time: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is on the disk, and the ledger's answer has not come, when that of the other pool is written."""
    _, _, first, second = two
    manager, limit = manager_of(story), story.deadlines.ledger
    carry_out, versions = manager._task, manager.machine._state.versions

    def slow(task: Any, record: dict[str, str] | None = None) -> Steps:
        result = yield from carry_out(task, record)
        if isinstance(task, RecordIntent) and task.identity.lineage == "actor's run":
            yield limit - 1.0 if in_time else limit + 5.0
        return result

    monkeypatch.setattr(manager, "_task", slow)
    others: list[Any] = []
    if in_time:  # no call begins while an intent has no answer
        others = story.call(second.trainers[0], pool="judge")
        story.until(lambda: "sealing" in story.phase)
        second.trainers[0].stop_for(1.0)
    ours = story.call(first.trainers[0], pool="actor")
    story.until(lambda: story.ledger.intents)
    (identity,) = story.ledger.intents.values()
    if not in_time:
        story.until(lambda: versions.doubtful)
        others = story.call(second.trainers[0], pool="judge")
    story.until(lambda: len(story.ledger.intents) == 2)
    (other,) = {*story.ledger.intents.values()} - {identity}
    assert identity not in versions.contents, "its answer has not come"
    assert {*story.ledger.seals} == {identity, other}
    story.wait(limit + 5.0)
    assert [getattr(result, "ok", False) for (result,) in (ours, others)] == [in_time, True]
    assert versions.last[identity.lineage].identity == identity, "what was written counts"
    assert not versions.pending
    assert story.trained(second, pool="judge").ok
    assert {each.lineage for each in story.ledger.seals} == {identity.lineage, other.lineage}


def test_within_a_pool_updates_take_turns_whatever_another_pool_does(story: Story, two: Two) -> None:
    actor, _, first, second = two
    third = story.ranks("another run")
    slow = in_its_install(story, actor, first, pool="actor")
    waits, passes = story.call(third.trainers[0], pool="actor"), story.call(second.trainers[0], pool="judge")
    story.wait(2.0)
    assert passes[0].ok
    assert not waits
    assert len(story.ledger.intents) == 2
    story.wait(8.0)
    assert slow[0].ok
    assert waits[0].ok
    assert story.held_by(actor) == waits[0].identity


def test_a_run_that_updates_two_pools_does_one_after_the_other(story: Story, two: Two) -> None:
    actor, judge, group, _ = two
    in_its_install(story, actor, group, pool="actor")
    again = story.call(group.trainers[0], pool="judge")
    story.wait(0.5)
    refused(again[0], Problem.CODE_ABORTED, "another update runs", "in pool 'actor'")
    story.wait(8.0)
    assert story.update(group, version=0, pool="judge").ok
    assert story.held_by(judge) == story.held_by(actor)


def test_a_pool_that_nobody_updates_stays_as_it_is(story: Story, two: Two) -> None:
    """One that is kept for evaluation: the run goes on in the other one, and takes it along when that is wanted."""
    actor, frozen, group, _ = two
    kept = story.update(group, pool="judge").identity
    for _ in range(3):
        assert outcomes(story.trained(group, seconds=2.0, pool="actor")) == {actor.name: NEW}
    assert story.held_by(frozen) == kept
    assert frozen.machine.replica.last_outcome is not None
    assert frozen.machine.replica.last_outcome.fence.epoch == min(story.ledger.intents)
    taken = story.update(group, version=3, pool="judge")
    assert story.held_by(frozen) == story.held_by(actor) == taken.identity


def test_a_late_replica_of_one_pool_is_brought_up_while_another_pool_is_updated(story: Story, two: Two) -> None:
    actor, _, first, _ = two
    sealed = story.ranks("snapshots", kind="snapshot")
    identity = story.update(sealed, pool="judge").identity
    slow = in_its_install(story, actor, first, pool="actor", timeout_seconds=15.0)
    late = story.replica(pool="judge")
    story.until(lambda: story.held_by(late) == identity, 2.5)
    assert not slow


def test_sleep_is_for_a_pool_that_is_not_updated(story: Story, two: Two) -> None:
    actor, judge, first, second = two
    in_its_install(story, actor, first, pool="actor")
    busy = manager_of(story).sleep_or_wake(False, [], pool="actor")
    slept = manager_of(story).sleep_or_wake(False, [], pool="judge")
    story.wait(1.0)
    refused(busy.value, Problem.CODE_ABORTED, "in pool 'actor'")
    assert [result.replica for result in slept.value.results] == [judge.name]
    assert judge.machine.replica.asleep
    story.wait(6.0)
    woken = manager_of(story).sleep_or_wake(True, [], pool="judge")
    waits = story.call(second.trainers[0], pool="judge")
    story.wait(3.0)
    assert isinstance(woken.value, manager_pb2.WakeResponse)
    assert waits[0].ok


def test_a_rollback_of_one_pool_does_not_wait_for_another(story: Story, two: Two) -> None:
    actor, judge, first, second = two
    old = story.update(second, pool="judge").identity
    keeper = story.join_holder()
    story.wait(1.0)
    keeper.hold(old)
    assert story.trained(second, pool="judge").ok
    slow = in_its_install(story, actor, first, pool="actor")
    assert outcomes(story.roll_back(0, "judge's run", 2.0, pool="judge")) == {judge.name: NEW}
    assert story.held_by(judge) == old
    assert not slow


def test_a_replica_that_loses_its_session_installs_what_it_was_told_before_others_were(story: Story, two: Two) -> None:
    """Its manager welcomes it under no fence above the one that is on its way to it."""
    actor, _, first, second = two
    story.faults.cuts |= {(actor.name, False)}  # it hears nothing from here on
    result = story.call(first.trainers[0], pool="actor")
    story.wait(0.2)
    story.faults.cuts.clear()
    actor.break_streams()
    story.until(lambda: "preparing" not in story.phase)
    story.faults.cuts |= {(actor.name, False)}
    story.until(lambda: "installing" in story.phase)
    assert story.update(second, seconds=1.0, pool="judge").ok
    story.faults.cuts.clear()
    actor.break_streams()
    story.wait(4.0)
    assert outcomes(result[0]) == {actor.name: NEW}


def test_a_replica_that_has_changed_its_pool_is_in_one_update_at_a_time(story: Story, two: Two) -> None:
    actor, judge, first, second = two
    other = story.replica(pool="actor")
    slow = in_its_install(story, other, first, pool="actor")
    story.restart_agent(actor, 0.1, pool="judge")
    story.wait(2.0)
    waits = story.call(second.trainers[0], pool="judge")
    story.wait(1.0)
    assert waits == slow == []
    assert len(story.ledger.intents) == 1
    story.wait(8.0)
    assert outcomes(slow[0])[other.name] == NEW
    assert outcomes(waits[0]) == {actor.name: NEW, judge.name: NEW}


def test_a_manager_that_is_killed_in_two_updates_leaves_both_to_be_mended(story: Story) -> None:
    actor, judge = story.replica(pool="actor"), story.replica(pool="judge")
    first, second = (story.ranks(name, kind="snapshot") for name in ("actor's run", "judge's run"))
    in_its_install(story, actor, first, pool="actor")
    in_its_install(story, judge, second, pool="judge")
    assert len(story.ledger.intents) == 2
    story.restart_manager()
    story.wait(6.0)
    assert [story.held_by(actor), story.held_by(judge)] == [
        story.ledger.intents[epoch].message() for epoch in sorted(story.ledger.intents)[:2]
    ]
    for lineage in ("actor's run", "judge's run"):
        told = manager_of(story).wait_for(0, lineage)
        story.wait(0.5)
        refused(told.value, Problem.CODE_ABORTED, "the manager ended during update", lineage)


# -- relays that both want


def test_pools_with_a_relay_in_common_fill_it_one_after_the_other(story: Story, two: Two) -> None:
    """The slot that replicas of one pool read is not filled for the other one."""
    relay = story.relay()
    actor, _, first, second = two
    story.replica(pool="actor")
    story.replica(pool="judge")
    slow = in_its_install(story, actor, first, pool="actor", prefetch=manager_pb2.PREFETCH_ALWAYS)
    waits = story.call(second.trainers[0], pool="judge", prefetch=manager_pb2.PREFETCH_ALWAYS)
    story.until(lambda: "waiting for relays that an update of another pool uses" in story.phase)
    third = story.ranks("without relays")
    story.wait(0.5)
    assert not slow
    assert not waits
    assert len(story.ledger.intents) == 1
    story.wait(10.0)
    assert slow[0].ok
    assert waits[0].ok
    assert [report.relay for report in waits[0].relays] == [f"relay {relay.name}"]
    assert story.update(third, pool="judge", prefetch=manager_pb2.PREFETCH_NEVER).ok


def test_an_update_that_waited_for_a_relay_tells_it_a_fence_that_it_obeys(story: Story, two: Two) -> None:
    """The one that it waited for began later, and was sealed sooner."""
    story.relay()
    actor, judge, first, second = two
    story.replica(pool="actor")
    story.replica(pool="judge")
    trainer = first.trainers[0]
    early = story.call(trainer, pool="actor", prefetch=manager_pb2.PREFETCH_ALWAYS)
    story.until(lambda: "sealing" in story.phase)
    trainer.stop_for(1.5)
    late = story.call(second.trainers[0], pool="judge", prefetch=manager_pb2.PREFETCH_ALWAYS)
    story.wait(6.0)
    assert outcomes(late[0])[judge.name] == outcomes(early[0])[actor.name] == NEW
    for result in (early, late):
        assert [bool(each.replicas) and not each.filled.HasField("problem") for each in result[0].relays] == [True]


def test_a_rank_that_dies_while_its_update_waits_for_a_relay_refuses_it(story: Story, two: Two) -> None:
    story.relay()
    actor, _, first, second = two
    story.replica(pool="actor")
    story.replica(pool="judge")
    slow = in_its_install(story, actor, first, pool="actor", prefetch=manager_pb2.PREFETCH_ALWAYS)
    waits = story.call(second.trainers[0], pool="judge", prefetch=manager_pb2.PREFETCH_ALWAYS)
    story.until(lambda: "waiting for relays" in story.phase)
    second.trainers[0].leave()
    story.wait(1.0)
    assert not slow
    assert len(story.ledger.intents) == 1
    assert "judge" not in story.phase
    assert waits == [] or isinstance(waits[0], Problem)


def test_a_run_goes_on_with_another_pool_while_relays_serve_the_one_before(story: Story, two: Two) -> None:
    """The slot that the first pool reads stays, and the second pool's intent waits for the first one's installs."""
    story.relay()
    actor, judge, group, _ = two
    held = in_its_install(story, actor, group, pool="actor", until=HELD)
    assert held[0].held
    group.train()
    second = story.call(group.trainers[0], pool="judge", until=HELD)
    story.until(lambda: "waiting for the installs of the update before it" in story.phase)
    assert len(story.ledger.intents) == 1
    story.wait(8.0)
    assert story.held_by(actor) == held[0].identity
    assert story.held_by(judge) == second[0].identity


def test_a_relay_that_one_pool_keeps_asking_for_is_not_kept_from_another(story: Story, two: Two) -> None:
    """A run that calls again as soon as relays hold its version waits for the one that asked before it."""
    story.relay()
    actor, judge, first, second = two
    held = in_its_install(story, actor, first, pool="actor", until=HELD)
    waits = story.call(second.trainers[0], pool="judge", until=HELD)
    story.until(lambda: "waiting for relays" in story.phase)
    first.train()
    again = story.call(first.trainers[0], pool="actor", until=HELD)
    story.until(lambda: story.phase.count("waiting for relays") == 2)
    story.until(lambda: bool(waits), 20.0)
    assert not again
    story.wait(8.0)
    assert story.held_by(judge) == waits[0].identity
    assert story.held_by(actor) == again[0].identity != held[0].identity
