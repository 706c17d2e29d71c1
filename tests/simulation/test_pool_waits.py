"""Relays that several pools want at once: whoever waits for them comes to an end that it can use, in small stories."""

from __future__ import annotations

import pytest

from ckpt_engine.machines.relay.tasks import FillSlot
from ckpt_engine.v1 import manager_pb2, weights_pb2
from tests.simulation.healing import Healed
from tests.simulation.hosts import host_of
from tests.simulation.members import AgentShell
from tests.simulation.relays import RelayShell
from tests.simulation.story import NEW, Problem, Story, outcomes, refused
from tests.simulation.training import Group
from tests.simulation.world import Steps

ALWAYS, NEVER, HELD = manager_pb2.PREFETCH_ALWAYS, manager_pb2.PREFETCH_NEVER, manager_pb2.UNTIL_HELD
READ = host_of("read")
TRAINED = [host_of("trained one"), host_of("trained two")]


class Far:
    """The replicas of two pools share a host and its relay; each run trains on a host of its own."""

    def __init__(self) -> None:
        self.story = story = Story(far=True, lease=30.0)
        self.ways = [story.join_relay(f"r-{number}", host) for number, host in enumerate(TRAINED)]
        story.join_relay("r-read", READ)
        story.wait(1.0)
        self.actor, self.judge = story.replica(host=READ, pool="actor"), story.replica(host=READ, pool="judge")
        names = zip(("actor's run", "judge's run"), TRAINED, strict=True)
        self.first, self.second = (story.ranks(name, hosts=[host]) for name, host in names)

    def both(self) -> list[weights_pb2.Identity]:
        """Each pool is updated; the versions."""
        pools = ((self.first, "actor"), (self.second, "judge"))
        return [self.story.update(group, seconds=10.0, pool=pool).identity for group, pool in pools]

    def end_relay(self) -> None:
        """The relay that all replicas read ends; one that comes in its place holds nothing."""
        next(relay for relay in self.story.relays if relay.name == "r-read").crash()
        self.story.wait(2.0)


