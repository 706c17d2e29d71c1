"""Relays in updates: filled between sealing and intent, left out when they fail; each rule in a small story."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ckpt_engine.core.problems import data_loss
from ckpt_engine.machines import events
from ckpt_engine.machines.manager.prefetch import Prefetch
from ckpt_engine.v1 import manager_pb2, weights_pb2
from tests.simulation.manager import Ledger
from tests.simulation.members import AgentShell
from tests.simulation.relays import RelayShell
from tests.simulation.story import NEW, OLD, Problem, Story, outcomes, refused
from tests.simulation.training import Group
from tests.simulation.world import BrokenPromiseError

ALWAYS, NEVER, HELD = manager_pb2.ALWAYS, manager_pb2.NEVER, manager_pb2.HELD


@pytest.fixture
def story() -> Story:
    return Story()


def relay_of(story: Story) -> RelayShell:
    relay = story.join_relay()
    story.wait(1.0)
    return relay


def trained(story: Story, group: Group, **wishes: Any) -> Any:
    group.train()
    return story.update(group, **wishes)


def holds(agent: AgentShell) -> weights_pb2.Identity | None:
    assert agent.engine is not None
    return agent.engine.words().identity


def until(story: Story, reached: Any, seconds: float = 10.0) -> None:
    end = story.world.now + seconds
    while not reached():
        assert story.world.now < end, "it does not come to that"
        story.wait(0.001)


def phase(story: Story) -> str:
    assert story.cluster.manager is not None
    return story.cluster.manager.machine.status().phase


@pytest.fixture
def sources(story: Story) -> set[str]:
    """The ids of what is read by all that the manager has installed."""
    assert story.cluster.manager is not None
    manager, found = story.cluster.manager, set[str]()
    watch = manager.watch

    def look(shell: Any, command: Any) -> None:
        body = getattr(command, "body", None)
        for worker in body.workers if isinstance(body, manager_pb2.Install) else ():
            for digest in manager.blobs.get_json(worker.plan).values():
                table = story.truth.sources[bytes.fromhex(digest)].table()
                found.add(weights_pb2.SourceTable.FromString(table).id)
        watch(shell, command)

    manager.watch = look
    return found


def test_several_replicas_of_a_host_read_what_a_relay_brought_once(story: Story, sources: set[str]) -> None:
    relay, agents, group = relay_of(story), [story.replica(), story.replica()], story.ranks(world_size=2)
    for count in range(1, 4):
        report = trained(story, group)
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
    relay, _, group = relay_of(story), story.replica(), story.ranks()
    report = trained(story, group)
    assert report.ok
    assert not report.relays
    assert "alone reads the trainer's memory" in report.prefetch
    assert sources == {"rank 0"}
    sources.clear()
    assert trained(story, group, prefetch=ALWAYS).ok
    assert sources == {"relay relay-0"}
    assert relay.fills == 1


def test_never_fills_no_relay(story: Story) -> None:
    relay, group = relay_of(story), story.ranks()
    story.replica(), story.replica()
    report = trained(story, group, prefetch=NEVER)
    assert report.ok
    assert "prefetch is 'never'" in report.prefetch
    assert relay.fills == 0


def test_always_without_a_relay_is_a_warning(story: Story) -> None:
    story.replica()
    report = trained(story, story.ranks(), prefetch=ALWAYS)
    assert report.ok
    (said,) = report.warnings
    assert "no relay has a session with this manager" in said


@pytest.mark.parametrize("how", ["killed", "stopped", "fails", "says nothing"])
def test_a_relay_that_fails_is_left_out_and_replicas_read_the_trainer(
    story: Story, sources: set[str], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    relay, group = relay_of(story), story.ranks()
    story.replica(), story.replica()
    if how == "fails":

        def fails(command: Any, index: int, wanted: str) -> str:
            raise data_loss("made to fail")

        monkeypatch.setattr(relay, "_read", fails)
    (result,) = [story.call(group.trainers[0])]
    until(story, lambda: phase(story).endswith("filling"))
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
    relay, group = relay_of(story), story.ranks()
    story.replica(), story.replica()
    (result,) = [story.call(group.trainers[0])]
    until(story, lambda: relay.fills == 1)
    relay.crash()
    again = story.join_relay(relay.name)
    story.wait(4.0)
    assert result[0].ok
    assert again.fills == 1
    assert sources == {"relay relay-0"}


def test_one_of_two_relays_that_fails_does_not_spoil_the_other(story: Story, sources: set[str]) -> None:
    first, second, group = relay_of(story), relay_of(story), story.ranks()
    story.replica(), story.replica()
    (result,) = [story.call(group.trainers[0])]
    until(story, lambda: phase(story).endswith("filling"))
    first.crash()
    story.wait(10.0)
    assert result[0].ok
    assert second.fills == 1
    assert sources == {"relay relay-1"}


@pytest.mark.parametrize("how", ["killed", "stopped", "digests nothing", "its table is refused"])
def test_one_of_two_relays_that_fails_once_it_is_filled_is_left_out_alone(
    story: Story, sources: set[str], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    first, second, group = relay_of(story), relay_of(story), story.ranks()
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
    until(story, lambda: phase(story).endswith("joining"))
    if how == "killed":
        first.crash()
    elif how == "stopped":
        first.stop_for(60.0)
    story.wait(30.0)
    (report,) = result
    assert isinstance(report, manager_pb2.UpdateReport), report
    assert report.held
    assert not report.replicas
    assert all(holds(agent) == report.identity for agent in agents)
    if how == "its table is refused":
        assert "left out" not in report.prefetch
    else:
        assert sources == {"relay relay-1"}
        assert "relay relay-0 is left out: " in report.prefetch
        assert "relay relay-1 is left out" not in report.prefetch
    assert second.fills == 1


def test_needs_of_replicas_that_are_away_are_brought_too(story: Story) -> None:
    relay, group = relay_of(story), story.ranks()
    away, _ = story.replica(), story.replica()
    assert trained(story, group).ok
    away.crash()
    seen: list[manager_pb2.FillRelay] = []
    original = relay._count
    relay._count = lambda task: (seen.append(task.command), original(task))[1]  # type: ignore[method-assign]
    story.wait(6.0)
    trained(story, group, prefetch=ALWAYS, min_replicas=1, replicas=["replica-1"])
    workers = sum(len(agent.engine.workers) for agent in story.agents.values() if agent.engine is not None)
    assert len(seen[-1].needs) == workers


def test_a_version_that_cannot_be_is_refused_before_a_relay_is_filled(story: Story) -> None:
    relay, group = relay_of(story), story.ranks()
    story.replica(), story.replica()
    assert trained(story, group, version=5).ok
    refused(trained(story, group, version=5), Problem.FAILED_PRECONDITION, "the weights are not those")
    assert relay.fills == 1


def test_ranks_must_agree_on_prefetch_and_until(story: Story) -> None:
    story.replica()
    relay_of(story)
    group = story.ranks(world_size=2)
    for wish in ({"prefetch": ALWAYS}, {"until": HELD}):
        results = [story.call(group.trainers[0], **wish), story.call(group.trainers[1])]
        story.wait(3.0)
        for (result,) in results:
            refused(result, Problem.INVALID_ARGUMENT, "the ranks differ")
    refused(story.update(group, prefetch=NEVER, until=HELD), Problem.INVALID_ARGUMENT, "prefetch='never' fills none")


def test_a_late_replica_is_brought_up_from_a_relay_when_the_run_has_ended(story: Story) -> None:
    relay_of(story)
    story.replica(), story.replica()
    group = story.ranks()
    report = trained(story, group)
    story.end_group(group, in_good_order=True)
    story.wait(2.0)
    late = story.replica()
    story.wait(3.0)
    assert holds(late) == report.identity


@pytest.mark.parametrize("alone", [True, False])
def test_a_replica_that_cannot_read_the_trainer_is_installed_from_its_relay(
    story: Story, monkeypatch: pytest.MonkeyPatch, sources: set[str], alone: bool
) -> None:
    """A fake of the planner's word, since the simulation has no transports: as in a container of its own."""
    relay, far = relay_of(story), story.replica()
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
    report = trained(story, group)
    assert outcomes(report) == {agent.name: NEW for agent in (far, *near)}
    assert f"{far.name} cannot read the trainer's weights directly" in report.prefetch
    assert sources == {"relay relay-0"}
    relay.crash()
    story.wait(1.0)
    result = trained(story, group)
    if alone:
        refused(result, Problem.FAILED_PRECONDITION, "no process ids in common")
    else:
        assert {each.replica: each.problem.message for each in result.replicas if each.problem.message} == {
            far.name: "no process ids in common"
        }


