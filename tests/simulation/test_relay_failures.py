"""Who fails, leaves or takes something back while relays are filled and read: each rule in a small story."""

from __future__ import annotations

from typing import Any

import pytest

from ckpt_engine.core.problems import data_loss
from ckpt_engine.machines import events
from ckpt_engine.machines.manager.update_relays import UpdateRelays
from ckpt_engine.v1 import manager_pb2
from tests.simulation.story import NEW, OLD, Problem, Story, outcomes, refused
from tests.simulation.training import Group
from tests.simulation.weights import SLICES
from tests.simulation.world import BrokenPromiseError

ALWAYS, HELD = manager_pb2.PREFETCH_ALWAYS, manager_pb2.UNTIL_HELD

# ------------------------------------------------------------------------------------------------ relays that fail


@pytest.mark.parametrize("how", ["killed", "stopped", "fails", "says nothing"])
def test_a_relay_that_fails_is_left_out_and_replicas_read_the_trainer(
    story: Story, sources: set[str], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    relay, group = story.relay(), story.ranks()
    story.replica(), story.replica()
    if how == "fails":

        def fails(command: Any, index: int, wanted: str) -> str:
            raise data_loss("made to fail")

        monkeypatch.setattr(relay, "_read", fails)
    (result,) = [story.call(group.trainers[0])]
    story.until(lambda: story.phase.endswith("filling"))
    if how == "killed":
        relay.crash()
    elif how == "stopped":
        relay.stop_for(60.0)
    elif how == "says nothing":
        story.faults.cuts.add((relay.name, True))
    story.wait(20.0)
    (report,) = result
    assert report.ok, report
    assert "relay relay-0 is left out: " in report.prefetch
    assert sources == {"rank 0"}


def test_a_relay_that_is_killed_and_comes_back_is_filled_again_at_once(story: Story, sources: set[str]) -> None:
    relay, group = story.relay(), story.ranks()
    story.replica(), story.replica()
    (result,) = [story.call(group.trainers[0])]
    story.until(lambda: relay.fills == 1)
    relay.crash()
    again = story.join_relay(relay.name)
    story.wait(4.0)
    assert result[0].ok
    assert again.fills == 1
    assert sources == {"relay relay-0"}


def test_one_of_two_relays_that_fails_does_not_spoil_the_other(story: Story, sources: set[str]) -> None:
    first, second, group = story.relay(), story.relay(), story.ranks()
    story.replica(), story.replica()
    (result,) = [story.call(group.trainers[0])]
    story.until(lambda: story.phase.endswith("filling"))
    first.crash()
    story.wait(10.0)
    assert result[0].ok
    assert second.fills == 1
    assert sources == {"relay relay-1"}


@pytest.mark.parametrize("how", ["killed", "stopped", "digests nothing", "its table is refused"])
def test_one_of_two_relays_that_fails_once_it_is_filled_is_left_out_alone(
    story: Story, sources: set[str], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    first, second, group = story.relay(), story.relay(), story.ranks()
    agents = [story.replica(), story.replica()]
    monkeypatch.setattr(story.world, "chance", lambda probability: probability >= 1)  # all digest finer pieces
    if how == "digests nothing":

        def fails(task: Any) -> Any:
            yield 0.01
            raise data_loss("made to fail")

        monkeypatch.setattr(first, "_seal", fails)
    elif how == "its table is refused":
        manager = story.cluster.manager
        assert manager is not None
        original = manager._join

        def join(task: events.JoinSources) -> events.Joined:
            if len(task.offers) > 1:
                raise data_loss("these do not fit together")
            return original(task)

        monkeypatch.setattr(manager, "_join", join)
    result = story.call(group.trainers[0], until=HELD)
    story.until(lambda: story.phase.endswith("joining"))
    if how == "killed":
        first.crash()
    elif how == "stopped":
        first.stop_for(60.0)
    story.wait(30.0)
    (report,) = result
    assert isinstance(report, manager_pb2.UpdateReport), report
    assert report.held
    assert not report.replicas
    assert all(story.held_by(agent) == report.identity for agent in agents)
    if how == "its table is refused":
        assert "left out" not in report.prefetch
    else:
        assert sources == {"relay relay-1"}
        assert "relay relay-0 is left out: " in report.prefetch
        assert "relay relay-1 is left out" not in report.prefetch
    assert second.fills == 1


# ---------------------------------------------------------------------------------------- what is taken back


@pytest.mark.parametrize("how", ["withdrawn", "withdrawn while it is away", "killed"])
def test_memory_that_is_taken_back_is_let_go_of_and_late_replicas_read_what_the_relay_keeps(
    story: Story, sources: set[str], how: str
) -> None:
    relay = story.relay()
    story.replica(), story.replica()
    group = story.ranks(kind="snapshot")
    report = story.trained(group)
    (trainer,) = group.trainers
    (table,) = relay.mapped
    if how != "killed":
        if how != "withdrawn":
            story.faults.cuts |= {(trainer.name, True), (trainer.name, False)}
        trainer.withdraw()
        story.wait(1.0)
        story.faults.cuts.clear()
        if how != "withdrawn":
            trainer.break_streams()  # what it said before is lost
        story.wait(4.0)
    else:
        story.end_group(group, in_good_order=False)
        story.wait(story.deadlines.forget + 2.0)
    assert relay.mapped == set()
    sources.clear()
    late = story.replica()
    story.wait(3.0)
    assert story.held_by(late) == report.identity
    assert sources == {"relay relay-0"}
    if how != "killed":
        trainer.publish()
        story.wait(1.0)
        assert story.trained(group).ok
        assert relay.mapped == {table}


def test_what_is_taken_back_while_a_late_replica_is_to_read_it_is_read_from_a_relay(story: Story) -> None:
    story.relay()
    story.replica(), story.replica()
    group = story.ranks(kind="snapshot")
    report = story.trained(group)
    story.join_replica(manager_pb2.MODE_STANDALONE)
    story.until(lambda: story.phase.startswith("bringing up") and story.phase.endswith(("preparing", "planning")))
    group.trainers[0].withdraw()
    story.wait(6.0)
    assert story.held_by(story.agents["replica-2"]) == report.identity


def test_without_a_relay_a_late_replica_waits_for_what_was_taken_back(story: Story) -> None:
    story.replica()
    group = story.ranks(kind="snapshot")
    report = story.trained(group)
    group.trainers[0].withdraw()
    story.wait(1.0)
    late = story.replica()
    story.wait(6.0)
    assert story.held_by(late) is None
    refused(
        story.retry(late.name), Problem.CODE_FAILED_PRECONDITION, "version 0 of lineage", "no source of it stays sealed"
    )
    group.trainers[0].publish()
    story.wait(1.0)
    assert story.trained(group).identity.version == report.identity.version + 1
    assert story.held_by(late) != report.identity


def test_an_update_is_refused_when_a_rank_takes_back_what_it_published(story: Story) -> None:
    story.replica()
    group = story.ranks(world_size=2)
    results = [story.call(trainer) for trainer in group.trainers]
    story.until(lambda: story.phase.endswith("preparing"))
    group.trainers[1].withdraw()
    story.wait(3.0)
    for (result,) in results:
        refused(result, Problem.CODE_UNAVAILABLE, "rank 1 took back what it had published while")


# ------------------------------------------------------------------------------- a trainer that is gone too early


def die(story: Story, group: Group, call: bool = True) -> None:
    """A process ends: its calls, its session and its memory. call: it was the one that called."""
    manager = story.cluster.manager
    assert manager is not None
    for trainer in group.trainers:
        trainer.crash()
    for each in list(manager.calls) if call else []:
        manager.cancel_call(each)


@pytest.mark.parametrize("when", ["filling", "joining", "waiting for the installs of the update before it"])
@pytest.mark.parametrize("wanted", [HELD, manager_pb2.UNTIL_INSTALLED])
def test_an_update_goes_on_without_its_trainer_once_relays_have_what_they_need(
    story: Story, sources: set[str], when: str, wanted: manager_pb2.Until
) -> None:
    story.relay()
    slow, agents, group = story.replica(), [story.replica(), story.replica()], story.ranks(world_size=2)
    if when.startswith("waiting"):
        result = next(iter([story.call(trainer, until=HELD) for trainer in group.trainers]))
        story.until(lambda: bool(result))
        slow.stop_for(2.0)
        group.train()
    version = 7
    for trainer in group.trainers:
        story.call(trainer, version=version, until=wanted, prefetch=ALWAYS)
    story.until(lambda: story.phase.endswith(when))
    if when == "filling":
        story.until(lambda: all(len(relay.slots[0].memory) == SLICES for relay in story.relays))
    die(story, group)
    story.wait(25.0)
    final = story.last_report()
    assert final.identity.version == version
    assert final.ok
    assert sources == {"relay relay-0"}
    assert all(story.held_by(agent) == final.identity for agent in (slow, *agents))


@pytest.mark.parametrize("kept", [True, False])
def test_replicas_that_were_to_read_a_trainer_that_has_left_keep_what_they_serve(
    story: Story, monkeypatch: pytest.MonkeyPatch, kept: bool
) -> None:
    """Its session is lost too, so for all that is known it has died; in fact it trains on."""
    if not kept:
        conclude = UpdateRelays.conclude
        monkeypatch.setattr(
            UpdateRelays, "conclude", lambda self: (setattr(self, "trainer_gone", None), conclude(self))[1]
        )
    story.relay()
    far, near, group = story.replica(), story.replica(), story.ranks()
    (trainer,) = group.trainers
    first = story.trained(group)
    far.machine._transports = ("shared_memory",)
    far.break_streams()
    story.wait(3.0)
    group.train()
    story.call(trainer, prefetch=ALWAYS)
    story.until(lambda: story.phase.endswith("joining"))
    story.faults.cuts |= {(trainer.name, way) for way in (True, False)}
    trainer.break_streams()
    if not kept:
        with pytest.raises(BrokenPromiseError, match="is told to read memory"):
            story.leave()
        return
    story.leave()
    group.train()
    story.wait(1.0)
    final = story.last_report()
    assert outcomes(final) == {near.name: NEW, far.name: OLD}
    (reported,) = (each for each in final.replicas if each.replica == far.name)
    said = "it keeps what it serves, since the call of rank 0 was cancelled: no relay was filled for it"
    assert reported.problem.message == said
    assert reported.after == first.identity


def test_without_a_relay_that_holds_the_version_the_death_of_the_trainer_ends_the_update(story: Story) -> None:
    relay = story.relay()
    agents, group = [story.replica(), story.replica()], story.ranks(world_size=2)
    results = [story.call(trainer, until=HELD) for trainer in group.trainers]
    story.until(lambda: story.phase.endswith("filling"))
    group.trainers[1].crash()  # the relay finds nothing to read
    story.leave(1)
    story.wait(20.0)
    refused(results[0][0], Problem.CODE_UNAVAILABLE, "the call of rank 1 was cancelled")
    assert relay.fills == 1
    assert all(story.held_by(agent) is None for agent in agents)
    assert not story.ledger.intents


def test_a_caller_that_gives_up_and_lives_ends_an_update_that_relays_are_filled_for(story: Story) -> None:
    relay = story.relay()
    story.replica(), story.replica()
    group = story.ranks()
    relay.stop_for(3.0)
    story.call(group.trainers[0], until=HELD)
    story.until(lambda: story.phase.endswith("filling"))
    story.leave()
    story.wait(10.0)
    assert story.phase == "idle"
    assert not story.ledger.intents
