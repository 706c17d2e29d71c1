"""Updates of replicas on several hosts: their relays are filled in stages, each from those that hold the version."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ckpt_engine.machines.events import Message, Send
from ckpt_engine.machines.manager.members import Member, Replica
from ckpt_engine.machines.manager.state import ManagerState
from ckpt_engine.v1 import manager_pb2, weights_pb2
from tests.simulation.hosts import host_of
from tests.simulation.manager import ManagerShell
from tests.simulation.members import AgentShell
from tests.simulation.relays import RelayShell
from tests.simulation.story import NEW, OLD, Problem, Story, outcomes, refused
from tests.simulation.training import Group
from tests.simulation.weights import SLICES

A, B, C = (host_of(name) for name in "ABC")
ALWAYS, HELD = manager_pb2.PREFETCH_ALWAYS, manager_pb2.UNTIL_HELD


@pytest.fixture
def story() -> Story:
    made = Story(far=True, fill=16.0, update=40.0)
    made.hosts = [A, B, C]
    return made


def relays_on(story: Story, *hosts: weights_pb2.Host) -> list[RelayShell]:
    """One each, called by their hosts' names."""
    made = [story.join_relay(host.name.lower(), host) for host in hosts]
    story.wait(1.0)
    return made


def trained(story: Story, group: Group, **wishes: Any) -> Any:
    group.train()
    return story.update(group, **wishes)


def begun(story: Story, group: Group, reached: Callable[[], object], **wishes: Any) -> list[Any]:
    """Calls, and lets time pass until something is reached."""
    group.train()
    (result,) = [story.call(trainer, **wishes) for trainer in group.trainers]
    end = story.world.now + 10.0
    while not reached():
        assert story.world.now < end, "it does not come to that"
        story.wait(0.001)
    return result


