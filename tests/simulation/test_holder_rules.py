"""Holders, records and the two kinds of fences, each rule in a small story."""

from __future__ import annotations

import pytest

from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.machines.manager.update import Over, SealJob
from ckpt_engine.v1 import manager_pb2, weights_pb2
from tests.simulation.holders import HolderShell
from tests.simulation.members import AgentShell
from tests.simulation.story import NEW, Problem, Story, outcomes, refused
from tests.simulation.training import Group


def ended_run(story: Story) -> weights_pb2.Identity:
    """One that nobody can read any more."""
    story.replica()
    group = story.ranks(kind="live")
    identity: weights_pb2.Identity = story.update(group).identity
    story.end_group(group, in_good_order=True)
    story.wait(2.0)
    return identity


def holder_of(story: Story, identity: weights_pb2.Identity, lies: bool = False) -> HolderShell:
    holder = story.join_holder(lies)
    story.wait(0.5)
    holder.hold(identity)
    return holder


@pytest.mark.parametrize("restarted", [False, True])
def test_a_late_replica_is_read_from_a_holder_also_when_the_manager_lost_its_blobs(
    story: Story, restarted: bool
) -> None:
    identity = ended_run(story)
    holder = holder_of(story, identity)
    story.wait(1.0)
    if restarted:
        story.restart_manager()
    late = story.replica()
    story.wait(3.0)
    assert story.held_by(late) == identity
    assert not holder.problems


def test_who_lies_about_a_version_is_told_and_does_not_stand_in_the_way(story: Story) -> None:
    identity = ended_run(story)
    liar = holder_of(story, identity, lies=True)
    late = story.replica()
    story.wait(3.0)
    assert story.held_by(late) is None
    refused(liar.problems[0], Problem.CODE_DATA_LOSS, "other weights")
    holder_of(story, identity)
    story.wait(6.0)
    assert story.held_by(late) == identity


def test_a_holder_that_ends_is_forgotten_with_what_it_held(story: Story) -> None:
    holder = holder_of(story, ended_run(story))
    story.wait(1.0)
    assert story.cluster.manager is not None
    machine = story.cluster.manager.machine
    assert [(each.kind, each.connected, len(each.held)) for each in machine.status().holders] == [("holder", True, 1)]
    holder.crash()
    story.wait(1.0)
    assert [each.connected for each in machine.status().holders] == [False]
    story.wait(story.deadlines.forget)
    assert not machine.status().holders
    assert "holder keeper-0" not in machine.blobs_in_use()


def another_engine(story: Story, agent: AgentShell) -> None:
    assert agent.engine is not None
    agent.engine.kill()
    agent.engine_died()
    story.start_engine(agent)
    story.wait(2.1)


def count_seals(story: Story, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of those who seal from now on."""
    asked: list[str] = []
    for group in story.groups:
        for trainer in group.trainers:
            seal = trainer._seal
            monkeypatch.setattr(trainer, "_seal", lambda task, t=trainer, s=seal: (asked.append(t.name), s(task))[1])
    return asked


@pytest.mark.parametrize("sealed_since", [False, True])
def test_ranks_that_sealed_another_version_since_digest_all_again(
    story: Story, monkeypatch: pytest.MonkeyPatch, sealed_since: bool
) -> None:
    agent, group = story.replica(), story.ranks(kind="snapshot")
    identity = story.update(group).identity
    if sealed_since:
        _refused_after_sealing(story, group, monkeypatch)
    monkeypatch.setattr(story.world, "chance", lambda share: share == 0.5)  # needs are unions of recorded cells
    asked = count_seals(story, monkeypatch)
    another_engine(story, agent)
    story.wait(4.0)
    assert story.held_by(agent) == (None if sealed_since else identity)
    assert bool(asked) == sealed_since


def test_non_members_are_not_sent_to_ranks_that_sealed_another_version_since(
    story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    story.replica()
    group = story.ranks(kind="snapshot")
    identity = story.update(group).identity
    request = manager_pb2.LocateVersionRequest(lineage=identity.lineage, version=identity.version)
    assert story.cluster.manager is not None
    machine = story.cluster.manager.machine
    found = machine.located(request)
    assert (found.identity, len(found.tables)) == (identity, 1)
    _refused_after_sealing(story, group, monkeypatch)
    with pytest.raises(CkptEngineError, match="holds version 0"):
        machine.located(request)


def _refused_after_sealing(story: Story, group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """An update that ends between sealing and intent; its ranks have other weights then."""
    with monkeypatch.context() as patch:
        patch.setattr(SealJob, "_next_job", lambda self, way, now: Over(Problem(message="refused here")))
        group.train()
        assert isinstance(story.update(group), Problem)


def test_preparing_for_another_version_does_not_turn_an_install_back(story: Story) -> None:
    agent, group = story.replica(), story.ranks()
    (result,) = [story.call(group.trainers[0])]
    prepared = 0
    for _ in range(3000):
        story.wait(0.002)
        manager = story.cluster.manager
        assert manager is not None
        operation = agent.machine.replica.operation
        if operation is not None and operation.kind == "install":
            manager.prepare_beside(agent.name)
            prepared += 1
        if result:
            break
    assert prepared > 3
    report = result[0]
    assert isinstance(report, manager_pb2.UpdateReport)
    assert outcomes(report) == {agent.name: NEW}
    assert agent.machine._filled > report.fence.epoch, "what was filled since has higher epochs than the install"
