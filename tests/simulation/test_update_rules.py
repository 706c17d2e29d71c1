"""Single rules of beginning an update, each in a small story: versions, and who takes part."""

from __future__ import annotations

import pytest

from ckpt_engine.core.problems import internal
from ckpt_engine.machines import events
from ckpt_engine.v1 import manager_pb2
from tests.simulation.members import TrainerShell
from tests.simulation.story import NEW, Problem, Story, outcomes, refused
from tests.simulation.training import Group
from tests.simulation.weights import Source
from tests.simulation.world import Steps


@pytest.fixture
def story() -> Story:
    return Story()


# ------------------------------------------------------------------------------------------------------ versions


def test_versions_count_from_zero_and_rise(story: Story) -> None:
    story.replica()
    group = story.ranks(world_size=3)
    for version in (0, 1):
        report = story.update(group)
        assert report.ok
        assert report.verified
        assert report.identity.version == version
        group.train()
    assert story.update(group, version=40).identity.version == 40
    group.train()
    assert story.update(group).identity.version == 41


def test_a_version_that_goes_backwards_is_refused(story: Story) -> None:
    story.replica()
    group = story.ranks()
    assert story.update(group, version=7).ok
    refused(story.update(group, version=6), Problem.CODE_FAILED_PRECONDITION, "backwards", "new lineage")
    assert story.update(story.ranks("another run"), version=0).ok


def test_no_number_follows_the_highest(story: Story) -> None:
    story.replica()
    group = story.ranks()
    assert story.update(group, version=(1 << 63) - 1).ok
    group.train()
    refused(story.update(group), Problem.CODE_FAILED_PRECONDITION, "no number is left", "new lineage")
    assert story.update(story.ranks("another run")).ok


@pytest.mark.parametrize("seconds", [float("inf"), float("nan"), 1e308, -1.0])
def test_times_that_nobody_can_wait_are_refused(story: Story, seconds: float) -> None:
    agent, group = story.replica(), story.ranks()
    refused(story.update(group, timeout_seconds=seconds), Problem.CODE_INVALID_ARGUMENT, "cannot be waited for")
    manager = story.cluster.manager
    assert manager is not None
    slept = manager.sleep_or_wake(False, [agent.name], seconds=seconds)
    story.wait(0.1)
    refused(slept.value, Problem.CODE_INVALID_ARGUMENT, "cannot be waited for")
    assert story.update(group).ok


def test_a_repetition_leaves_replicas_alone_that_hold_it(story: Story) -> None:
    first = story.replica()
    group = story.ranks(world_size=2)
    assert story.update(group, version=3).ok
    second = story.replica()
    report = story.update(group, version=3)
    assert report.ok
    assert {replica.replica: replica.bytes > 0 for replica in report.replicas} == {first.name: False, second.name: True}


def test_the_same_number_with_other_weights_is_refused_and_touches_nothing(story: Story) -> None:
    agent = story.replica()
    group = story.ranks()
    before = story.update(group, version=3).identity
    group.train()
    refused(story.update(group, version=3), Problem.CODE_FAILED_PRECONDITION, "root", "higher version")
    assert agent.engine is not None
    assert agent.engine.words().identity == before


def test_order_survives_the_manager(story: Story) -> None:
    story.replica()
    group = story.ranks()
    assert story.update(group, version=5).ok
    assert story.cluster.manager is not None
    story.cluster.manager.crash()
    story.start_manager()
    story.wait(6.0)
    group.train()
    refused(story.update(group, version=4), Problem.CODE_FAILED_PRECONDITION, "backwards")
    report = story.update(group)
    assert report.ok
    assert report.identity.version == 6


def test_a_caller_that_leaves_before_the_intent_refuses_the_update(story: Story) -> None:
    """Its weights may change from then on."""
    agent, group = story.replica(), story.ranks(world_size=2)
    first = story.call(group.trainers[0])
    story.call(group.trainers[1])
    manager = story.cluster.manager
    assert manager is not None
    while "sealing" not in manager.machine.status().phase:
        story.wait(0.0005)
    (left,) = [call for call, open_call in manager.calls.items() if open_call.request.rank == 1]
    manager.cancel_call(left)
    story.wait(2.0)
    refused(first[0], Problem.CODE_UNAVAILABLE, "the call of rank 1 was cancelled")
    assert not story.ledger.intents
    assert agent.engine is not None
    assert not agent.engine.words().open