def not_brought(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """From now on: late replicas that are told why nothing is brought to them, and why."""
    told: list[tuple[str, str]] = []
    send = ManagerState.send

    def noted(state: ManagerState, member: Member, body: object) -> None:
        if isinstance(body, manager_pb2.NotBrought) and member.peer is not None and isinstance(member, Replica):
            told.append((member.name, body.reason))
        send(state, member, body)  # type: ignore[arg-type]

    monkeypatch.setattr(ManagerState, "send", noted)
    return told


def holds(agent: AgentShell) -> weights_pb2.Identity | None:
    assert agent.engine is not None
    return agent.engine.words().identity


def fills(report: manager_pb2.UpdateReport) -> dict[str, tuple[int, list[str], list[str]]]:
    """By relay: its stage, the relays that it was filled from, and those that were filled from it."""
    return {each.relay: (each.stage, list(each.upstream), list(each.relays)) for each in report.relays}


def test_a_relay_of_the_trainers_host_is_filled_for_those_of_others(story: Story) -> None:
    relays_on(story, A, B, C)
    agents, group = [story.replica(host=B), story.replica(host=C)], story.ranks(world_size=2)
    for _ in range(3):
        report = trained(story, group)
        assert outcomes(report) == {agent.name: NEW for agent in agents}
        assert fills(report) == {
            "relay a": (0, [], ["relay b", "relay c"]),
            "relay b": (1, ["relay a"], []),
            "relay c": (1, ["relay a"], []),
        }
        (between,) = [each for each in report.relays if each.relay == "relay a"]
        assert not between.replicas
        assert between.filled.bytes
        assert "relay a is filled for relay b and relay c, which do not reach the trainer" in report.prefetch
        assert "it is filled from relay a, since it does not reach the trainer" in report.prefetch


def test_a_replica_beside_the_trainer_reads_it_while_its_relay_is_filled_for_others(story: Story) -> None:
    relays_on(story, A, B)
    near, far, group = story.replica(host=A), story.replica(host=B), story.ranks()
    report = trained(story, group)
    assert outcomes(report) == {near.name: NEW, far.name: NEW}
    assert {each.relay: list(each.replicas) for each in report.relays} == {"relay a": [], "relay b": [far.name]}


def test_a_trainer_on_two_hosts_is_read_by_two_relays(story: Story) -> None:
    relays_on(story, A, B, C)
    far, group = story.replica(host=C), story.ranks(world_size=2, hosts=[A, B])
    report = trained(story, group)
    assert outcomes(report) == {far.name: NEW}
    assert fills(report)["relay c"] == (1, ["relay a", "relay b"], [])


def test_relays_of_both_hosts_of_a_trainer_give_each_other_what_they_have(story: Story) -> None:
    a, b, _ = relays_on(story, A, B, C)
    agents = [story.replica(host=A), story.replica(host=B), story.replica(host=C)]
    group = story.ranks(world_size=2, hosts=[A, B])
    for count in range(1, 4):
        report = trained(story, group)
        assert outcomes(report) == {agent.name: NEW for agent in agents}
        assert fills(report) == {
            "relay a": (1, ["relay b"], ["relay b", "relay c"]),
            "relay b": (1, ["relay a"], ["relay a", "relay c"]),
            "relay c": (1, ["relay a", "relay b"], []),
        }
        assert (a.fills, b.fills) == (count, count), "what came first stays where it is"
        assert "it is filled from relay b too, since it does not reach all of the trainer" in report.prefetch


def test_what_no_relay_reaches_is_told_what_to_start(story: Story) -> None:
    relays_on(story, B)
    story.replica(host=B)
    refused(trained(story, story.ranks()), Problem.CODE_FAILED_PRECONDITION, "start a relay on host A")
    assert not story.ledger.intents


@pytest.mark.parametrize("lost", ["A", "B"])
def test_a_relay_that_is_lost_is_named_before_what_else_would_help(story: Story, lost: str) -> None:
    """Whether it is the trainer's or the replica's: in containers of one machine, to run both in one would help too."""
    a, b = story.hosts = [
        weights_pb2.Host(boot_id="one kernel", pid_namespace=name, name=name, relay_directory=name, address=name)
        for name in "AB"
    ]
    relays = {relay.host.name: relay for relay in relays_on(story, a, b)}
    far, near, group = story.replica(host=b), story.replica(host=a), story.ranks(hosts=[a])
    assert outcomes(trained(story, group)) == {far.name: NEW, near.name: NEW}
    relays[lost].crash()
    story.wait(story.deadlines.lease + 1.0)
    report = trained(story, group)
    assert outcomes(report) == {far.name: OLD, near.name: NEW}
    why = next(each.problem.message for each in report.replicas if each.replica == far.name)
    assert why.startswith(f"relay {lost.lower()} had a session with this manager and has none now: start it")
    assert "out of reach" in why, "what else is wrong is told, too"


def test_a_step_in_between_counts_for_no_replica(story: Story) -> None:
    """It holds the version, but nobody is installed from it."""
    relays_on(story, A, B)
    near, far, group = story.replica(host=A), story.replica(host=B), story.ranks()
    near.machine._transports = ("shared_memory",)
    near.break_streams()
    story.wait(3.0)
    report = trained(story, group, until=HELD)
    assert report.held
    assert outcomes(report) == {near.name: OLD} or list(outcomes(report)) == [near.name]
    story.wait(3.0)
    assert holds(far) == report.identity


def test_the_trainer_goes_on_once_relays_of_other_hosts_hold_the_version(story: Story) -> None:
    relays_on(story, A, B)
    far, group = story.replica(host=B), story.ranks()
    result = begun(story, group, lambda: story.ledger.intents, until=HELD)
    story.wait(0.2)
    (report,) = result
    assert report.held
    first = report.identity
    group.train()
    second = story.call(group.trainers[0], until=HELD)
    story.wait(5.0)
    assert second[0].held
    assert second[0].identity.version == first.version + 1
    assert holds(far) == second[0].identity


@pytest.mark.parametrize("when", ["before it is filled", "while it is filled", "once it was filled"])
@pytest.mark.parametrize("how", ["killed", "stopped", "cut off", "killed and started again"])
def test_whoever_waits_for_a_relay_takes_another(story: Story, when: str, how: str) -> None:
    (a,) = relays_on(story, A)
    (b,) = relays_on(story, B)
    story.join_relay("spare", A)
    far, group = story.replica(host=B), story.ranks()

    def reached() -> bool:
        if when == "before it is filled":
            return bool(a.streams) and any(phase(story).endswith(each) for each in ("sealing", "combining"))
        return a.fills == 1 if when == "while it is filled" else b.fills == 1

    result = begun(story, group, reached)
    if "killed" in how:
        a.crash()
        if "again" in how:
            story.join_relay(a.name, A)
    elif how == "stopped":
        a.stop_for(30.0)
    else:
        story.faults.wire_cuts.add(frozenset("AB"))
        story.world.after(1.0, story.faults.wire_cuts.clear)
    story.wait(41.0)
    (report,) = result
    assert outcomes(report) == {far.name: NEW}, report
    assert holds(far) == report.identity
    assert any(relay.fills for relay in story.relays if relay.host == A)


@pytest.mark.parametrize("come", range(1, SLICES))
@pytest.mark.parametrize("origin", ["a", "spare"])
def test_a_relay_whose_origin_is_lost_goes_on_with_what_it_has(story: Story, come: int, origin: str) -> None:
    """The origin is started again at once, and the relay is told in the middle of its filling; or another relay takes
    the origin's place once that was waited for, and this one has answered."""
    (a,) = relays_on(story, A)
    (b,) = relays_on(story, B)
    if origin == "spare":
        story.join_relay("spare", A)
    far, group = story.replica(host=B), story.ranks()
    result = begun(story, group, lambda: b.passing is not None and len(b.passing.verified) == come)
    a.crash()
    if origin == "a":
        story.join_relay("a", A)
    manager, shares = story.cluster.manager, set()
    assert manager is not None
    while not result:
        story.wait(0.05)
        for holder in manager.machine.status().holders:
            shares |= {(each.bytes, each.wanted_bytes) for each in holder.shares if holder.name == "b"}
    assert shares == {(come, SLICES), (SLICES, SLICES)}, "the page shows how much of it there is"
    story.wait(5.0)
    (report,) = result
    assert outcomes(report) == {far.name: NEW}, report
    assert holds(far) == report.identity
    assert b.fills == 1, "nothing is brought again"
    (brought,) = [each.filled.brought for each in report.relays if each.relay == "relay b"]
    assert {each.source: each.bytes for each in brought} == {f"relay {origin}": SLICES - come}


def test_an_answer_that_comes_again_is_no_answer_to_the_next_command(
    story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The way to the relay was cut for a moment, and the network repeats what it said of that whenever it is told to
    try again: it is not taken for failed once more, which would use up all its tries."""
    _, b = relays_on(story, A, B)
    far, group, manager = story.replica(host=B), story.ranks(), story.cluster.manager
    assert manager is not None
    feed, watch = manager.feed, manager.watch
    failed: list[object] = []
    attempts: list[int] = []

    def heard(event: object) -> None:
        body = event.body if isinstance(event, Message) else None
        if isinstance(body, manager_pb2.RelayFilled) and body.HasField("problem") and not failed:
            failed.append(event)
            story.faults.wire_cuts.clear()
            story.faults.wire_delay = 2.0
        feed(event)

    def told(shell: ManagerShell, command: Any) -> None:
        if isinstance(command, Send) and isinstance(command.body, manager_pb2.FillRelay) and failed:
            attempts.append(command.body.attempt)
            story.world.after(0.002, lambda: feed(failed[0]))
        watch(shell, command)

    monkeypatch.setattr(manager, "feed", heard)
    monkeypatch.setattr(manager, "watch", told)
    story.faults.wire_cuts.add(frozenset("AB"))
    group.train()
    (result,) = [story.call(trainer) for trainer in group.trainers]
    story.wait(41.0)
    (report,) = result
    assert failed
    assert set(attempts) == {1}
    assert outcomes(report) == {far.name: NEW}
    assert b.fills == 2


def phase(story: Story) -> str:
    assert story.cluster.manager is not None
    return story.cluster.manager.machine.status().phase


def test_nobody_left_to_read_is_said_and_leaves_replicas_as_they_were(story: Story) -> None:
    a, _ = relays_on(story, A, B)
    near, far, group = story.replica(host=A), story.replica(host=B), story.ranks()
    first = trained(story, group)
    result = begun(story, group, lambda: a.fills == 2, timeout_seconds=15.0)
    a.crash()
    story.wait(16.0)
    (report,) = result
    assert outcomes(report) == {near.name: NEW, far.name: OLD}
    (told,) = [each for each in report.replicas if each.replica == far.name]
    assert "relay a is left out" in told.problem.message
    assert holds(far) == first.identity


def test_a_late_replica_is_brought_up_over_the_network_when_the_trainer_is_gone(story: Story) -> None:
    relays_on(story, A, B)
    story.replica(host=B)
    group = story.ranks()
    report = trained(story, group)
    story.end_group(group, in_good_order=True)
    (c,) = relays_on(story, C)
    late = story.replica(host=C)
    story.wait(5.0)
    assert holds(late) == report.identity
    assert c.fills == 1


def test_a_late_replica_waits_for_a_relay_of_its_host(story: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    relays_on(story, A, B)
    story.replica(host=B)
    group = story.ranks()
    report = trained(story, group)
    story.end_group(group, in_good_order=True)
    told = not_brought(monkeypatch)
    late = story.replica(host=C)
    story.wait(30.0)  # so that all tries are over
    assert holds(late) is None
    assert {name for name, _ in told} == {late.name}
    assert all("out of reach from host C" in reason for _, reason in told), told
    relays_on(story, C)
    story.wait(5.0)
    assert holds(late) == report.identity


def test_a_late_replica_is_told_once_that_nobody_holds_the_version(
    story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    story.replica()
    assert trained(story, story.ranks(kind="live")).ok
    told = not_brought(monkeypatch)
    late = story.replica()
    story.wait(20.0)
    assert holds(late) is None
    ((name, reason),) = told
    assert name == late.name
    assert "no source of it stays sealed, and nothing that is connected holds it" in reason


def test_a_late_replica_is_brought_up_after_a_restart_of_the_manager(story: Story) -> None:
    relays_on(story, A, B, C)
    story.replica(host=B)
    group = story.ranks()
    report = trained(story, group)
    story.end_group(group, in_good_order=False)
    assert story.cluster.manager is not None
    story.cluster.manager.crash()
    story.start_manager()
    story.wait(6.0)
    late = story.replica(host=C)
    story.wait(5.0)
    assert holds(late) == report.identity


def test_replicas_go_back_to_what_relays_of_other_hosts_hold(story: Story) -> None:
    relays_on(story, A, B)
    story.replica(host=B)
    group = story.ranks()
    first, second = trained(story, group), trained(story, group)
    (c,) = relays_on(story, C)
    late = story.replica(host=C)
    story.wait(5.0)
    assert holds(late) == second.identity
    report = story.roll_back(first.identity.version)
    assert isinstance(report, manager_pb2.UpdateReport), report
    assert set(outcomes(report).values()) == {NEW}
    assert holds(late) == first.identity
    assert c.fills == 2