@pytest.mark.parametrize("how", ["withdrawn", "withdrawn while it is away", "killed"])
def test_memory_that_is_taken_back_is_let_go_of_and_late_replicas_read_what_the_relay_keeps(
    story: Story, sources: set[str], how: str
) -> None:
    relay = relay_of(story)
    story.replica(), story.replica()
    group = story.ranks(kind="snapshot")
    report = trained(story, group)
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
    assert holds(late) == report.identity
    assert sources == {"relay relay-0"}
    if how != "killed":
        trainer.publish()
        story.wait(1.0)
        assert trained(story, group).ok
        assert relay.mapped == {table}


def test_what_is_taken_back_while_a_late_replica_is_to_read_it_is_read_from_a_relay(story: Story) -> None:
    relay_of(story)
    story.replica(), story.replica()
    group = story.ranks(kind="snapshot")
    report = trained(story, group)
    story.join_replica(manager_pb2.STANDALONE)
    until(story, lambda: phase(story).startswith("bringing up") and phase(story).endswith(("preparing", "planning")))
    group.trainers[0].withdraw()
    story.wait(6.0)
    assert holds(story.agents["replica-2"]) == report.identity


def test_without_a_relay_a_late_replica_waits_for_what_was_taken_back(story: Story) -> None:
    story.replica()
    group = story.ranks(kind="snapshot")
    report = trained(story, group)
    group.trainers[0].withdraw()
    story.wait(1.0)
    late = story.replica()
    story.wait(6.0)
    assert holds(late) is None
    refused(story.retry(late.name), Problem.FAILED_PRECONDITION, "no source of version 0", "stays sealed")
    group.trainers[0].publish()
    story.wait(1.0)
    assert trained(story, group).identity.version == report.identity.version + 1
    assert holds(late) != report.identity


