"""What a replica is to serve, what it holds, and what is told and done as long as these differ."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from ckpt_engine.core.deadlines import CATCH_UP_ATTEMPTS
from ckpt_engine.core.problems import data_loss
from ckpt_engine.core.version import Version
from ckpt_engine.machines import events
from ckpt_engine.machines.manager.reconcile import Drift
from ckpt_engine.v1 import manager_pb2
from tests.simulation.manager import ManagerShell
from tests.simulation.story import Problem, Story, refused


@pytest.fixture
def story() -> Story:
    return Story()


class Planner:
    """Has every plan refused while `broken`: a fake, since no plan of a sound world fails. attempts: when, seconds."""

    def __init__(self, story: Story, monkeypatch: pytest.MonkeyPatch) -> None:
        self.broken = False
        self.attempts: list[float] = []
        self.drifts: list[Drift] = []  # as each plan is refused, of all replicas
        original = ManagerShell._compile

        def compile(shell: ManagerShell, task: events.CompilePlans) -> Any:
            if self.broken:
                self.attempts.append(story.world.now)
                self.drifts += shell.machine.drifts().values()
                raise data_loss("the plan was made to fail")
            return original(shell, task)

        monkeypatch.setattr(ManagerShell, "_compile", compile)


def drift_of(story: Story, name: str) -> Drift | None:
    return story.cluster.manager.machine.drifts().get(name)  # type: ignore[union-attr]


def status_of(story: Story, name: str) -> manager_pb2.ReplicaStatus:
    replicas = story.cluster.manager.machine.status().replicas  # type: ignore[union-attr]
    return next(replica for replica in replicas if replica.name == name)


def test_attempts_go_on_with_longer_and_longer_waits_until_one_succeeds(
    story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    planner = Planner(story, monkeypatch)
    story.replica()
    identity = story.update(story.ranks(kind="snapshot")).identity
    planner.broken = True
    story.join_replica(manager_pb2.MODE_STANDALONE)
    late = list(story.agents.values())[-1]
    story.until(lambda: len(planner.attempts) > 2 * CATCH_UP_ATTEMPTS, 600.0)
    waits = [after - before for before, after in pairwise(planner.attempts)]
    assert all(longer > 1.5 * shorter for shorter, longer in pairwise(waits))
    story.wait(1.0)
    drift = drift_of(story, late.name)
    assert drift is not None
    assert drift.desired == Version.of(identity)
    assert "attempts to bring it failed: the plan was made to fail" in drift.reason
    assert 0 < drift.next_attempt < 2.5 * waits[-1]  # type: ignore[operator]
    assert drift.seconds >= sum(waits)
    told = status_of(story, late.name)
    assert told.desired == identity
    assert told.drift.reason == drift.reason
    assert len(planner.drifts) == len(planner.attempts)
    for during in planner.drifts:
        assert during.next_attempt is None, "no attempt is told to come while one runs"
        assert during.reason.startswith(f"bringing up {late.name}")
    planner.broken = False
    story.wait(3 * waits[-1])
    assert story.held_by(late) == identity
    assert drift_of(story, late.name) is None
    assert not status_of(story, late.name).HasField("drift")


def test_the_wait_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    story = Story(catch_up_retry_most=4.0)
    planner = Planner(story, monkeypatch)
    story.replica()
    story.update(story.ranks(kind="snapshot"))
    planner.broken = True
    story.join_replica(manager_pb2.MODE_STANDALONE)
    story.wait(120.0)
    waits = [after - before for before, after in pairwise(planner.attempts)]
    assert len(waits) > 15
    assert max(waits) < 4.0 * 1.2 + 1.0


def test_a_replica_that_serves_is_not_tried_for_ever_and_what_is_new_lets_it_be_tried_again(
    story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It serves the version before: it was away when this one came."""
    planner = Planner(story, monkeypatch)
    agent, _ = story.replica(), story.replica()
    group = story.ranks(kind="snapshot")
    before = story.update(group).identity
    cuts = {(agent.name, True), (agent.name, False)}
    story.faults.cuts |= cuts
    group.train()
    identity = story.update(group, 30.0, min_replicas=1).identity
    planner.broken = True
    story.faults.cuts -= cuts
    story.wait(120.0)
    assert story.held_by(agent) == before
    assert len(planner.attempts) == CATCH_UP_ATTEMPTS
    drift = drift_of(story, agent.name)
    assert drift is not None
    assert f"replica retry {agent.name}" in drift.reason
    assert drift.next_attempt is None
    planner.broken = False
    story.wait(120.0)
    assert story.held_by(agent) == before
    story.relay()
    story.wait(5.0)
    assert story.held_by(agent) == identity


def test_a_join_that_failed_is_repeated_and_told_as_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """What relays hold cannot be joined once, and the ranks have gone. A fake: no join of a sound world fails."""
    original = ManagerShell._join
    failed: list[float] = []

    def join(shell: ManagerShell, task: events.JoinSources) -> Any:
        if not failed:
            failed.append(story.world.now)
            raise data_loss("the join was made to fail")
        return original(shell, task)

    story = Story(catch_up_retry=20.0)
    story.relay()
    story.replica(), story.replica()
    group = story.ranks()
    identity = story.trained(group).identity
    story.end_group(group, in_good_order=True)
    monkeypatch.setattr(ManagerShell, "_join", join)
    late = story.replica()

    def reason() -> str:
        drift = drift_of(story, late.name)
        return "" if drift is None else drift.reason

    story.until(lambda: "could not be joined" in reason())
    assert failed
    assert "the join was made to fail" in reason()
    refused(story.retry(late.name), Problem.CODE_FAILED_PRECONDITION, "could not be joined", "tried again")
    story.wait(60.0)
    assert story.held_by(late) == identity
    assert drift_of(story, late.name) is None


def test_a_name_that_comes_again_drifts_from_then_on(story: Story) -> None:
    """Its drift before it left is not counted."""
    story.replica()
    story.update(story.ranks())
    late = story.replica()
    story.wait(60.0)
    assert drift_of(story, late.name).seconds > 50  # type: ignore[union-attr]
    story.evict(late.name)
    story.wait(1.0)
    drift = drift_of(story, late.name)
    assert drift is None or drift.seconds < 2, "its agent came back"


def test_each_reason_is_told(story: Story) -> None:
    agent = story.replica()
    assert drift_of(story, agent.name) is None, "nothing is meant for it"
    group = story.ranks()
    identity = story.update(group).identity
    late = story.replica()
    drift = drift_of(story, late.name)
    assert drift is not None
    assert "no source of it stays sealed" in drift.reason
    assert drift.next_attempt is None
    late.crash()
    story.wait(1.0)
    drift = drift_of(story, late.name)
    assert drift is not None
    assert "its agent is not connected" in drift.reason
    assert drift_of(story, agent.name) is None
    assert status_of(story, agent.name).desired == identity
