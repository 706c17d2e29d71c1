"""Going back to a version that holders hold, and waiting for an update's end: each rule in a small story."""

from __future__ import annotations

from typing import Any

import pytest

from ckpt_engine.core.version import Version
from ckpt_engine.v1 import manager_pb2, weights_pb2
from tests.simulation.holders import HolderShell
from tests.simulation.members import AgentShell
from tests.simulation.scenario import Group
from tests.simulation.story import NEW, Problem, Story, outcomes, refused


def holder_of(story: Story, identity: weights_pb2.Identity, lies: bool = False) -> HolderShell:
    holder = story.join_holder(lies)
    story.wait(0.5)
    holder.hold(identity)
    story.wait(0.5)
    return holder


def next_version(story: Story, group: Group) -> weights_pb2.Identity:
    group.train()
    report = story.update(group)
    assert isinstance(report, manager_pb2.UpdateReport), report
    identity: weights_pb2.Identity = report.identity
    return identity


def two_versions(story: Story, kind: str = "live") -> tuple[AgentShell, Group, list[weights_pb2.Identity]]:
    """Served by one replica; nobody holds the first one."""
    agent, group = story.replica(), story.ranks(kind=kind)
    return agent, group, [next_version(story, group) for _ in range(2)]


def another_engine(story: Story, agent: AgentShell) -> None:
    assert agent.engine is not None
    agent.engine.kill()
    agent.engine_died()
    story.start_engine(agent)
    story.wait(5.0)


@pytest.mark.parametrize("kind", ["live", "snapshot", "directory"])
@pytest.mark.parametrize("restarted", [False, True])
def test_replicas_go_back_and_late_ones_follow_while_numbers_go_on(story: Story, restarted: bool, kind: str) -> None:
    agent, group, (first, second) = two_versions(story, kind)
    for version in (first, second):
        holder_of(story, version)
    report = story.roll_back(first.version)
    assert (report.identity, outcomes(report), report.ok) == (first, {agent.name: NEW}, True)
    if restarted:
        story.restart_manager()
    late = story.replica()
    another_engine(story, agent)
    assert [story.held_by(agent), story.held_by(late)] == [first, first]
    assert story.cluster.manager is not None
    assert list(story.cluster.manager.machine.watched().latest.values()) == [Version.of(first)]
    assert next_version(story, group).version == second.version + 1
    assert story.held_by(late) == story.held_by(agent) != first


def test_a_manager_that_was_restarted_knows_older_versions_from_its_ledger(story: Story) -> None:
    agent, group, (first, second) = two_versions(story)
    holder_of(story, first)
    story.restart_manager()
    assert story.roll_back(first.version).ok
    assert story.held_by(agent) == first
    story.restart_manager()
    assert next_version(story, group).version == second.version + 1


def test_what_is_held_already_is_left_alone_and_meant_from_then_on(story: Story) -> None:
    agent, _, (_, second) = two_versions(story)
    holder_of(story, second)
    report = story.roll_back(second.version, "run")
    assert outcomes(report) == {agent.name: NEW}
    assert not report.replicas[0].stages, "nothing was installed"


def test_only_those_that_are_named_go_back(story: Story) -> None:
    agent, _, (first, second) = two_versions(story)
    other = story.replica()
    holder_of(story, second)
    story.wait(3.0)
    holder_of(story, first)
    report = story.roll_back(first.version, replicas=[other.name])
    assert outcomes(report) == {other.name: NEW}
    assert [story.held_by(agent), story.held_by(other)] == [second, first]


@pytest.mark.parametrize("restarted", [False, True])
def test_those_that_do_not_go_back_are_still_brought_to_what_they_serve(story: Story, restarted: bool) -> None:
    """Both versions are desired at a time: each replica comes back with its own, one after the other."""
    agent, _, (first, second) = two_versions(story)
    other = story.replica()
    for version in (first, second):
        holder_of(story, version)
    story.wait(3.0)
    assert story.roll_back(first.version, replicas=[other.name]).ok
    if restarted:
        story.restart_manager()
    for each in (agent, other):
        assert each.engine is not None
        each.engine.kill()
        each.engine_died()
        story.start_engine(each)
    story.wait(8.0)
    assert [story.held_by(agent), story.held_by(other)] == [second, first]


def test_a_call_and_an_attempt_look_at_one_version_and_come_to_an_end(story: Story) -> None:
    """The attempt reads ranks that keep the version, the rollback holders only: none has the other look again."""
    agent, other, group = story.replica(), story.replica(), story.ranks(kind="snapshot")
    version = next_version(story, group)
    holder_of(story, version)
    story.faults.worker_early = 1.0
    story.engine_again(agent)
    manager = story.cluster.manager
    assert manager is not None
    story.until(lambda: bool(manager.machine._members.replicas[agent.name].failure), 30.0)
    before = manager.machine._state.pipelines
    assert outcomes(story.roll_back(version.version, replicas=[other.name])) == {other.name: NEW}
    assert manager.machine._state.pipelines < before + 10


