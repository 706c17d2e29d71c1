"""Collectives in small stories: what becomes of each replica, and what is said of it, when somebody is not there."""

from __future__ import annotations

from typing import Any

import pytest

from ckpt_engine.core.arming import Word
from tests.simulation.collective import BOUND, SILENCE
from tests.simulation.engine import CLEAN, DIRTY
from tests.simulation.members import AgentShell
from tests.simulation.story import NEW, OLD, QUARANTINED, Story, outcomes
from tests.simulation.training import Group

Scene = tuple[Story, AgentShell, AgentShell, Group]


@pytest.fixture
def scene() -> Scene:
    """Two replicas and a run of two ranks that publishes for collectives alone; the first version is installed."""
    story = Story(collective=True)
    first, second = story.replica(), story.replica()
    group = story.ranks(world_size=2)
    assert outcomes(story.update(group)) == {first.name: NEW, second.name: NEW}
    return story, first, second, group


def begun(story: Story, group: Group, **wishes: Any) -> list[Any]:
    """An update to new weights of which the manager has just told the ranks; its results will be in the list."""
    group.train()
    results = [story.call(trainer, **wishes) for trainer in group.trainers]
    before = max(story.truth.collectives.words, default=0)
    story.until(lambda: any(part.epoch > before for part in story.truth.collectives.parts))
    return results


def gone(story: Story) -> bool:
    """Whether *go* is written of the last epoch, all workers have begun, and some have not ended."""
    words = story.truth.collectives.words
    workers = [worker for agent in story.agents.values() if agent.engine for worker in agent.engine.workers]
    begun = all(worker.epoch == max(words) for worker in workers)
    return words[max(words)] is Word.GO and begun and any(worker.state == DIRTY for worker in workers)


def communicators(story: Story) -> int:
    return len(story.truth.collectives.communicators)


def test_the_communicator_is_kept_as_long_as_all_stay_and_all_goes_well(scene: Scene) -> None:
    story, first, second, group = scene
    assert story.trained(group).ok
    assert communicators(story) == 1
    third = story.replica()
    report = story.trained(group)
    assert outcomes(report) == {first.name: NEW, second.name: NEW, third.name: NEW}
    assert communicators(story) == 2
    assert "replica-0, replica-1 and replica-2 are updated by a collective" in report.collective


def test_a_communicator_that_a_rank_finds_broken_when_it_seals_is_made_anew_in_that_very_update(scene: Scene) -> None:
    story, _, _, group = scene
    made = story.truth.collectives
    (made.broken,) = made.communicators
    assert story.trained(group).ok
    assert communicators(story) == 2
    assert story.trained(group).ok
    assert communicators(story) == 2, "what was said of another one is of the past"


def test_a_late_replica_is_not_brought_up_by_one(scene: Scene) -> None:
    story, _, _, group = scene
    late = story.replica()
    story.wait(8.0)
    assert story.held_by(late) is None
    assert story.trained(group).ok
    assert story.held_by(late) is not None


def test_a_worker_that_is_killed_before_go_leaves_all_others_as_they_were(scene: Scene) -> None:
    story, first, second, group = scene
    before = story.held_by(first)
    results = begun(story, group)
    assert second.engine is not None
    second.engine.kill_worker(second.engine.workers[0])
    story.wait(20.0)
    (report,) = results[0]
    assert outcomes(report)[first.name] == OLD
    assert story.held_by(first) == before
    assert f"{second.name}, worker 0" in report.collective


def test_who_is_to_blame_twice_in_a_row_is_left_out_once_and_then_tried_again(scene: Scene) -> None:
    story, first, second, group = scene
    results = begun(story, group)
    assert second.engine is not None
    second.engine.workers[0].frozen = True
    story.wait(20.0)
    assert outcomes(results[0][0])[first.name] == OLD
    assert outcomes(story.update(group, seconds=25.0))[first.name] == OLD
    report = story.trained(group)
    assert outcomes(report)[first.name] == NEW
    assert f"{second.name} is left out, since the last 2 ended because of it" in report.collective
    second.engine.workers[0].frozen = False
    story.wait(5.0)
    assert outcomes(story.trained(group)) == {first.name: NEW, second.name: NEW}


def test_a_replica_that_is_alone_is_never_left_out() -> None:
    story = Story(collective=True)
    alone, group = story.replica(), story.ranks()
    story.faults.worker_late = 1.0
    for _ in range(3):
        assert outcomes(story.trained(group)) == {alone.name: QUARANTINED}
    story.faults.worker_late = 0.0
    assert story.trained(group).ok


def test_one_failure_after_go_dirties_all_and_the_next_update_mends_it(scene: Scene) -> None:
    story, first, second, group = scene
    results = begun(story, group)
    story.until(lambda: gone(story))
    assert first.engine is not None
    assert second.engine is not None
    second.engine.kill_worker(second.engine.workers[-1])
    story.wait(20.0)
    (report,) = results[0]
    assert outcomes(report) == {first.name: QUARANTINED, second.name: QUARANTINED}
    assert "replicas that had begun and did not end, or were lost meanwhile, are closed" in report.collective
    assert not first.engine.gate_open
    story.engine_again(second)
    assert outcomes(story.trained(group)) == {first.name: NEW, second.name: NEW}