def slow_relays(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on each filling takes a second more."""
    overwrite = RelayShell._overwrite

    def slowly(self: RelayShell, task: FillSlot, end: float, stops: int) -> Steps:
        for _ in range(20):
            self._may_go_on(end, stops)
            yield 0.05
        return (yield from overwrite(self, task, end, stops))

    monkeypatch.setattr(RelayShell, "_overwrite", slowly)


def test_late_replicas_of_two_pools_are_brought_up_by_one_relay(monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other, however long the relay takes."""
    far = Far()
    story = far.story
    far.both()
    far.first.train()
    far.second.train()
    versions = far.both()
    slow_relays(monkeypatch)
    far.end_relay()
    for agent in (far.actor, far.judge):
        story.engine_again(agent)
    story.wait(60.0)
    assert story.phase == "idle"
    story.join_relay("r-read", READ)
    story.until(lambda: [story.held_by(far.actor), story.held_by(far.judge)] == versions, 30.0)


def test_a_rollback_that_reads_a_relay_waits_for_no_update_that_waits_for_it() -> None:
    far = Far()
    story = far.story
    story.replica(host=TRAINED[1], pool="actor")  # so that the actor's run fills what the rollback reads
    old = far.both()[1]
    assert story.trained(far.second, seconds=10.0, pool="judge").ok
    far.end_relay()
    story.join_relay("r-read", READ)
    story.wait(5.0)
    far.first.train()
    assert story.cluster.manager is not None
    _, back = story.cluster.manager.roll_back(0, "judge's run", pool="judge")
    story.until(lambda: "combining" in story.phase)
    far.ways[1].stop_for(1.5)
    update = story.call(far.first.trainers[0], pool="actor", prefetch=ALWAYS)
    story.until(lambda: "waiting for relays" in story.phase)
    story.wait(10.0)
    assert outcomes(back.value) == {far.judge.name: NEW}
    assert story.held_by(far.judge) == old
    assert update[0].ok


def test_a_replica_that_reads_a_rank_as_it_ends_is_brought_up_by_a_relay(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank's session was lost while its update waited, and it may come back until its lease is over. The check of a
    healed world waits for what becomes of that."""
    far = Far()
    story, run, (trainer,) = far.story, far.second, far.second.trainers
    near, run.pool = story.replica(host=TRAINED[1], pool="judge"), "judge"
    run.reports.append(story.update(run, pool="judge"))
    run.train()
    slow_relays(monkeypatch)
    story.call(far.first.trainers[0], pool="actor", prefetch=ALWAYS)
    story.until(lambda: "filling" in story.phase)
    story.call(trainer, pool="judge")
    story.until(lambda: "waiting for relays" in story.phase)
    story.faults.cuts |= {(trainer.name, True), (trainer.name, False)}
    trainer.break_streams()

    def ends() -> Steps:
        while len(story.ledger.intents) < 3:
            yield 0.001
        trainer.crash()

    story.world.spawn(ends())
    healed = Healed(story)
    healed._come_to_rest()
    run.reports.append(story.last_report())
    assert outcomes(run.reports[-1]) == {far.judge.name: NEW, near.name: NEW}
    (warning,) = run.reports[-1].warnings
    assert f"replica {near.name!r} was brought to it later" in warning
    healed._has_succeeded(run)


class Waiting:
    """A rollback of one pool, of which a relay holds the version that another pool's update fills slowly, and an update
    of a third pool that was called after it and wants to fill that relay."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.story = story = Story(lease=30.0)
        story.relay()
        for pool in ("actor", "critic"):
            story.replica(pool=pool)
        self.judge = story.replica(pool="judge")
        first, second, third = (story.ranks(name) for name in ("actor's run", "judge's run", "critic's run"))
        self.old = story.update(second, pool="judge", prefetch=ALWAYS).identity
        assert story.trained(second, pool="judge", prefetch=NEVER).ok
        slow_relays(monkeypatch)
        story.call(first.trainers[0], pool="actor", prefetch=ALWAYS)
        story.until(lambda: "filling" in story.phase)
        assert story.cluster.manager is not None
        self.manager = story.cluster.manager
        self.call, self.back = self.manager.roll_back(0, "judge's run", pool="judge")
        self.update = story.call(third.trainers[0], pool="critic", prefetch=ALWAYS)
        story.until(lambda: "waiting for relays" in story.phase)
        assert "filling" in story.phase


def test_a_rollback_that_waits_for_a_relay_keeps_its_version_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks for the relay later would overwrite it."""
    waiting = Waiting(monkeypatch)
    waiting.story.until(lambda: bool(waiting.update))
    assert outcomes(waiting.back.value) == {waiting.judge.name: NEW}
    assert waiting.story.held_by(waiting.judge) == waiting.old
    assert waiting.update[0].ok


def test_a_rollback_that_is_given_up_keeps_no_relay(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = Waiting(monkeypatch)
    waiting.manager.cancel_call(waiting.call)
    waiting.story.until(lambda: bool(waiting.update))
    assert waiting.update[0].ok


def shared(story: Story) -> tuple[AgentShell, Group, Group]:
    """A relay that replicas of two pools read, and both runs. The replica is of the first run's pool."""
    story.relay()
    actor = story.replica(pool="actor")
    for pool in ("actor", "judge", "judge"):
        story.replica(pool=pool)
    return actor, story.ranks("actor's run"), story.ranks("judge's run")


def test_whoever_can_read_the_trainer_does_not_wait_for_a_relay_until_its_time_is_over() -> None:
    story = Story(lease=30.0)
    actor, first, second = shared(story)
    story.call(first.trainers[0], pool="actor", prefetch=ALWAYS)
    story.until(lambda: getattr(actor.machine.replica.operation, "kind", "") == "install")
    actor.stop_for(25.0)
    update = story.call(second.trainers[0], pool="judge", timeout_seconds=12.0)
    story.until(lambda: "waiting for relays" in story.phase)
    story.until(lambda: bool(update), 12.0)
    assert set(outcomes(update[0]).values()) == {NEW}
    assert "updates of other pools used relays until" in update[0].prefetch


def test_a_relay_that_is_free_too_late_is_the_reason_for_the_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever cannot read the trainer has nothing else to wait for."""
    story = Story(lease=30.0)
    actor, first, second = shared(story)
    story.call(first.trainers[0], pool="actor", prefetch=ALWAYS, timeout_seconds=9.0)
    story.until(lambda: getattr(actor.machine.replica.operation, "kind", "") == "install")
    actor.stop_for(25.0)
    update = story.call(second.trainers[0], pool="judge", timeout_seconds=9.2, until=HELD)
    story.until(lambda: "waiting for relays" in story.phase)
    slow_relays(monkeypatch)
    story.until(lambda: bool(update), 12.0)
    refused(update[0], Problem.CODE_DEADLINE_EXCEEDED, "updates of other pools used relays until", "were not filled in")


def test_who_only_reads_a_relay_does_not_wait_for_installs_of_another_pool_that_read_it() -> None:
    """A late replica, and a rollback."""
    story = Story(lease=30.0)
    story.relay()
    actor, judge = story.replica(pool="actor"), story.replica(pool="judge")
    first, second = story.ranks("actor's run"), story.ranks("judge's run")
    version = story.update(second, pool="judge", prefetch=ALWAYS).identity
    second.train()
    slow = story.call(first.trainers[0], pool="actor", prefetch=ALWAYS)
    story.until(lambda: getattr(actor.machine.replica.operation, "kind", "") == "install")
    actor.stop_for(25.0)
    story.engine_again(judge)
    story.until(lambda: story.held_by(judge) == version, 5.0)
    assert story.trained(second, seconds=2.0, pool="judge", prefetch=NEVER).ok
    assert outcomes(story.roll_back(0, "judge's run", 2.0, pool="judge")) == {judge.name: NEW}
    assert story.held_by(judge) == version
    assert not slow
