"""Dry runs: what they tell, and that nothing comes of them."""

from __future__ import annotations

from typing import Any

import pytest

from ckpt_engine.machines import events
from ckpt_engine.v1 import manager_pb2
from tests.simulation.manager import ManagerShell
from tests.simulation.story import NEW, OLD, Problem, Story, outcomes, refused

PLANNED = manager_pb2.OUTCOME_PLANNED


class Watched:
    """All that the manager commands: `sent` by the kind of message, `tasks` by the kind of task."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sent: set[type] = set()
        self.tasks: set[type] = set()
        original = ManagerShell.perform

        def perform(shell: ManagerShell, command: Any) -> None:
            if isinstance(command, events.Send):
                self.sent.add(type(command.body))
            elif isinstance(command, events.Run):
                self.tasks.add(type(command.task))
            original(shell, command)

        monkeypatch.setattr(ManagerShell, "perform", perform)


@pytest.fixture
def story() -> Story:
    return Story()


def test_it_prepares_and_plans_and_no_more(story: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = story.replica(), story.replica()
    group = story.ranks(world_size=2)
    watched = Watched(monkeypatch)
    report = story.update(group, dry_run=True)
    assert (report.dry_run, report.ok) == (True, True)
    assert outcomes(report) == {first.name: PLANNED, second.name: PLANNED}
    assert (report.identity.lineage, report.identity.version, report.identity.root) == ("run", 0, b"")
    assert manager_pb2.Prepare in watched.sent
    assert not watched.sent & {manager_pb2.Seal, manager_pb2.Install, manager_pb2.FillRelay}
    assert watched.tasks <= {events.CompilePlans, events.SpendEpoch}
    assert (story.ledger.intents, story.ledger.reports, story.ledger.highest) == ({}, {}, {})
    assert story.held_by(first) is None
    report = story.update(group)
    assert (report.identity.version, report.dry_run) == (0, False), "no number was used"
    assert outcomes(report) == {first.name: NEW, second.name: NEW}


def test_it_says_why_others_would_be_left_out(story: Story) -> None:
    first, held, misfit, away = (story.replica() for _ in range(4))
    assert misfit.engine is not None
    misfit.engine.models = {"model B"}
    group = story.ranks()
    story.hold(held.name)
    away.crash()
    story.wait(1.0)
    report = story.update(group, seconds=30.0, dry_run=True)
    told = {each.replica: each for each in report.replicas}
    assert not report.ok, "the update would be for some of them only"
    assert told.keys() == {first.name, held.name, misfit.name, away.name}
    assert told[first.name].outcome == PLANNED
    assert not told[first.name].HasField("problem")
    assert told[held.name].operator_hold
    assert "held by an operator" in told[held.name].problem.message
    assert "cannot load model A" in told[misfit.name].problem.message
    assert told[away.name].outcome == manager_pb2.OUTCOME_NOT_REACHED
    assert story.update(group, seconds=30.0, dry_run=True, min_replicas=1).ok


def test_one_that_would_be_refused_says_so(story: Story) -> None:
    agent, _ = story.replica(), story.replica()
    group = story.ranks()
    story.hold(agent.name)
    report = story.update(group, min_replicas=2, dry_run=True)
    assert not report.ok
    (warning,) = report.warnings
    assert warning.startswith("the update would be refused: 1 replicas can be updated, 2 are required")
    assert sorted(outcomes(report).values()) == [manager_pb2.OUTCOME_QUARANTINED, PLANNED]
    refused(
        story.update(group, replicas=[agent.name], dry_run=True),
        Problem.CODE_FAILED_PRECONDITION,
        "held by an operator",
    )
    refused(story.update(group, replicas=["nobody"], dry_run=True), Problem.CODE_NOT_FOUND, "nobody")


def test_a_number_that_an_update_could_not_have_is_refused(story: Story) -> None:
    story.replica()
    group = story.ranks()
    story.update(group, version=5)
    refused(story.update(group, version=4, dry_run=True), Problem.CODE_FAILED_PRECONDITION, "goes backwards")


def test_all_ranks_must_want_it(story: Story) -> None:
    story.replica()
    group = story.ranks(world_size=2)
    one = story.call(group.trainers[0], dry_run=True)
    other = story.call(group.trainers[1])
    story.wait(5.0)
    for result in (one[0], other[0]):
        refused(result, Problem.CODE_INVALID_ARGUMENT, "dry_run")


def test_what_is_served_and_what_is_to_be_served_stays(story: Story) -> None:
    """Also what waits for the version that it would have is told nothing of it."""
    agent = story.replica()
    group = story.ranks()
    before = story.update(group).identity
    manager = story.cluster.manager
    assert manager is not None
    waiting = manager.wait_for(1, "run", 30.0)
    group.train()
    assert outcomes(story.update(group, dry_run=True)) == {agent.name: PLANNED}
    assert story.held_by(agent) == before
    (replica,) = manager.machine.status().replicas
    assert (replica.desired, replica.HasField("drift"), replica.serving) == (before, False, True)
    refused(waiting.value, Problem.CODE_NOT_FOUND, "no update to version 1")
    assert outcomes(story.last_report()) == {agent.name: NEW}


def test_a_replica_that_cannot_read_the_trainer_waits_for_a_relay() -> None:
    story = Story(far=True)
    far = next(host for host in story.hosts if host.name != story.hosts[0].name)
    near, distant = story.replica(host=story.hosts[0]), story.replica(host=far)
    group = story.ranks(hosts=[story.hosts[0]])
    report = story.update(group, dry_run=True, min_replicas=1)
    assert outcomes(report)[near.name] == PLANNED
    assert outcomes(report)[distant.name] != PLANNED
    story.join_relay(host=story.hosts[0])
    story.join_relay(host=far)
    story.wait(2.0)
    report = story.update(group, dry_run=True)
    told = {each.replica: each for each in report.replicas}
    assert told[distant.name].outcome == PLANNED
    assert told[distant.name].problem.message.startswith("only relays near it can bring it: ")
    assert outcomes(story.trained(group, seconds=30.0))[distant.name] in (NEW, OLD)
