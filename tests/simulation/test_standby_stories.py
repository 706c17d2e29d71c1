"""Managers that share a ledger, as stories: what the next leader goes on with, and what a former one can do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ckpt_engine.core.version import Version
from ckpt_engine.machines import events
from ckpt_engine.machines.manager.versions import Versions
from ckpt_engine.v1 import manager_pb2
from tests.simulation.manager import ManagerShell
from tests.simulation.story import NEW, Story, outcomes
from tests.simulation.terms import TERM
from tests.simulation.test_deployment_stories import begun
from tests.simulation.training import Group

Action = manager_pb2.SteerDeploymentRequest
TAKEOVER = TERM + 6.0
"""Seconds after which another manager leads and all have dialled in."""


class Watched(Story):
    """Remembers which ranks were told to seal, by the manager's generation and whether they were to keep."""

    def __init__(self) -> None:
        self.seals: list[tuple[int, bool]] = []
        super().__init__(standby=True)
        look = self.invariants.watch

        def watch(manager: ManagerShell, command: Any) -> None:
            look(manager, command)
            if isinstance(command, events.Send) and isinstance(command.body, manager_pb2.Seal):
                self.seals.append((manager.generation, command.body.keep))

        self.invariants.watch = watch  # type: ignore[method-assign]
        self.wait(1.0)

    @property
    def leader(self) -> ManagerShell:
        assert self.cluster.manager is not None
        return self.cluster.manager

    def lost_after_its_intent(self, group: Group) -> list[Any]:
        """The calls of a group whose manager is killed once its version is committed; returns when another leads."""
        known = len(self.ledger.intents)
        results = [self.call(trainer) for trainer in group.trainers]
        self.until(lambda: len(self.ledger.intents) > known)
        self.kill_manager()
        self.seals.clear()
        self.wait(TAKEOVER + 4.0)
        assert all(results), "the calls end"
        return [result[0] for result in results]

    def lost_in_a_canary(self) -> list[Any]:
        """The call of a canary of three replicas whose manager is killed; returns when another leads."""
        group = begun(self, 3)
        group.train()
        result = self.call(group.trainers[0], strategy="canary", timeout_seconds=60.0)
        self.until(lambda: self.deployments, 20.0)
        self.kill_manager()
        self.wait(TAKEOVER + 3.0)
        return result


@pytest.fixture
def story() -> Watched:
    return Watched()


@pytest.mark.parametrize("kind", ["live", "snapshot"])
def test_a_committed_version_is_not_sealed_again(story: Watched, kind: str) -> None:
    agents, group = [story.replica(), story.replica()], story.ranks(world_size=2, kind=kind)
    for report in story.lost_after_its_intent(group):
        assert report.ok, report
        assert report.identity.version == 0
        assert outcomes(report) == {agent.name: NEW for agent in agents}
    assert story.leader.generation == 2
    assert story.seals == []
    assert len(set(story.ledger.intents.values())) == 1
    assert story.trained(group).identity.version == 1
    assert story.seals, "what is new is sealed"


def test_without_the_rule_it_is_sealed_again(story: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Versions, "resumed", lambda self, goal: None)
    story.replica()
    (report,) = story.lost_after_its_intent(story.ranks())
    assert report.ok
    assert story.seals


def test_a_version_that_was_not_committed_is_sealed_again(story: Watched) -> None:
    agent, group = story.replica(), story.ranks()
    assert story.update(group).ok
    group.train()
    story.seals.clear()
    result = story.call(group.trainers[0])
    story.until(lambda: story.seals)
    story.kill_manager()
    story.wait(TAKEOVER + 4.0)
    assert outcomes(result[0]) == {agent.name: NEW}
    assert result[0].identity.version == 1
    assert {generation for generation, _ in story.seals} == {1, 2}