def test_the_same_processes_make_a_new_communicator_after_a_failure(scene: Scene) -> None:
    story, first, second, group = scene
    story.faults.worker_late = 1.0
    assert QUARANTINED in outcomes(story.trained(group)).values()
    story.faults.worker_late = 0.0
    assert outcomes(story.trained(group)) == {first.name: NEW, second.name: NEW}
    assert communicators(story) > 1


@pytest.mark.parametrize("rank", [0, 1], ids=["the lead", "another rank"])
@pytest.mark.parametrize("middle", [False, True], ids=["before go", "in the middle"])
def test_a_rank_that_is_killed(scene: Scene, rank: int, middle: bool) -> None:
    """The other rank's call ends, and nobody serves half of a version."""
    story, first, second, group = scene
    results = begun(story, group, timeout_seconds=12.0)
    if middle:
        story.until(lambda: gone(story))
    group.trainers[rank].crash()
    story.wait(14.0)
    (report,) = results[1 - rank]
    expected = QUARANTINED if middle else OLD
    assert outcomes(report) == {first.name: expected, second.name: expected}
    again = story.ranks("run again", world_size=2)
    assert story.update(again).ok


def test_who_hears_of_go_and_of_its_end_at_once_has_written_nothing(scene: Scene) -> None:
    """One worker fails as soon as it begins, while the workers of the other replica are stopped."""
    story, first, second, group = scene
    before = story.held_by(second)
    results = begun(story, group)
    assert first.engine is not None
    assert second.engine is not None
    epoch, voted = max(part.epoch for part in story.truth.collectives.parts), story.truth.collectives.voted
    others = {(epoch, f"{second.name}, worker {worker.rank}") for worker in second.engine.workers}
    story.until(lambda: others <= voted)
    for worker in second.engine.workers:
        worker.frozen = True
    story.until(lambda: gone(story) or any(worker.state == DIRTY for worker in first.engine.workers))
    first.engine.kill_worker(first.engine.workers[0])
    story.wait(1.0)
    for worker in second.engine.workers:
        worker.frozen = False
    story.wait(20.0)
    assert outcomes(results[0][0])[second.name] == OLD
    assert story.held_by(second) == before


def test_who_is_done_when_the_lead_dies_does_not_wait_for_it(scene: Scene) -> None:
    """Workers keep what they have verified, and the other rank's call ends long before its deadline."""
    story, first, second, group = scene
    results = begun(story, group, timeout_seconds=15.0)
    story.until(lambda: gone(story))
    workers = [worker for agent in (first, second) if agent.engine for worker in agent.engine.workers]
    story.until(lambda: all(worker.state == CLEAN for worker in workers))
    group.trainers[0].crash()
    story.wait(SILENCE + BOUND)
    assert not story.truth.collectives.parts
    story.wait(story.deadlines.lease)  # until the manager knows that this rank does not come back
    (report,) = results[1]
    assert outcomes(report) == {first.name: NEW, second.name: NEW}


@pytest.mark.parametrize("middle", [False, True], ids=["before go", "in the middle"])
def test_a_manager_that_is_killed_changes_nothing(scene: Scene, middle: bool) -> None:
    story, first, second, group = scene
    before = story.held_by(first)
    begun(story, group)
    if middle:
        story.until(lambda: gone(story))
    else:
        story.wait(0.05)  # its messages have arrived
    story.kill_manager()
    story.wait(5.0)
    assert story.held_by(first) == story.held_by(second) != before
    assert first.outcome() == second.outcome() == NEW


@pytest.mark.parametrize("middle", [False, True], ids=["before go", "in the middle"])
def test_an_agent_that_is_killed_ends_nobody_elses_install(scene: Scene, middle: bool) -> None:
    story, first, second, group = scene
    begun(story, group)
    if middle:
        story.until(lambda: gone(story))
    story.restart_agent(second, 1.0)
    story.wait(20.0)
    assert first.engine is not None
    states = {worker.state for agent in (first, second) if agent.engine for worker in agent.engine.workers}
    assert states == {CLEAN}
    assert not middle or first.outcome() == NEW
    assert story.trained(group).ok


def test_a_rank_that_has_left_its_call_votes_no(scene: Scene) -> None:
    """Its weights may change: nobody takes what it would send, also if it has called again since."""
    story, first, second, group = scene
    results = begun(story, group)
    group.trainers[1].sealed_in_call = 0
    story.wait(10.0)
    (report,) = results[0]
    assert outcomes(report) == {first.name: OLD, second.name: OLD}
    assert "not in the call in which it sealed" in report.collective


@pytest.mark.parametrize("middle", [False, True], ids=["before go", "in the middle"])
def test_a_lead_that_is_stopped_for_longer_than_all_wait(scene: Scene, middle: bool) -> None:
    story, first, second, group = scene
    results = begun(story, group)
    if middle:
        story.until(lambda: gone(story))
    group.trainers[0].stop_for(9.0)
    story.wait(25.0)
    expected = QUARANTINED if middle else OLD
    assert {*outcomes(results[1][0]).values()} == {expected}
    assert not story.truth.collectives.parts
    assert outcomes(story.trained(group)) == {first.name: NEW, second.name: NEW}
