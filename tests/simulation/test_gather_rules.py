"""Single rules of calls that wait for each other, each in a small story: who holds up whom, and whose turn it is."""

from __future__ import annotations

import pytest

from ckpt_engine.machines.manager.machine import ManagerMachine
from ckpt_engine.machines.manager.rank_calls import ranks_named
from ckpt_engine.v1 import manager_pb2
from tests.simulation.manager import ManagerShell
from tests.simulation.story import NEW, Problem, Story, outcomes, refused


@pytest.fixture
def story() -> Story:
    return Story()


def manager_of(story: Story) -> ManagerShell:
    assert story.cluster.manager is not None
    return story.cluster.manager


def phase(story: Story) -> str:
    return manager_of(story).machine.status().phase


def call_for(story: Story, lineage: str) -> manager_pb2.UpdateWeightsRequest:
    """A call that no session stands behind."""
    request = manager_pb2.UpdateWeightsRequest(lineage=lineage, session_id="nobody")
    _, over = manager_of(story).open_call(request)
    story.wait(0.1)
    return over.value


def test_a_call_for_a_lineage_that_nobody_has_is_refused_at_once_and_holds_up_nobody(story: Story) -> None:
    agent, group = story.replica(), story.ranks()
    for _ in range(3):
        refused(call_for(story, "nobody's run"), Problem.CODE_FAILED_PRECONDITION, "no rank of lineage", "nobody's run")
        assert outcomes(story.update(group)) == {agent.name: NEW}
        group.train()


def test_a_rank_that_does_not_call_holds_up_no_other_lineage(story: Story) -> None:
    agent = story.replica()
    half, whole = story.ranks(world_size=2), story.ranks("another run")
    waiting = story.call(half.trainers[0])
    story.wait(0.1)
    assert "rank 1 has not called" in phase(story)
    for _ in range(3):
        assert outcomes(story.update(whole, 1.5)) == {agent.name: NEW}
        whole.train()
    assert not waiting
    joined = story.call(half.trainers[1])
    story.wait(2.0)
    assert waiting == joined
    assert waiting[0].ok


def test_a_rank_that_does_not_call_holds_up_no_late_replica_and_no_sleep(story: Story) -> None:
    story.replica()
    sealed, half = story.ranks(kind="snapshot"), story.ranks("another run", world_size=2)
    identity = story.update(sealed).identity
    waiting = story.call(half.trainers[0])
    late = story.replica()
    assert late.engine is not None
    assert late.engine.words().identity == identity
    slept = manager_of(story).sleep_or_wake(False, [late.name])
    story.wait(1.0)
    assert isinstance(slept.value, manager_pb2.SleepResponse)
    assert not waiting


def test_lineages_take_turns_in_the_order_in_which_they_were_complete(story: Story) -> None:
    """Not in that of their first calls, and one that calls again at once comes after those that waited."""
    story.replica()
    eager, slow, patient = story.ranks("eager run"), story.ranks("a slow run", world_size=2), story.ranks("patient run")
    done: list[str] = []
    calls = {"eager": story.call(eager.trainers[0])}
    story.wait(0.05)
    assert "eager run" in phase(story)
    calls["slow"] = story.call(slow.trainers[0])
    story.wait(0.05)
    calls["patient"] = story.call(patient.trainers[0])
    story.wait(0.05)
    story.call(slow.trainers[1])
    assert not calls["eager"]
    while len(done) < 4:
        story.wait(0.0005)
        for name in [name for name, result in calls.items() if result]:
            assert calls.pop(name)[0].ok
            done.append(name)
            if done == ["eager"]:
                eager.train()
                calls["eager"] = story.call(eager.trainers[0])
    assert done == ["eager", "patient", "slow", "eager"]


def test_an_update_whose_turn_does_not_come_in_time_is_refused(story: Story) -> None:
    agent = story.replica()
    first, second = story.ranks(), story.ranks("another run")
    running = story.call(first.trainers[0], timeout_seconds=15.0)
    story.wait(0.05)
    agent.stop_for(12.0)
    waiting = story.call(second.trainers[0], timeout_seconds=4.0)
    story.wait(5.0)
    refused(waiting[0], Problem.CODE_DEADLINE_EXCEEDED, "turn", "another run")
    story.wait(20.0)
    assert len(running) == 1


def test_a_lineage_whose_ranks_lost_their_sessions_has_a_lease_to_come_back(story: Story) -> None:
    story.replica()
    group = story.ranks(world_size=2)
    story.faults.cuts |= {(trainer.name, way) for trainer in group.trainers for way in (True, False)}
    story.wait(story.deadlines.lease + 1.5)
    assert not any(trainer.connected for trainer in manager_of(story).machine.status().trainers)
    request = manager_pb2.UpdateWeightsRequest(lineage="run", rank=0, session_id=group.trainers[0].session)
    _, over = manager_of(story).open_call(request)
    story.wait(story.deadlines.lease - 0.5)
    assert not over.ready
    story.wait(1.0)
    refused(over.value, Problem.CODE_FAILED_PRECONDITION, "no rank of lineage 'run' has a session")


def test_a_manager_that_was_restarted_waits_for_sessions_to_come_back(story: Story) -> None:
    story.replica()
    group = story.ranks()
    assert story.update(group).ok
    group.train()
    manager_of(story).crash()
    story.start_manager()
    early = story.call(group.trainers[0])
    story.wait(0.02)
    assert not manager_of(story).machine.status().trainers
    story.wait(6.0)
    assert early[0].ok


def test_many_ranks_are_named_in_few_words(story: Story) -> None:
    story.join_group("run", "live", "model A", 3)
    story.wait(1.0)
    machine: ManagerMachine = manager_of(story).machine
    for trainer in machine._members.trainers.values():
        trainer.world_size = 1 << 16
    request = manager_pb2.UpdateWeightsRequest(lineage="run", rank=0, session_id=story.groups[0].trainers[0].session)
    manager_of(story).open_call(request)
    assert "ranks 3-65535 have no session; ranks 1-2 have not called update_weights" in phase(story)
    assert len(phase(story)) < 1000


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        ([3], "rank 3"),
        ([2, 0, 1, 7], "ranks 0-2, 7"),
        (list(range(0, 65536, 2)), "ranks 0, 2, 4, 6, 8, 10, 12, 14 and 32760 more"),
    ],
)
def test_ranks_are_named_as_runs(ranks: list[int], said: str) -> None:
    assert ranks_named(ranks) == said