def test_an_update_is_refused_when_a_rank_takes_back_what_it_published(story: Story) -> None:
    story.replica()
    group = story.ranks(world_size=2)
    results = [story.call(trainer) for trainer in group.trainers]
    until(story, lambda: phase(story).endswith("preparing"))
    group.trainers[1].withdraw()
    story.wait(3.0)
    for (result,) in results:
        refused(result, Problem.UNAVAILABLE, "rank 1 took back what it had published while")


# ---------------------------------------------------------------------------------------------------- held


def test_callers_return_when_relays_hold_the_version_and_installs_go_on(story: Story, sources: set[str]) -> None:
    relay_of(story)
    agents, group = [story.replica(), story.replica()], story.ranks()
    result = story.call(group.trainers[0], until=HELD)
    until(story, lambda: bool(result))
    (report,) = result
    assert report.held
    assert not report.ok
    assert not report.replicas
    assert phase(story).endswith("installing")
    group.train()  # the weights change while replicas install
    story.wait(3.0)
    assert all(holds(agent) == report.identity for agent in agents)
    assert sources == {"relay relay-0"}
    final = story.ledger.reports[report.fence.epoch]
    assert final.ok
    assert not final.held
    assert outcomes(final) == {agent.name: NEW for agent in agents}


def test_the_next_update_prepares_beside_the_installs_and_its_intent_waits_for_them(story: Story) -> None:
    relay_of(story)
    slow, group = story.replica(), story.ranks()
    story.replica()
    result = story.call(group.trainers[0], until=HELD)
    until(story, lambda: bool(result))
    slow.stop_for(4.0)
    group.train()
    second = story.call(group.trainers[0], until=HELD)
    until(story, lambda: phase(story).endswith("waiting for the installs of the update before it"))
    assert phase(story).count(": installing;") == 1
    third = story.call(group.trainers[0])
    story.wait(0.5)
    refused(third[0], Problem.ABORTED, "another update runs")
    assert len(story.ledger.intents) == 1
    story.wait(8.0)
    assert second[0].held
    assert holds(slow) == second[0].identity