def test_a_newer_commit_for_a_replica_is_not_passed_over(story: Watched) -> None:
    """What a call joins must be what all of its replicas are to serve."""
    story.replica()
    group = story.ranks(kind="snapshot")
    assert story.update(group).ok
    (content,) = story.leader.machine._state.versions.contents.values()
    state = story.leader.machine._state
    goal = story.leader.machine._turns.gathers
    assert not goal.by_lineage
    assert content.fill > 0
    story.ledger.desired["replica-0"] = replace(
        story.ledger.desired[""], epoch=99, identity=Version("other", 3, bytes(32))
    )
    assert state.versions.commit_of("replica-0") is not None
    story.kill_manager()
    story.wait(TAKEOVER)
    request = manager_pb2.UpdateWeightsRequest(version=0)
    request.sealed.cluster, request.sealed.epoch = story.ledger.cluster, content.fill
    story.seals.clear()
    trainer = group.trainers[0]
    story.world.spawn(trainer.update(request, 20.0))
    story.wait(3.0)
    assert story.seals


def test_what_ranks_keep_is_read_by_the_record_of_the_ledger(story: Watched) -> None:
    """A late replica is brought to what a former leader committed, and no rank digests anything again."""
    story.replica()
    group = story.ranks(kind="snapshot", world_size=2)
    report = story.update(group)
    story.kill_manager()
    story.wait(TAKEOVER)
    story.seals.clear()
    story.world.chance = lambda probability: probability > 0  # type: ignore[method-assign]  # needs are not cut finer
    late = story.replica()
    story.wait(5.0)
    assert story.held_by(late) == report.identity
    assert story.seals == []


@pytest.mark.parametrize("damage", ["lost", "other"])
def test_without_a_record_that_hashes_to_the_root_ranks_digest_again(story: Watched, damage: str) -> None:
    story.replica()
    group = story.ranks(kind="snapshot", world_size=2)
    report = story.update(group)
    ((identity, (fill, record)),) = story.ledger.seals.items()
    story.ledger.seals = {} if damage == "lost" else {identity: (fill, dict.fromkeys(record, "other weights"))}
    story.kill_manager()
    story.wait(TAKEOVER)
    story.seals.clear()
    late = story.replica()
    story.wait(5.0)
    assert story.held_by(late) == report.identity
    assert (2, True) in story.seals


def test_ranks_that_sealed_another_version_since_are_not_believed(story: Watched) -> None:
    """The former leader had them seal what it did not commit."""
    story.replica()
    group = story.ranks(kind="snapshot")
    assert story.update(group).ok
    story.seals.clear()
    group.train()
    trainer = group.trainers[0]
    before = trainer._sealed_epoch
    trainer_call = story.call(trainer)
    story.until(lambda: trainer._sealed_epoch > before and trainer.sealed_in_call)
    story.kill_manager()
    trainer.cluster.several = False  # its caller gives up
    story.wait(TAKEOVER)
    assert trainer_call
    (content,) = story.leader.machine._state.versions.contents.values()
    assert content.identity.number == 0
    assert content.published is None


def test_a_former_leader_that_wakes_does_nothing(story: Watched) -> None:
    agent, group = story.replica(), story.ranks()
    former = story.leader
    former.stop_for(TERM + 7.0)
    story.wait(TAKEOVER)
    assert story.leader is not former
    assert former.alive
    assert story.update(group).ok
    commands: list[object] = []
    former.watch = lambda manager, command: commands.append(command)
    story.wait(5.0)
    assert not former.alive
    assert commands == []
    assert story.held_by(agent) is not None


def test_a_call_goes_on_to_wait_for_its_deployment(story: Watched) -> None:
    """The leader is lost in the middle of a canary: the call learns what a person decides, and nothing is deployed
    twice."""
    result = story.lost_in_a_canary()
    assert not result
    assert len(story.deployments) == 1
    story.deploy(Action.ACTION_APPROVE)
    story.wait(10.0)
    assert result[0].ok, result
    assert result[0].identity.version == 1
    assert set(outcomes(result[0])) == set(story.agents)
    assert [row.state for row in story.ledger.deployments.values()] == [manager_pb2.Deployment.STATE_DEPLOYED]


def test_a_call_learns_that_its_deployment_was_undone(story: Watched) -> None:
    result = story.lost_in_a_canary()
    story.deploy(Action.ACTION_UNDO, reason="it babbles")
    story.wait(10.0)
    assert not result[0].ok
    assert "it babbles" in result[0].deployment.reason
    assert len(story.ledger.deployments) == 1
