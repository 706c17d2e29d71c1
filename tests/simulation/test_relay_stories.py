"""Relays in updates: filled between sealing and intent, left out when they fail; each rule in a small story."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ckpt_engine.core.problems import data_loss
from ckpt_engine.machines import events
from ckpt_engine.v1 import manager_pb2
from tests.simulation.manager import Ledger
from tests.simulation.story import NEW, Problem, Story, outcomes, refused

ALWAYS, NEVER, HELD = manager_pb2.PREFETCH_ALWAYS, manager_pb2.PREFETCH_NEVER, manager_pb2.UNTIL_HELD


def test_several_replicas_of_a_host_read_what_a_relay_brought_once(story: Story, sources: set[str]) -> None:
    relay, agents, group = story.relay(), [story.replica(), story.replica()], story.ranks(world_size=2)
    for count in range(1, 4):
        report = story.trained(group)
        assert report.ok
        assert not report.held
        (told,) = report.relays
        assert told.relay == "relay relay-0"
        assert told.filled.bytes
        assert list(told.replicas) == sorted(agent.name for agent in agents)
        assert "2 replicas would read the same memory" in report.prefetch
        assert relay.fills == count
        assert sources == {"relay relay-0"}


def test_one_replica_alone_reads_the_trainer_unless_a_relay_is_asked_for(story: Story, sources: set[str]) -> None:
    relay, _, group = story.relay(), story.replica(), story.ranks()
    report = story.trained(group)
    assert report.ok
    assert not report.relays
    assert "alone reads the trainer's memory" in report.prefetch
    assert sources == {"rank 0"}
    sources.clear()
    assert story.trained(group, prefetch=ALWAYS).ok
    assert sources == {"relay relay-0"}
    assert relay.fills == 1


def test_never_fills_no_relay(story: Story) -> None:
    relay, group = story.relay(), story.ranks()
    story.replica(), story.replica()
    report = story.trained(group, prefetch=NEVER)
    assert report.ok
    assert "prefetch is 'never'" in report.prefetch
    assert relay.fills == 0


def test_always_without_a_relay_is_a_warning(story: Story) -> None:
    story.replica()
    report = story.trained(story.ranks(), prefetch=ALWAYS)
    assert report.ok
    (said,) = report.warnings
    assert "no relay has a session with this manager" in said


def test_needs_of_replicas_that_are_away_are_brought_too(story: Story) -> None:
    relay, group = story.relay(), story.ranks()
    away, _ = story.replica(), story.replica()
    assert story.trained(group).ok
    away.crash()
    seen: list[manager_pb2.FillRelay] = []
    original = relay._count
    relay._count = lambda task: (seen.append(task.command), original(task))[1]  # type: ignore[method-assign]
    story.wait(6.0)
    story.trained(group, prefetch=ALWAYS, min_replicas=1, replicas=["replica-1"])
    workers = sum(len(agent.engine.workers) for agent in story.agents.values() if agent.engine is not None)
    assert len(seen[-1].needs) == workers


def test_a_version_that_cannot_be_is_refused_before_a_relay_is_filled(story: Story) -> None:
    relay, group = story.relay(), story.ranks()
    story.replica(), story.replica()
    assert story.trained(group, version=5).ok
    refused(story.trained(group, version=5), Problem.CODE_FAILED_PRECONDITION, "the weights are not those")
    assert relay.fills == 1


def test_ranks_must_agree_on_prefetch_and_until(story: Story) -> None:
    story.replica()
    story.relay()
    group = story.ranks(world_size=2)
    for wish in ({"prefetch": ALWAYS}, {"until": HELD}):
        results = [story.call(group.trainers[0], **wish), story.call(group.trainers[1])]
        story.wait(3.0)
        for (result,) in results:
            refused(result, Problem.CODE_INVALID_ARGUMENT, "the ranks differ")
    refused(
        story.update(group, prefetch=NEVER, until=HELD), Problem.CODE_INVALID_ARGUMENT, "prefetch='never' fills none"
    )


def test_a_late_replica_is_brought_up_from_a_relay_when_the_run_has_ended(story: Story) -> None:
    story.relay()
    story.replica(), story.replica()
    group = story.ranks()
    report = story.trained(group)
    story.end_group(group, in_good_order=True)
    story.wait(2.0)
    late = story.replica()
    story.wait(3.0)
    assert story.held_by(late) == report.identity


@pytest.mark.parametrize(
    ("kind", "read"), [("directory", {"relay relay-0"}), ("snapshot", {"relay relay-0", "rank 0"})]
)
def test_a_late_replica_reads_whoever_is_nearest_of_all_that_hold_the_version(
    story: Story, sources: set[str], kind: str, read: set[str]
) -> None:
    """The relay's memory before a trainer's files, and no less than a trainer's memory."""
    story.relay()
    story.replica()
    group = story.ranks(kind=kind)
    report = story.trained(group, prefetch=ALWAYS)
    sources.clear()
    late = story.replica()
    story.wait(3.0)
    assert story.held_by(late) == report.identity
    assert sources == read


