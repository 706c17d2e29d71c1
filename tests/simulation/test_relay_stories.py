"""Relays in updates: filled between sealing and intent, left out when they fail; each rule in a small story."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ckpt_engine.machines import events
from ckpt_engine.machines.manager.prefetch import Prefetch
from ckpt_engine.v1 import manager_pb2
from tests.simulation.manager import Ledger
from tests.simulation.story import NEW, OLD, Problem, Story, outcomes, refused
from tests.simulation.world import BrokenPromiseError

ALWAYS, NEVER, HELD = manager_pb2.ALWAYS, manager_pb2.NEVER, manager_pb2.HELD


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
    refused(story.trained(group, version=5), Problem.FAILED_PRECONDITION, "the weights are not those")
    assert relay.fills == 1


def test_ranks_must_agree_on_prefetch_and_until(story: Story) -> None:
    story.replica()
    story.relay()
    group = story.ranks(world_size=2)
    for wish in ({"prefetch": ALWAYS}, {"until": HELD}):
        results = [story.call(group.trainers[0], **wish), story.call(group.trainers[1])]
        story.wait(3.0)
        for (result,) in results:
            refused(result, Problem.INVALID_ARGUMENT, "the ranks differ")
    refused(story.update(group, prefetch=NEVER, until=HELD), Problem.INVALID_ARGUMENT, "prefetch='never' fills none")


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
        problem = Problem(code=Problem.FAILED_PRECONDITION, message="no process ids in common")
        return replace(done, unfit={far.name: problem})

    monkeypatch.setattr(manager, "_compile", compile)
    report = story.trained(group)
    assert outcomes(report) == {agent.name: NEW for agent in (far, *near)}
    assert f"{far.name} cannot read the trainer's weights directly" in report.prefetch
    assert sources == {"relay relay-0"}
    relay.crash()
    story.wait(1.0)
    result = story.trained(group)
    if alone:
        refused(result, Problem.FAILED_PRECONDITION, "no process ids in common")
    else:
        assert {each.replica: each.problem.message for each in result.replicas if each.problem.message} == {
            far.name: "no process ids in common"
        }


# ---------------------------------------------------------------------------------------------------- held


def test_callers_return_when_relays_hold_the_version_and_installs_go_on(story: Story, sources: set[str]) -> None:
    story.relay()
    agents, group = [story.replica(), story.replica()], story.ranks()
    result = story.call(group.trainers[0], until=HELD)
    story.until(lambda: bool(result))
    (report,) = result
    assert report.held
    assert not report.ok
    assert not report.replicas
    assert story.phase.endswith("installing")
    group.train()  # the weights change while replicas install
    story.wait(3.0)
    assert all(story.held_by(agent) == report.identity for agent in agents)
    assert sources == {"relay relay-0"}
    final = story.ledger.reports[report.fence.epoch]
    assert final.ok
    assert not final.held
    assert outcomes(final) == {agent.name: NEW for agent in agents}


def test_the_next_update_prepares_beside_the_installs_and_its_intent_waits_for_them(story: Story) -> None:
    story.relay()
    slow, group = story.replica(), story.ranks()
    story.replica()
    result = story.call(group.trainers[0], until=HELD)
    story.until(lambda: bool(result))
    slow.stop_for(4.0)
    group.train()
    second = story.call(group.trainers[0], until=HELD)
    story.until(lambda: story.phase.endswith("waiting for the installs of the update before it"))
    assert story.phase.count(": installing;") == 1
    third = story.call(group.trainers[0])
    story.wait(0.5)
    refused(third[0], Problem.ABORTED, "another update runs")
    assert len(story.ledger.intents) == 1
    story.wait(8.0)
    assert second[0].held
    assert story.held_by(slow) == second[0].identity


def test_a_replica_without_a_relay_keeps_what_it_serves(story: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    story.relay()
    near, far, group = story.replica(), story.replica(), story.ranks()
    first = story.trained(group)
    far.machine._transports = ("shared_memory",)
    far.break_streams()
    story.wait(3.0)
    held = story.trained(group, until=HELD)
    assert held.held
    assert outcomes(held) == {far.name: OLD}
    assert "no relay within its reach" in held.replicas[0].problem.message
    assert held.replicas[0].after == first.identity
    assert story.held_by(near) == held.identity
    refused(story.trained(group, until=HELD, min_replicas=2), Problem.FAILED_PRECONDITION, "1 replicas", far.name)


def test_without_any_relay_nothing_can_be_held(story: Story) -> None:
    story.replica()
    refused(story.trained(story.ranks(), until=HELD), Problem.FAILED_PRECONDITION, "no relay within its reach")
    assert not story.ledger.intents


def test_a_manager_that_is_killed_after_a_held_report_leaves_the_version_to_relays(story: Story) -> None:
    story.relay()
    agents, group = [story.replica(), story.replica()], story.ranks()
    result = story.call(group.trainers[0], until=HELD)
    story.until(lambda: bool(result))
    assert story.cluster.manager is not None
    story.cluster.manager.crash()
    story.end_group(group, in_good_order=False)
    story.start_manager()
    story.wait(12.0)
    assert all(story.held_by(agent) == result[0].identity for agent in agents)


def test_sleep_and_late_replicas_wait_for_installs_that_go_on_without_callers(story: Story) -> None:
    story.relay()
    slow, group = story.replica(), story.ranks()
    story.replica()
    result = story.call(group.trainers[0], until=HELD)
    story.until(lambda: bool(result))
    slow.stop_for(3.0)
    story.join_replica(manager_pb2.STANDALONE)
    manager = story.cluster.manager
    assert manager is not None
    over = manager.sleep_or_wake(False, ["replica-1"])
    story.wait(2.5)
    refused(over.value, Problem.ABORTED, "replicas are in use: update", ": installing")
    late = story.agents["replica-2"]
    assert story.held_by(late) is None
    story.wait(5.0)
    assert story.held_by(late) == result[0].identity


@pytest.mark.parametrize("kept", [True, False])
def test_the_slot_that_replicas_read_is_kept_whatever_was_filled_since(
    story: Story, monkeypatch: pytest.MonkeyPatch, kept: bool
) -> None:
    """The other one holds a later version, of an update that was refused."""
    if not kept:
        _forget_what_is_to_be_kept(monkeypatch)
    relay, slow, group = story.relay(), story.replica(), story.ranks()
    story.replica()
    result = story.call(group.trainers[0], until=HELD)
    story.until(lambda: bool(result))
    slow.stop_for(4.0)
    for fills in (2, 3):
        group.train()
        second = story.call(group.trainers[0], until=HELD)
        if not kept and fills == 3:
            with pytest.raises(BrokenPromiseError, match="fills a slot that replica-0 reads"):
                story.wait(3.0)
            return
        story.until(lambda: "waiting for" in story.phase)
        assert relay.fills == fills
        if fills == 2:
            story.leave()
    story.wait(8.0)
    assert second[0].held


def _forget_what_is_to_be_kept(patch: pytest.MonkeyPatch) -> None:
    original = Prefetch._command

    def command(self: Prefetch, *arguments: Any) -> manager_pb2.FillRelay:
        made = original(self, *arguments)
        made.ClearField("keep")
        return made

    patch.setattr(Prefetch, "_command", command)


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
    refused(story.trained(group, version=2), Problem.FAILED_PRECONDITION, "goes backwards")