def test_a_replica_without_a_relay_keeps_what_it_serves(story: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    relay_of(story)
    near, far, group = story.replica(), story.replica(), story.ranks()
    first = trained(story, group)
    far.machine._transports = ("shared_memory",)
    far.break_streams()
    story.wait(3.0)
    held = trained(story, group, until=HELD)
    assert held.held
    assert outcomes(held) == {far.name: OLD}
    assert "no relay within its reach" in held.replicas[0].problem.message
    assert held.replicas[0].after == first.identity
    assert holds(near) == held.identity
    refused(trained(story, group, until=HELD, min_replicas=2), Problem.FAILED_PRECONDITION, "1 replicas", far.name)


def test_without_any_relay_nothing_can_be_held(story: Story) -> None:
    story.replica()
    refused(trained(story, story.ranks(), until=HELD), Problem.FAILED_PRECONDITION, "no relay within its reach")
    assert not story.ledger.intents


def test_a_manager_that_is_killed_after_a_held_report_leaves_the_version_to_relays(story: Story) -> None:
    relay_of(story)
    agents, group = [story.replica(), story.replica()], story.ranks()
    result = story.call(group.trainers[0], until=HELD)
    until(story, lambda: bool(result))
    assert story.cluster.manager is not None
    story.cluster.manager.crash()
    story.end_group(group, in_good_order=False)
    story.start_manager()
    story.wait(12.0)
    assert all(holds(agent) == result[0].identity for agent in agents)


def test_sleep_and_late_replicas_wait_for_installs_that_go_on_without_callers(story: Story) -> None:
    relay_of(story)
    slow, group = story.replica(), story.ranks()
    story.replica()
    result = story.call(group.trainers[0], until=HELD)
    until(story, lambda: bool(result))
    slow.stop_for(3.0)
    story.join_replica(manager_pb2.STANDALONE)
    manager = story.cluster.manager
    assert manager is not None
    over = manager.sleep_or_wake(False, ["replica-1"])
    story.wait(2.5)
    refused(over.value, Problem.ABORTED, "replicas are in use: update", ": installing")
    late = story.agents["replica-2"]
    assert holds(late) is None
    story.wait(5.0)
    assert holds(late) == result[0].identity


@pytest.mark.parametrize("kept", [True, False])
def test_the_slot_that_replicas_read_is_kept_whatever_was_filled_since(
    story: Story, monkeypatch: pytest.MonkeyPatch, kept: bool
) -> None:
    """The other one holds a later version, of an update that was refused."""
    if not kept:
        _forget_what_is_to_be_kept(monkeypatch)
    relay, slow, group = relay_of(story), story.replica(), story.ranks()
    story.replica()
    result = story.call(group.trainers[0], until=HELD)
    until(story, lambda: bool(result))
    slow.stop_for(4.0)
    for fills in (2, 3):
        group.train()
        second = story.call(group.trainers[0], until=HELD)
        if not kept and fills == 3:
            with pytest.raises(BrokenPromiseError, match="fills a slot that replica-0 reads"):
                story.wait(3.0)
            return
        until(story, lambda: "waiting for" in phase(story))
        assert relay.fills == fills
        if fills == 2:
            _leave(story)
    story.wait(8.0)
    assert second[0].held


def _forget_what_is_to_be_kept(patch: pytest.MonkeyPatch) -> None:
    original = Prefetch._command

    def command(self: Prefetch, *arguments: Any) -> manager_pb2.FillRelay:
        made = original(self, *arguments)
        made.ClearField("keep")
        return made

    patch.setattr(Prefetch, "_command", command)


def _leave(story: Story) -> None:
    """The caller goes."""
    manager = story.cluster.manager
    assert manager is not None
    (call,) = manager.calls
    manager.cancel_call(call)
    story.wait(0.1)


def test_a_version_that_was_brought_and_not_decided_on_takes_no_number(story: Story) -> None:
    """Its update was refused; the trainer goes back to its checkpoint and comes to that step with other weights."""
    relay, group = relay_of(story), story.ranks()
    story.replica(), story.replica()
    assert trained(story, group, version=3).ok
    group.train()
    story.call(group.trainers[0], version=4)
    until(story, lambda: phase(story).endswith("joining"))
    _leave(story)
    assert relay.fills == 2
    story.wait(2.0)
    _restart_manager(story)
    report = trained(story, group, version=4)
    assert isinstance(report, manager_pb2.UpdateReport), report
    assert report.ok
    assert report.identity.version == 4
    assert trained(story, group).identity.version == 5


def test_numbers_of_a_ledger_that_was_lost_are_told_by_relays(story: Story) -> None:
    relay_of(story)
    story.replica(), story.replica()
    group = story.ranks()
    assert trained(story, group, version=3).ok
    for agent in story.agents.values():
        agent.crash()
    story.ledger = Ledger(story.ledger.cluster)
    _restart_manager(story)
    story.replica()
    refused(trained(story, group, version=2), Problem.FAILED_PRECONDITION, "goes backwards")


def _restart_manager(story: Story) -> None:
    assert story.cluster.manager is not None
    story.cluster.manager.crash()
    story.start_manager()
    story.wait(6.0)