# ------------------------------------------------------------------------------------------------------ gathering


def test_missing_ranks_are_named(story: Story) -> None:
    story.replica()
    group = story.ranks(world_size=3)
    group.trainers[2].crash()
    results = story.call(group.trainers[0])
    story.wait(8.0)
    refused(results[0], Problem.CODE_FAILED_PRECONDITION, "rank 2 has no session", "rank 1 has not called")
    assert list(results[0].ranks) == [1, 2]


def test_ranks_that_disagree_are_named(story: Story) -> None:
    story.replica()
    group = story.ranks(world_size=2)
    first = story.call(group.trainers[0], version=1)
    second = story.call(group.trainers[1], version=2)
    story.wait(2.0)
    refused(first[0], Problem.CODE_INVALID_ARGUMENT, "rank 0: 1, rank 1: 2")
    assert first == second


def test_tables_that_do_not_fit_are_told_to_the_caller(story: Story) -> None:
    story.replica()
    sources = [Source("run", rank, 2, "live", model) for rank, model in enumerate(("model A", "model B"))]
    trainers = [TrainerShell(story.cluster, source, f"session {source.rank}") for source in sources]
    group = Group("run", 1, trainers)
    group.train()
    story.wait(1.0)
    refused(story.update(group), Problem.CODE_INVALID_ARGUMENT, "different models")


def test_a_rank_that_cannot_seal_is_named_and_no_replica_is_touched(
    story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent, group = story.replica(), story.ranks(world_size=3)
    assert story.update(group).ok
    original = TrainerShell._seal

    def seal(self: TrainerShell, task: events.SealSource) -> Steps:
        if self.source.rank == 1:
            yield 0.01
            raise internal("its memory is gone")
        return (yield from original(self, task))

    monkeypatch.setattr(TrainerShell, "_seal", seal)
    group.train()
    problem = story.update(group)
    refused(problem, Problem.CODE_INTERNAL, "its memory is gone")
    assert list(problem.ranks) == [1]
    assert agent.machine.replica.serving()


def test_ranks_that_do_not_seal_are_named_with_the_time_that_they_had(
    story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    story.replica()
    group = story.ranks(world_size=3)
    original = TrainerShell._seal

    def seal(self: TrainerShell, task: events.SealSource) -> Steps:
        if self.source.rank == 1:
            yield 60.0
        return (yield from original(self, task))

    monkeypatch.setattr(TrainerShell, "_seal", seal)
    seconds = story.deadlines.seal
    problem = story.update(group, 6.0)
    refused(problem, Problem.CODE_DEADLINE_EXCEEDED, "rank 1", f"had not sealed the weights {seconds:.0f}.")
    assert list(problem.ranks) == [1]


def test_replicas_that_are_wanted_must_be_there(story: Story) -> None:
    group = story.ranks()
    refused(story.update(group), Problem.CODE_FAILED_PRECONDITION, "0 replicas", "ckpt-engine agent")
    judge = story.replica(manager_pb2.MODE_COLOCATED)
    refused(story.update(group), Problem.CODE_FAILED_PRECONDITION, "0 replicas")
    first = story.replica()
    refused(story.update(group, min_replicas=2), Problem.CODE_FAILED_PRECONDITION, "1 replicas", "2 are required")
    refused(story.update(group, replicas=["nobody"]), Problem.CODE_NOT_FOUND, "'nobody'", first.name)
    refused(story.update(group, replicas=[judge.name]), Problem.CODE_FAILED_PRECONDITION, "colocated")
    second = story.replica()
    assert outcomes(story.update(group, replicas=[second.name])) == {second.name: NEW}
    assert outcomes(story.update(group)) == {first.name: NEW, second.name: NEW}


def test_another_process_cannot_take_a_connected_rank(story: Story) -> None:
    group = story.ranks()
    again = story.join_group("run", "live", "model A", 1)
    story.wait(20.0)
    ended = again.trainers[0].ended
    assert ended is not None
    refused(ended, Problem.CODE_ABORTED, "rank 0", "connected")
    assert group.trainers[0].ended is None


def test_another_process_takes_the_rank_of_a_dead_one(story: Story) -> None:
    story.replica()
    story.ranks().trainers[0].crash()
    story.wait(0.5)
    assert story.update(story.ranks()).ok
