"""Whom an update's report counts, each rule in a small story: replicas that are away, and those that are unfit."""

from __future__ import annotations

from typing import Any

import pytest

from ckpt_engine.machines import events
from ckpt_engine.v1 import manager_pb2
from tests.simulation.engine import CLEAN
from tests.simulation.members import AgentShell, TrainerShell
from tests.simulation.story import NEW, OLD, QUARANTINED, UNREACHED, AbleEngine, Problem, Story, outcomes, refused
from tests.simulation.training import Group
from tests.simulation.world import Steps


@pytest.fixture
def story() -> Story:
    return Story()


def away(story: Story, seconds: float = 10.0) -> tuple[AgentShell, AgentShell, Group]:
    """Two replicas that serve a version; the agent of the first was killed so long ago, and its engine goes on."""
    lost, there = story.replica(), story.replica()
    group = story.ranks()
    assert story.update(group).ok
    lost.crash()
    story.wait(seconds)
    group.train()
    return lost, there, group


# ------------------------------------------------------------------------------------------------------- away


def test_a_replica_whose_agent_is_gone_is_reported_and_the_update_is_not_ok(story: Story) -> None:
    lost, there, group = away(story)
    begun = story.world.now
    report = story.update(group, 2.0)
    assert outcomes(report) == {lost.name: UNREACHED, there.name: NEW}
    assert not report.ok
    assert not report.verified
    (missing,) = (each for each in report.replicas if each.replica == lost.name)
    assert "not connected" in missing.problem.message
    assert "version 0" in missing.problem.message
    assert f"replica evict {lost.name}" in missing.problem.message
    assert lost.engine is not None
    assert lost.engine.words().open, "it serves on under the version before"
    assert missing.before == lost.engine.words().identity
    assert story.world.now - begun < story.deadlines.lease, "nobody waits again for what is known to be away"


def test_who_says_how_many_suffice_is_content_with_them(story: Story) -> None:
    lost, there, group = away(story)
    report = story.update(group, min_replicas=1)
    assert report.ok
    assert report.verified
    assert outcomes(report) == {lost.name: UNREACHED, there.name: NEW}
    group.train()
    refused(
        story.update(group, min_replicas=2), Problem.CODE_FAILED_PRECONDITION, "1 replicas", "2 are required", lost.name
    )


def test_replicas_that_were_not_chosen_do_not_count(story: Story) -> None:
    lost, there, group = away(story)
    report = story.update(group, replicas=[there.name])
    assert report.ok
    assert outcomes(report) == {there.name: NEW}
    refused(
        story.update(group, replicas=[lost.name]),
        Problem.CODE_FAILED_PRECONDITION,
        lost.name,
        "its agent is not connected",
    )


def test_an_evicted_replica_does_not_count(story: Story) -> None:
    lost, there, group = away(story)
    story.evict(lost.name)
    report = story.update(group)
    assert report.ok
    assert outcomes(report) == {there.name: NEW}


def test_a_replica_that_left_in_good_order_does_not_count(story: Story) -> None:
    left, there, group = story.replica(), story.replica(), story.ranks()
    assert story.update(group).ok
    assert story.cluster.manager is not None
    peer = story.cluster.manager.machine._members.replicas[left.name].peer
    assert peer is not None
    story.cluster.manager.feed(events.Message(peer, manager_pb2.Goodbye(reason="leaving")))
    left.crash()
    story.wait(1.0)
    group.train()
    assert outcomes(story.update(group)) == {there.name: NEW}


def test_colocated_replicas_never_count(story: Story) -> None:
    judge, there, group = story.replica(manager_pb2.MODE_COLOCATED), story.replica(), story.ranks()
    judge.crash()
    story.wait(10.0)
    report = story.update(group)
    assert report.ok
    assert outcomes(report) == {there.name: NEW}


def test_an_agent_that_is_being_restarted_is_waited_for(story: Story) -> None:
    first, second, group = story.replica(), story.replica(), story.ranks()
    assert story.update(group).ok
    group.train()
    story.restart_agent(first, 1.5)
    story.wait(0.1)
    assert outcomes(story.update(group, 8.0)) == {first.name: NEW, second.name: NEW}