def test_a_late_replica_reads_the_ranks_if_what_holders_hold_cannot_be_joined(
    story: Story, sources: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    story.relay()
    story.replica()
    group = story.ranks(kind="snapshot")
    report = story.trained(group, prefetch=ALWAYS)
    sources.clear()
    manager = story.cluster.manager
    assert manager is not None

    def join(task: events.JoinSources) -> events.Joined:
        raise data_loss("made to fail")

    monkeypatch.setattr(manager, "_join", join)
    late = story.replica()
    story.wait(6.0)
    assert story.held_by(late) == report.identity
    assert sources == {"rank 0"}


def test_an_operators_wish_is_not_refused_while_what_is_held_is_looked_at(
    story: Story,
) -> None:
    story.relay()
    story.replica()
    group = story.ranks(kind="snapshot")
    report = story.trained(group, prefetch=ALWAYS)
    machine = story.cluster.manager.machine  # type: ignore[union-attr]
    story.join_replica(manager_pb2.MODE_STANDALONE)
    story.until(lambda: machine._holdings.looking(machine._state.versions.last_of("run")))
    assert "is brought to version" in machine._catch_up.retry(machine._members.replica("replica-1"))
    story.wait(3.0)
    assert story.held_by(story.agents["replica-1"]) == report.identity


@pytest.mark.parametrize("alone", [True, False])
def test_a_replica_that_cannot_read_the_trainer_is_installed_from_its_relay(
    story: Story, monkeypatch: pytest.MonkeyPatch, sources: set[str], alone: bool
) -> None:
    """A fake of the planner's word, since the simulation has no transports: as in a container of its own."""
    relay, far = story.relay(), story.replica()
    near = [] if alone else [story.replica()]
    group = story.ranks()
    manager = story.cluster.manager
    assert manager is not None
    original = manager._compile

    def compile(task: events.CompilePlans) -> events.Compiled:
        if task.record is not None:
            return original(task)
        done = original(replace(task, workers=tuple(each for each in task.workers if each.key[0] != far.name)))
        problem = Problem(code=Problem.CODE_FAILED_PRECONDITION, message="no process ids in common")
        return replace(done, unfit={far.name: problem})

    monkeypatch.setattr(manager, "_compile", compile)
    report = story.trained(group)
    assert outcomes(report) == {agent.name: NEW for agent in (far, *near)}
    assert f"{far.name} cannot read the trainer's weights directly" in report.prefetch
    assert sources == {"relay relay-0"}
    relay.crash()
    story.wait(1.0)
    result = story.trained(group)
    why = f"relay {relay.name} had a session with this manager and has none now"
    if alone:
        refused(result, Problem.CODE_FAILED_PRECONDITION, why, "no process ids in common")
    else:
        (left_out,) = [each for each in result.replicas if each.HasField("problem")]
        assert left_out.replica == far.name
        assert left_out.problem.message.startswith(why)
        assert left_out.problem.message.endswith("; no process ids in common")


def test_a_version_that_was_brought_and_not_decided_on_takes_no_number(story: Story) -> None:
    """Its update was refused; the trainer goes back to its checkpoint and comes to that step with other weights."""
    relay, group = story.relay(), story.ranks()
    story.replica(), story.replica()
    assert story.trained(group, version=3).ok
    group.train()
    story.call(group.trainers[0], version=4)
    story.until(lambda: story.phase.endswith("joining"))
    story.leave()
    assert relay.fills == 2
    story.wait(2.0)
    story.restart_manager()
    report = story.trained(group, version=4)
    assert isinstance(report, manager_pb2.UpdateReport), report
    assert report.ok
    assert report.identity.version == 4
    assert story.trained(group).identity.version == 5


def test_numbers_of_a_ledger_that_was_lost_are_told_by_relays(story: Story) -> None:
    story.relay()
    story.replica(), story.replica()
    group = story.ranks()
    assert story.trained(group, version=3).ok
    for agent in story.agents.values():
        agent.crash()
    story.ledger = Ledger(story.ledger.cluster)
    story.restart_manager()
    story.replica()
    refused(story.trained(group, version=2), Problem.CODE_FAILED_PRECONDITION, "goes backwards")