def test_what_cannot_be_gone_back_to_is_refused_and_said(story: Story) -> None:
    agent, _, (first, second) = two_versions(story)
    refused(
        story.roll_back(first.version), Problem.CODE_NOT_FOUND, "nothing that is connected holds version 0", "no holder"
    )
    holder = story.join_holder()
    story.wait(0.5)
    refused(story.roll_back(first.version), Problem.CODE_NOT_FOUND, "is connected and holds no version yet")
    holder.hold(first)
    story.wait(0.5)
    refused(
        story.roll_back(7, "run"),
        Problem.CODE_NOT_FOUND,
        "version 7 of lineage 'run'",
        f"{holder.held.source} holds version 0",
    )
    refused(story.roll_back(first.version, "other"), Problem.CODE_NOT_FOUND, "no lineage 'other' (run)")
    refused(story.roll_back(-1), Problem.CODE_INVALID_ARGUMENT, "version -1")
    refused(story.roll_back(first.version, replicas=["nobody"]), Problem.CODE_NOT_FOUND, "no replica 'nobody'")
    refused(story.roll_back(first.version, timeout_seconds=-1.0), Problem.CODE_INVALID_ARGUMENT, "timeout")
    assert story.held_by(agent) == second


def test_a_number_that_is_held_of_two_lineages_needs_the_lineages_name(story: Story) -> None:
    agent, _, (first, _) = two_versions(story)
    others = story.ranks("another")
    other = next_version(story, others)
    holder_of(story, first)
    holder_of(story, other)
    refused(story.roll_back(0), Problem.CODE_INVALID_ARGUMENT, "'another', 'run'", "name one")
    assert story.held_by(agent) == other
    assert story.roll_back(0, "run").identity == first
    assert story.held_by(agent) == first


def test_who_holds_other_weights_under_a_known_number_is_not_believed(story: Story) -> None:
    agent, _, (first, second) = two_versions(story)
    holder_of(story, first, lies=True)
    refused(story.roll_back(first.version), Problem.CODE_FAILED_PRECONDITION, "cannot be read", "other weights")
    never = weights_pb2.Identity(lineage="run", version=first.version, root=second.root)
    holder_of(story, never)
    another = weights_pb2.Identity(lineage="run", version=9, root=second.root)
    holder_of(story, another)
    refused(story.roll_back(9), Problem.CODE_FAILED_PRECONDITION, "neither the ledger nor a worker knows the root")
    assert story.held_by(agent) == second
    holder_of(story, first)
    assert story.roll_back(first.version).ok


def test_a_ledger_that_was_lost_leaves_the_words_of_workers_to_go_by(story: Story) -> None:
    agent, group, (first, second) = two_versions(story)
    other = story.replica()
    holder_of(story, first)
    assert story.roll_back(first.version, replicas=[other.name]).ok
    holder_of(story, second)
    story.end_group(group, in_good_order=True)
    story.kill_manager()
    story.ledgers_replaced += 1
    story.ledger.intents.clear()
    story.ledger.highest.clear()
    story.start_manager()
    story.wait(6.0)
    assert story.roll_back(second.version).ok
    assert [story.held_by(agent), story.held_by(other)] == [second, second]


def test_an_update_of_the_lineage_is_not_overtaken_and_one_of_another_is_waited_for(story: Story) -> None:
    agent, group, (first, _) = two_versions(story)
    holder_of(story, first)
    others = story.ranks("another")
    group.train()
    (result,) = [story.call(group.trainers[0])]
    story.wait(0.05)
    refused(
        story.roll_back(first.version, seconds=0.0) or _now(story, first), Problem.CODE_ABORTED, "runs, to version 2"
    )
    story.wait(5.0)
    assert isinstance(result[0], manager_pb2.UpdateReport)
    waiting = story.call(others.trainers[0])
    story.wait(0.02)
    report = story.roll_back(first.version)
    assert isinstance(waiting[0], manager_pb2.UpdateReport)
    assert report.fence.epoch > waiting[0].fence.epoch
    assert story.held_by(agent) == first


def _now(story: Story, identity: weights_pb2.Identity) -> Any:
    return story.roll_back(identity.version, seconds=0.01)


def test_ranks_that_call_during_a_rollback_wait_for_its_end(story: Story) -> None:
    agent, group, (first, second) = two_versions(story)
    holder_of(story, first)
    assert story.cluster.manager is not None
    _, over = story.cluster.manager.roll_back(first.version)
    story.wait(0.3)
    group.train()
    report = story.update(group, seconds=8.0)
    assert over.value.ok
    assert (report.identity.version, report.ok) == (second.version + 1, True)
    assert story.held_by(agent) == report.identity


@pytest.mark.parametrize("seconds", [0.0, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.2])
def test_a_manager_that_is_killed_in_a_rollback_leaves_one_version_or_the_other_and_all_ends_well(
    story: Story, seconds: float
) -> None:
    """Wherever it dies; once the intent is on the disk, replicas end with the version that it names."""
    agent, group, (first, second) = two_versions(story)
    holder_of(story, first)
    assert story.cluster.manager is not None
    story.cluster.manager.roll_back(first.version)
    story.wait(seconds)
    story.restart_manager()
    story.wait(5.0)
    intended = story.ledger.intents[max(story.ledger.intents)].message()
    assert story.held_by(agent) == intended
    assert next_version(story, group).version == second.version + 1