def test_the_only_replica_is_waited_for_too_and_then_named(story: Story) -> None:
    only, group = story.replica(), story.ranks()
    assert story.update(group).ok
    group.train()
    story.restart_agent(only, 1.5)
    story.wait(0.1)
    assert story.update(group, 8.0).ok
    group.train()
    story.agents[only.name].crash()
    story.wait(0.1)
    refused(story.update(group, 8.0), Problem.CODE_FAILED_PRECONDITION, "0 replicas", only.name, "not connected")


def test_waiting_for_one_costs_the_others_at_most_half_of_the_time(story: Story) -> None:
    lost, there, group = away(story, 0.1)
    report = story.update(group, 5.0, timeout_seconds=4.0)
    assert outcomes(report) == {lost.name: UNREACHED, there.name: NEW}


def test_an_agent_that_comes_back_without_an_engine_is_not_waited_for_until_the_end(
    story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its time is over while the ranks still seal."""
    original = TrainerShell._seal

    def seal(self: TrainerShell, task: events.SealSource) -> Steps:
        yield 2.5
        return (yield from original(self, task))

    monkeypatch.setattr(TrainerShell, "_seal", seal)
    first, second, group = story.replica(), story.replica(), story.ranks()
    assert story.update(group).ok
    group.train()
    assert first.engine is not None
    first.engine.kill()
    monkeypatch.setattr(story, "start_engine", lambda agent: None)
    story.restart_agent(first, 2.3)
    story.wait(2.0)
    assert outcomes(story.update(group, 6.0)) == {first.name: UNREACHED, second.name: NEW}
    assert story.agents[first.name].alive


def test_a_replica_that_comes_in_the_middle_is_for_the_next_update(story: Story) -> None:
    first, group = story.replica(), story.ranks(world_size=1)
    results = story.call(group.trainers[0])
    story.wait(0.05)
    second = story.replica()
    assert outcomes(results[0]) == {first.name: NEW}
    group.train()
    assert outcomes(story.update(group)) == {first.name: NEW, second.name: NEW}


# ------------------------------------------------------------------------------------------------------ unfit


def one_misfit(story: Story, count: int = 2) -> tuple[AgentShell, list[AgentShell], Group]:
    """One replica that can only load model A among so many others, and ranks of model B."""
    misfit, *others = (story.replica() for _ in range(count + 1))
    assert misfit.engine is not None
    misfit.engine.models = {"model A"}
    return misfit, others, story.ranks("run B", model="model B")


def unfit(story: Story) -> dict[str, str]:
    """What the status says against replicas."""
    assert story.cluster.manager is not None
    found = story.cluster.manager.machine.status().replicas
    return {replica.name: replica.unfit.message for replica in found if replica.HasField("unfit")}


def test_a_misfit_is_left_out_and_named_and_the_others_are_updated(story: Story) -> None:
    misfit, others, group = one_misfit(story)
    report = story.update(group)
    assert not report.ok
    assert outcomes(report) == {misfit.name: QUARANTINED} | {other.name: NEW for other in others}
    (left,) = (each for each in report.replicas if each.replica == misfit.name)
    assert left.problem.code == Problem.CODE_INVALID_ARGUMENT
    assert left.problem.replica == misfit.name
    assert "cannot load model B" in left.problem.message
    assert "cannot load model B" in unfit(story)[misfit.name]
    group.train()
    report = story.update(group, min_replicas=2)
    assert report.ok
    assert report.verified


def test_a_misfit_that_serves_goes_on_serving_what_it_has(story: Story) -> None:
    misfit, others, group = one_misfit(story)
    fitting = story.ranks("run A")
    before = story.update(fitting).identity
    report = story.update(group)
    assert outcomes(report) == {misfit.name: OLD} | {other.name: NEW for other in others}
    assert misfit.engine is not None
    assert misfit.engine.words().identity == before
    assert not misfit.engine.paused
    assert story.update(fitting, version=0).ok
    assert unfit(story) == {}, "it takes what it is asked to take"


def test_a_misfit_is_not_asked_again_for_what_it_can_never_load(story: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    misfit, _, group = one_misfit(story)
    assert misfit.engine is not None
    story.update(group)
    story.wait(30.0)  # long enough for any attempt to bring it up
    asked = misfit.engine.prepares
    assert asked == 1
    group.train()
    again = story.update(group)
    assert outcomes(again)[misfit.name] == QUARANTINED
    assert misfit.engine.prepares == asked
    assert again.ok, "it is known that it never can, so it does not count"
    assert [each.replica for each in again.replicas if each.cannot_load] == [misfit.name]
    assert "replica evict" in again.warnings[-1]
    group.train()
    named = story.update(group, replicas=sorted(story.agents))
    assert not named.ok, "it was asked for by name"
    assert not any(each.cannot_load for each in named.replicas)
    refused(story.retry(misfit.name), Problem.CODE_FAILED_PRECONDITION, "can never load", "cannot load model B")


def test_a_late_misfit_is_not_tried_again_and_again(story: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    story.replica()
    group = story.ranks("run B", kind="snapshot", model="model B")
    assert story.update(group).ok
    able = AbleEngine.__init__

    def unable(engine: AbleEngine, *arguments: Any) -> None:
        able(engine, *arguments)
        engine.models = {"model A"}

    monkeypatch.setattr(AbleEngine, "__init__", unable)
    story.join_replica(manager_pb2.MODE_STANDALONE)
    late = list(story.agents.values())[-1]
    story.wait(10.0)
    assert late.engine is not None
    asked = late.engine.prepares
    assert asked >= 1  # what came before its workers were known counts for none of them
    story.wait(60.0)
    assert late.engine.prepares == asked
    assert "cannot load model B" in unfit(story)[late.name]


def test_what_no_replica_can_load_refuses_the_update_and_nobody_is_marked(story: Story) -> None:
    misfit, others, group = one_misfit(story)
    before = story.update(story.ranks("run A")).identity
    for other in others:
        assert other.engine is not None
        other.engine.models = {"model A"}
    problem = story.update(group)
    names = ", ".join(sorted(agent.name for agent in (misfit, *others)))
    refused(problem, Problem.CODE_INVALID_ARGUMENT, f"{names}: this engine cannot load model B")
    assert problem.replica == misfit.name
    assert unfit(story) == {}
    for agent in (misfit, *others):
        assert agent.engine is not None
        assert agent.engine.words().identity == before
        assert agent.outcome() == NEW


def test_too_few_that_fit_refuse_the_update_naming_the_misfit(story: Story) -> None:
    misfit, _, group = one_misfit(story)
    refused(
        story.update(group, min_replicas=3),
        Problem.CODE_FAILED_PRECONDITION,
        "2 replicas can be updated, 3 are required",
        f"{misfit.name}: this engine cannot load model B",
    )


def test_a_misfit_and_one_that_is_away_refuse_for_what_is_published(story: Story) -> None:
    """Nobody can say that the weights are right, and one says that they are not."""
    misfit, (lost,), group = one_misfit(story, 1)
    lost.crash()
    story.wait(story.deadlines.forget - 1.0)  # no update reached it, so it is forgotten then
    refused(story.update(group), Problem.CODE_INVALID_ARGUMENT, misfit.name, "cannot load model B", lost.name)


def test_a_replica_that_no_plan_reaches_is_left_out_too(story: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fake of the planner's word, since the simulation has no transports."""
    far, near, group = story.replica(), story.replica(), story.ranks()
    assert story.cluster.manager is not None
    original = story.cluster.manager._compile

    def compile(task: events.CompilePlans) -> events.Compiled:
        reached = tuple(worker for worker in task.workers if worker.key[0] != far.name)
        done = original(events.CompilePlans(task.published, reached, task.seconds))
        problem = Problem(code=Problem.CODE_FAILED_PRECONDITION, message="no transport reaches it")
        return events.Compiled(done.plans, done.atoms, done.bytes, done.handle, {far.name: problem})

    monkeypatch.setattr(story.cluster.manager, "_compile", compile)
    report = story.update(group)
    assert outcomes(report) == {far.name: QUARANTINED, near.name: NEW}
    assert unfit(story) == {far.name: "no transport reaches it"}
    refused(
        story.update(group, min_replicas=2), Problem.CODE_FAILED_PRECONDITION, "1 replicas", "no transport reaches it"
    )
    monkeypatch.undo()
    assert story.update(group).ok, "it is asked again"
    assert unfit(story) == {}


def test_progress_names_who_is_left_out(story: Story) -> None:
    misfit, _, group = one_misfit(story)
    story.update(group)
    assert story.cluster.manager is not None
    said = {progress.replica: progress.message for progress in story.cluster.manager.progress if progress.replica}
    assert said[misfit.name].startswith("left out: this engine cannot load model B; lineage 'run B' publishes a model")


@pytest.mark.parametrize("phase", ["preparing", "installing"])
def test_a_replica_that_is_lost_while_it_installs_is_told_from_one_that_was_never_told_to(
    story: Story, phase: str
) -> None:
    lost, _, group = story.replica(), story.replica(), story.ranks()
    assert story.cluster.manager is not None
    result = story.call(group.trainers[0])
    while not story.cluster.manager.machine.status().phase.endswith(phase):
        story.wait(0.0005)
    lost.crash()
    story.wait(10.0)
    (told,) = (each for each in result[0].replicas if each.replica == lost.name)
    assert told.outcome == (QUARANTINED if phase == "installing" else UNREACHED)
    assert told.problem.message.startswith("it was lost while installing: ") == (phase == "installing")


@pytest.mark.parametrize("restarted", [False, True], ids=["the same agent", "another agent"])
def test_a_replica_whose_lost_agent_brings_it_up_is_told_as_what_it_is(story: Story, restarted: bool) -> None:
    """The callers were told that it is quarantined; whoever asks later is not."""
    lost, other, group = story.replica(), story.replica(), story.ranks()
    assert story.cluster.manager is not None
    result = story.call(group.trainers[0])
    assert lost.engine is not None
    engine = lost.engine
    story.until(lambda: engine.paused)
    if restarted:
        story.until(lambda: all(worker.state == CLEAN for worker in engine.workers))
        story.restart_agent(lost, 8.0)
    else:
        story.faults.cuts = {(lost.name, True), (lost.name, False)}
    story.wait(6.0)
    (told,) = (each for each in result[0].replicas if each.replica == lost.name)
    assert told.outcome == QUARANTINED
    assert story.last_report().replicas[0].outcome == QUARANTINED
    story.faults.cuts = set()
    story.wait(8.0)
    report = story.last_report()
    assert outcomes(report) == {lost.name: NEW, other.name: NEW}
    assert report.ok
    assert [each.replica for each in report.replicas if each.HasField("problem")] == []


@pytest.mark.parametrize("superseded", [False, True])
def test_a_replica_that_is_brought_to_the_version_later_is_told_as_what_it_is(story: Story, superseded: bool) -> None:
    """An update left it out, and an attempt of its own succeeded; if another version came first, it stays as told."""
    lost, other, group = story.replica(), story.replica(), story.ranks(kind="snapshot")
    assert story.update(group).ok
    story.faults.cuts = {(lost.name, True), (lost.name, False)}
    story.wait(20.0)
    group.train()
    first = story.update(group, 30.0)
    assert not first.ok
    assert outcomes(story.last_report())[lost.name] == UNREACHED
    second = first
    if superseded:
        group.train()
        second = story.update(group, 30.0)
    story.faults.cuts = set()
    story.wait(20.0)
    assert story.held_by(lost) == second.identity
    assert outcomes(story.ledger.reports[first.fence.epoch])[lost.name] == (UNREACHED if superseded else NEW)
    report = story.ledger.reports[second.fence.epoch]
    assert outcomes(report) == {lost.name: NEW, other.name: NEW}
    assert report.ok
    assert report.verified
    (warning,) = report.warnings
    assert f"replica {lost.name!r} was brought to it later" in warning


# ---------------------------------------------------------------------------------------------------- warnings


def test_a_version_without_a_change_is_a_warning_that_names_both(story: Story) -> None:
    """Not if it is the same version once more."""
    story.replica()
    group = story.ranks()
    assert list(story.update(group).warnings) == []
    (said,) = story.update(group).warnings
    assert "version 1 has the same weights as version 0" in said
    assert list(story.update(group, version=1).warnings) == []
    group.train()
    assert list(story.update(group).warnings) == []
