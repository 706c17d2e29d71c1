"""Callers that return when relays hold the version, while its installs go on: each rule in a small story."""

from __future__ import annotations

from typing import Any

import pytest

from ckpt_engine.machines.manager.placing import RelayPlacing
from ckpt_engine.v1 import manager_pb2
from tests.simulation.story import NEW, OLD, Problem, Story, outcomes, refused
from tests.simulation.training import Group
from tests.simulation.world import BrokenPromiseError

HELD = manager_pb2.UNTIL_HELD


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
    refused(third[0], Problem.CODE_ABORTED, "another update runs")
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
    refused(story.trained(group, until=HELD, min_replicas=2), Problem.CODE_FAILED_PRECONDITION, "1 replicas", far.name)


def test_without_any_relay_nothing_can_be_held(story: Story) -> None:
    story.replica()
    refused(story.trained(story.ranks(), until=HELD), Problem.CODE_FAILED_PRECONDITION, "no relay within its reach")
    assert not story.ledger.intents


def test_a_relay_that_has_just_come_back_is_said_to_be_away_with_what_to_do(story: Story) -> None:
    """Its session was lost while it was stopped, and it has not dialled again."""
    relay, _ = story.relay(), story.replica()
    group = story.ranks()
    assert story.trained(group, until=HELD).held
    relay.stop_for(60.0)
    story.wait(story.deadlines.lease + 1.0)
    words = f"relay {relay.name} had a session with this manager and has none now"
    refused(story.trained(group, until=HELD), Problem.CODE_FAILED_PRECONDITION, words, "connects within")


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
    story.join_replica(manager_pb2.MODE_STANDALONE)
    manager = story.cluster.manager
    assert manager is not None
    over = manager.sleep_or_wake(False, ["replica-1"])
    story.wait(2.5)
    refused(over.value, Problem.CODE_ABORTED, "replicas are in use: update", ": installing")
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


def test_the_slot_that_replicas_read_is_kept_by_an_update_of_another_run_too(story: Story) -> None:
    """The other slot holds that run's own last version, which nobody reads any more."""
    relay, slow, other, group = story.relay(), story.replica(), story.ranks("other"), story.ranks()
    story.replica()
    assert story.update(other, until=HELD).held
    result = story.call(group.trainers[0], until=HELD)
    story.until(lambda: bool(result))
    slow.stop_for(4.0)
    other.train()
    second = story.call(other.trainers[0], until=HELD)
    story.until(lambda: "waiting for" in story.phase)
    assert relay.fills == 3
    assert result[0].identity in [slot.filled for slot in relay.slots]
    story.wait(8.0)
    assert second[0].held


def _forget_what_is_to_be_kept(patch: pytest.MonkeyPatch) -> None:
    original = RelayPlacing._command

    def command(self: RelayPlacing, *arguments: Any) -> manager_pb2.FillRelay:
        made = original(self, *arguments)
        made.ClearField("keep")
        return made

    patch.setattr(RelayPlacing, "_command", command)


def held_and_slow(story: Story) -> tuple[Group, Any, Any]:
    """A version that is held, of which one replica is not installed for 2 s; then the ranks have trained on. The run,
    its report, and that replica."""
    story.relay()
    slow, group = story.replica(), story.ranks()
    story.replica()
    first = story.trained(group)
    assert first.ok
    group.train()
    result = story.call(group.trainers[0], until=HELD)
    story.until(lambda: bool(result))
    slow.stop_for(2.0)
    group.train()
    return group, result[0], slow


@pytest.mark.parametrize("restarted", [False, True])
def test_how_installs_end_is_told_to_who_waits_while_the_next_update_runs(story: Story, restarted: bool) -> None:
    group, held, slow = held_and_slow(story)
    manager = story.cluster.manager
    assert manager is not None
    waiting = manager.wait_for(held.identity.version, "run", 30.0)
    second = story.call(group.trainers[0], until=HELD)
    next_one = manager.wait_for(held.identity.version + 1, "run", 30.0)
    story.until(lambda: "waiting for the installs" in story.phase)
    assert waiting.value is None
    assert next_one.value is None
    story.wait(8.0)
    report = waiting.value
    assert isinstance(report, manager_pb2.UpdateReport), report
    assert (report.identity, report.held, report.ok) == (held.identity, False, True)
    assert set(outcomes(report)) == set(story.agents)
    assert second[0].held
    assert isinstance(next_one.value, manager_pb2.UpdateReport), next_one.value
    assert next_one.value.identity == second[0].identity == story.held_by(slow)
    if restarted:
        story.restart_manager()
        manager = story.cluster.manager
    for version, expected in ((held.identity, report), (second[0].identity, next_one.value)):
        again = manager.wait_for(version.version, "run", 5.0)
        story.wait(1.0)
        assert again.value == expected


@pytest.mark.parametrize("back", [0, 1])
def test_a_rollback_is_refused_while_held_installs_of_its_run_go_on(story: Story, back: int) -> None:
    """To the version before, or to the one that is being installed: afterwards it goes."""
    group, held, slow = held_and_slow(story)
    refused(story.roll_back(back, seconds=0.2), Problem.CODE_ABORTED, "an update of lineage 'run' runs, to version 1")
    assert story.held_by(slow) != held.identity
    story.wait(8.0)
    assert story.held_by(slow) == held.identity
    report = story.roll_back(back)
    assert isinstance(report, manager_pb2.UpdateReport), report
    assert report.ok
    assert all(story.held_by(agent) == report.identity for agent in story.agents.values())
    assert report.identity.version == back
    assert story.trained(group).identity.version == 2


def test_a_rollback_of_another_run_waits_for_held_installs(story: Story) -> None:
    other = story.ranks("other")
    agents = [story.replica(), story.replica()]
    keeper = story.join_holder()
    named = [agent.name for agent in agents[:1]]
    kept = story.update(other, replicas=named).identity
    keeper.hold(kept)
    story.wait(1.0)
    assert story.trained(other, replicas=named).ok
    story.relay()
    slow, group = agents[1], story.ranks()
    result = story.call(group.trainers[0], until=HELD, replicas=[slow.name])
    story.until(lambda: bool(result))
    slow.stop_for(4.0)
    manager = story.cluster.manager
    assert manager is not None
    _, over = manager.roll_back(kept.version, "other", replicas=named)
    story.wait(2.0)
    assert over.value is None, "its intent waits for the installs"
    story.wait(8.0)
    assert story.held_by(slow) == result[0].identity
    assert isinstance(over.value, manager_pb2.UpdateReport), over.value
    assert over.value.ok
    assert story.held_by(agents[0]) == kept
