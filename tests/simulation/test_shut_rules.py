"""Workers that cannot open what they are offered: before anything is paused, and then they take another way."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from ckpt_engine.core.deadlines import Deadlines
from ckpt_engine.core.offers import unopened
from ckpt_engine.machines.agent.ready import Readying
from ckpt_engine.machines.agent.state import AgentReplica
from ckpt_engine.machines.manager.members import ShutWays
from ckpt_engine.v1 import manager_pb2, weights_pb2, worker_pb2
from tests.simulation.mistakes import Mistake, Patch, must_be_noticed, name_of
from tests.simulation.scenario import Slant, run_seed
from tests.simulation.story import NEW, OLD, QUARANTINED, Story, outcomes

NEVER = manager_pb2.PREFETCH_NEVER


def shut_to_the_trainer(story: Story, rank: int = 0) -> None:
    """From now on the workers of every replica that there is may not open what the trainer offers."""
    tables = [each for each, source in story.truth.sources.items() if source.rank == rank]
    story.faults.cannot_open = 1e-9
    for agent in story.agents.values():
        assert agent.engine is not None
        agent.engine._shut = {(worker.boot_id, table): True for worker in agent.engine.workers for table in tables}


def test_who_cannot_open_the_trainer_is_told_and_reads_a_relay_at_the_next_update(
    story: Story, sources: set[str]
) -> None:
    agent, group = story.replica(), story.ranks()
    story.relay()
    assert story.trained(group, prefetch=NEVER).ok
    assert agent.engine is not None
    pauses: list[bool] = []
    shut_to_the_trainer(story)
    # A plan that is ready is open already: the worker is to open it anew.
    for worker in agent.engine.workers:
        worker.ready = frozenset()
    agent.machine.replica.ready.clear()
    original = agent.engine._work
    agent.engine._work = lambda task: (pauses.append(type(task).__name__ == "PauseEngine"), original(task))[1]  # type: ignore[method-assign]
    report = story.trained(group, prefetch=NEVER)
    (outcome,) = report.replicas
    assert (outcome.outcome, any(pauses)) == (OLD, False), "it goes on with what it has, and was never paused"
    assert "does not let this worker open shared_memory" in outcome.problem.message
    assert story.cluster.manager is not None
    (status,) = story.cluster.manager.machine.status().replicas
    assert {each.transport for each in status.unopened} == {"shared_memory"}
    sources.clear()
    report = story.trained(group)
    assert outcomes(report) == {agent.name: NEW}
    assert sources == {"relay relay-0"}


def test_who_has_no_other_way_tries_the_same_one_at_each_update(story: Story) -> None:
    agent, group = story.replica(), story.ranks()
    shut_to_the_trainer(story)
    for _ in range(2):
        report = story.trained(group)
        assert isinstance(report, manager_pb2.UpdateReport), "it was tried"
        (outcome,) = report.replicas
        assert outcome.outcome == QUARANTINED, "a fresh engine holds nothing"
        assert "does not let this worker open shared_memory" in outcome.problem.message
    story.faults.cannot_open = 0.0
    assert outcomes(story.trained(group)) == {agent.name: NEW}


def test_who_is_near_a_relay_that_may_not_be_filled_tries_the_same_way_again(story: Story) -> None:
    agent, group = story.replica(), story.ranks()
    story.relay()
    shut_to_the_trainer(story)
    assert outcomes(story.trained(group, prefetch=NEVER)) == {agent.name: QUARANTINED}
    story.faults.cannot_open = 0.0
    assert outcomes(story.trained(group, prefetch=NEVER)) == {agent.name: NEW}


def not_opened(boot_id: bytes, rank: int = 1) -> weights_pb2.Unopened:
    region = weights_pb2.Region(id=1, transport="shared_memory", locator=b"there")
    plan = weights_pb2.WorkerPlan(sources=[weights_pb2.PlanSource(source="rank 3", regions=[region])])
    told = unopened(rank, region, plan, "no")
    told.boot_id = boot_id
    return told


def test_it_is_known_of_a_process_and_of_memory() -> None:
    ways, told = ShutWays(), not_opened(b"\1")
    assert (told.worker_rank, told.source) == (1, "rank 3")
    before = [manager_pb2.WorkerStatus(rank=rank, boot_id=bytes([rank])) for rank in (0, 1)]
    ways.note(before, [told])
    assert ways.of(b"\0") == ()
    assert [each.reason for each in ways.of(b"\1")] == ["no"]
    again = [manager_pb2.WorkerStatus(rank=1, boot_id=b"other")]
    assert ways.unopened([b"other"]) == []
    ways.note(again, [])
    assert ways.of(b"\1") == (), "that process has gone"
    ways.note(again, [told])
    assert ways.of(b"other") == (), "another process of this rank told it"
    ways.note(before, [not_opened(b"other")])
    assert ways.of(b"other"), "it is known before its worker is"
    assert (ways.forget(), ways.forget()) == (True, False)
    assert ways.of(b"other") == ()


def test_what_a_worker_tells_is_of_its_process_and_stays_told_when_it_is_asked_again() -> None:
    found: dict[int, Sequence[weights_pb2.Unopened]] = {}
    readying = Readying(AgentReplica("a", manager_pb2.MODE_STANDALONE, Deadlines(), []), manager_pb2.Install(), found)

    def tell(boot_id: bytes, *told: weights_pb2.Unopened) -> list[bytes]:
        ready = worker_pb2.WorkerReady(unopened=told)
        readying.reply_to(worker_pb2.WorkerRequest(rank=1, boot_id=boot_id, ready=ready), {}, 0.0, 1.0)
        return [each.boot_id for each in found[1]]

    assert tell(b"first", not_opened(b"")) == [b"first"]
    assert tell(b"first") == [b"first"], "its plan is ready, so it opened nothing more"
    assert tell(b"first", not_opened(b"")) == [b"first"]
    assert tell(b"second") == [], "that process has gone"


def what_leaves_no_way_is_forgotten(patch: Patch) -> None:
    """A replica is never asked again to open what it once could not."""
    patch.setattr(ShutWays, "forget", lambda self: False)


def what_could_not_be_opened_is_remembered(patch: Patch) -> None:
    """It is told to open the same thing at each update."""
    patch.setattr(ShutWays, "note", lambda self, workers, told: None)


def who_cannot_open_is_not_paused(patch: Patch) -> None:
    """The agent goes on although a worker is not ready."""
    patch.setattr(Readying, "ended", lambda self, done, now, left: None)


def test_a_story_notices_without_memory(story: Story, sources: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    what_could_not_be_opened_is_remembered(monkeypatch)
    with pytest.raises(AssertionError):
        test_who_cannot_open_the_trainer_is_told_and_reads_a_relay_at_the_next_update(story, sources)


def test_a_story_notices_without_another_try(story: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    what_leaves_no_way_is_forgotten(monkeypatch)
    with pytest.raises(AssertionError):
        test_who_has_no_other_way_tries_the_same_one_at_each_update(story)


@pytest.mark.parametrize("mistake", [who_cannot_open_is_not_paused], ids=name_of)
def test_the_simulation_notices_without(mistake: Mistake, monkeypatch: pytest.MonkeyPatch) -> None:
    must_be_noticed(mistake, monkeypatch, Slant(relays=True, worse={"cannot_open": 0.3}))


@pytest.mark.parametrize("seed", range(6))
def test_it_gets_well_where_workers_could_not_open_all(seed: int) -> None:
    run_seed(seed, crashes=True, slant=Slant(relays=True, worse={"cannot_open": 0.3}))