def test_a_caller_that_leaves_before_the_intent_takes_its_rollback_back(story: Story) -> None:
    agent, _, (first, second) = two_versions(story)
    holder_of(story, first)
    manager = story.cluster.manager
    assert manager is not None
    call, _ = manager.roll_back(first.version)
    manager.cancel_call(call)
    story.wait(5.0)
    assert story.held_by(agent) == second


def test_two_rollbacks_of_a_lineage_take_turns_without_asking_for_ever(story: Story) -> None:
    """What holders hold is joined for one version of a lineage at a time."""
    agent, _, versions = two_versions(story)
    for version in versions:
        holder_of(story, version)
    manager = story.cluster.manager
    assert manager is not None
    begun = story.world.events
    answers = [manager.roll_back(version.version)[1] for version in versions]
    story.wait(5.0)
    assert story.world.events - begun < 500
    assert answers[0].value.ok
    refused(answers[1].value, Problem.CODE_ABORTED, "runs, to version 0")
    assert story.held_by(agent) == versions[0]


def test_a_rollback_that_waits_too_long_says_for_what(story: Story) -> None:
    two_versions(story)
    restarted = story.cluster.manager
    assert restarted is not None
    story.kill_manager()
    story.start_manager()
    result = story.roll_back(0, timeout_seconds=1.5)
    refused(result, Problem.CODE_DEADLINE_EXCEEDED, "rollback to version 0", "the manager was restarted")


# -- waiting for an update's end


def wait_for(story: Story, version: int, lineage: str = "run", wait: float = 0.5, seconds: float = 0.0) -> Any:
    assert story.cluster.manager is not None
    over = story.cluster.manager.wait_for(version, lineage, seconds)
    story.wait(wait)
    return over.value


@pytest.mark.parametrize("restarted", [False, True])
def test_the_report_of_an_update_is_told_again_and_not_that_of_a_late_replica(story: Story, restarted: bool) -> None:
    agent, group, _ = two_versions(story, "snapshot")
    group.train()
    report = story.update(group)
    another_engine(story, agent)
    assert story.held_by(agent) == report.identity
    if restarted:
        story.restart_manager()
    assert wait_for(story, report.identity.version) == report
    refused(wait_for(story, 7), Problem.CODE_NOT_FOUND, "no update to version 7 of lineage 'run'", "2, 1, 0")
    refused(wait_for(story, 0, "other"), Problem.CODE_NOT_FOUND, "lineage 'other'")
    refused(wait_for(story, -1), Problem.CODE_INVALID_ARGUMENT, "version -1")


def test_an_update_that_runs_is_waited_for_and_a_refusal_is_told(story: Story) -> None:
    story.replica()
    group = story.ranks()
    group.train()
    result = story.call(group.trainers[0])
    story.wait(0.05)
    manager = story.cluster.manager
    assert manager is not None
    over = manager.wait_for(0, "run")
    refused(
        wait_for(story, 0, seconds=0.01, wait=0.02), Problem.CODE_DEADLINE_EXCEEDED, "it goes on: update", "version 0"
    )
    assert not over.ready
    story.wait(5.0)
    assert over.value == result[0]
    group.train()
    again = story.call(group.trainers[0])
    story.wait(0.02)
    over = manager.wait_for(1, "run")
    group.trainers[0].crash()
    story.wait(8.0)
    refused(over.value, Problem.CODE_DEADLINE_EXCEEDED, "rank 0 had not sealed")
    assert again


def test_an_update_in_whose_middle_the_manager_ended_has_no_report(story: Story) -> None:
    story.replica()
    group = story.ranks()
    group.train()
    story.call(group.trainers[0])
    for _ in range(2000):
        story.wait(0.002)
        if story.ledger.intents:
            break
    story.restart_manager()
    refused(wait_for(story, 0), Problem.CODE_ABORTED, "the manager ended during update", "version 0")


def test_a_rollback_whose_caller_leaves_while_relays_are_filled_is_refused() -> None:
    """Also when no rank of its run is there, which might be asked whether it lives."""
    story = Story(far=True)
    near, away = story.hosts[0], story.hosts[1]
    story.join_relay(host=near)
    lost = story.join_relay(host=away)
    agent, group = story.replica(host=away), story.ranks(hosts=[near])
    assert story.update(group).ok
    assert story.trained(group).ok
    story.end_group(group, in_good_order=True)
    lost.crash()
    story.wait(1.0)
    story.join_relay(lost.name, away)
    story.wait(2.0)
    assert story.cluster.manager is not None
    before = dict(story.ledger.intents)
    call, _ = story.cluster.manager.roll_back(0)
    story.until(lambda: "filling" in story.phase)
    story.cluster.manager.cancel_call(call)
    story.wait(4.0)
    assert story.ledger.intents == before
    assert story.held_by(agent) == before[max(before)].message()
