"""Replicas that an operator holds: what updates, attempts of their own, rollbacks and restarts do with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ckpt_engine.machines import events
from ckpt_engine.machines.manager.machine import ManagerMachine
from ckpt_engine.machines.manager.members import Replica
from ckpt_engine.machines.manager.operators import REASON_CHARACTERS, OperatorHolds
from ckpt_engine.machines.manager.recipients import Recipients
from ckpt_engine.machines.manager.reconcile import CatchUp
from ckpt_engine.machines.manager.versions import Content
from ckpt_engine.v1 import manager_pb2
from tests.simulation.manager import ManagerShell
from tests.simulation.mistakes import Mistake, Patch, must_be_noticed, name_of
from tests.simulation.scenario import Slant
from tests.simulation.story import NEW, OLD, Problem, Story, outcomes, refused

HELD = "held by an operator since 1970-01-01 00:"


@pytest.fixture
def story() -> Story:
    return Story()


def status_of(story: Story, name: str) -> manager_pb2.ReplicaStatus:
    replicas = story.cluster.manager.machine.status().replicas  # type: ignore[union-attr]
    return next(replica for replica in replicas if replica.name == name)


def test_an_update_leaves_out_what_is_held_and_its_release_brings_it_up(story: Story) -> None:
    held, other = story.replica(), story.replica()
    group = story.ranks(kind="snapshot")
    before = story.update(group).identity
    answer = story.hold(held.name, "a GPU looks broken")
    assert answer.hold.reason == "a GPU looks broken"
    report = story.trained(group)
    assert outcomes(report) == {held.name: OLD, other.name: NEW}
    (left,) = (each for each in report.replicas if each.replica == held.name)
    assert HELD in left.problem.message
    assert f"(a GPU looks broken): release it with `ckpt-engine replica release {held.name}`" in left.problem.message
    assert left.operator_hold
    assert report.ok, "what an operator holds does not count"
    story.wait(60.0)
    assert story.held_by(held) == before
    told = status_of(story, held.name)
    assert told.hold == answer.hold
    assert HELD in told.drift.reason
    assert not told.drift.HasField("next_attempt_seconds")
    assert told.serving
    refused(story.retry(held.name), Problem.CODE_FAILED_PRECONDITION, HELD)
    assert "it is to serve version 1 of lineage 'run'" in story.release(held.name).message
    story.wait(5.0)
    assert story.held_by(held) == report.identity
    assert not status_of(story, held.name).HasField("hold")
    assert outcomes(story.last_report()) == {held.name: NEW, other.name: NEW}, "the report is corrected"
    assert story.trained(group).ok


def test_a_call_that_names_what_is_held_is_refused_before_anything_is_touched(story: Story) -> None:
    held, other = story.replica(), story.replica()
    story.relay()
    group = story.ranks()
    story.update(group)
    story.hold(held.name)
    result = story.trained(group, replicas=[held.name, other.name])
    refused(
        result, Problem.CODE_FAILED_PRECONDITION, f"replica {held.name!r} is {HELD}", "or leave it out of this call"
    )
    assert result.replica == held.name
    refused(
        story.roll_back(0, replicas=[held.name]), Problem.CODE_FAILED_PRECONDITION, f"replica {held.name!r} is {HELD}"
    )
    assert story.update(group, replicas=[other.name]).ok


def test_with_everything_held_an_update_is_refused(story: Story) -> None:
    held = story.replica()
    group = story.ranks()
    story.hold(held.name)
    refused(story.update(group), Problem.CODE_FAILED_PRECONDITION, "0 replicas can be updated, 1 are required", HELD)


def test_min_replicas_does_not_count_what_is_held(story: Story) -> None:
    held, _ = story.replica(), story.replica()
    group = story.ranks()
    story.hold(held.name)
    refused(story.update(group, min_replicas=2), Problem.CODE_FAILED_PRECONDITION, "1 replicas can be updated, 2", HELD)
    assert story.update(group, min_replicas=1).ok


def test_a_rollback_leaves_it_out(story: Story) -> None:
    held, other = story.replica(), story.replica()
    story.relay()
    group = story.ranks()
    before = story.trained(group).identity
    after = story.trained(group).identity
    story.hold(held.name)
    report = story.roll_back(before.version)
    assert outcomes(report) == {held.name: OLD, other.name: NEW}
    assert (story.held_by(held), story.held_by(other)) == (after, before)


def test_it_outlives_the_manager_and_the_agent(story: Story) -> None:
    story.replica()
    group = story.ranks(kind="snapshot")
    story.update(group)
    late = story.replica()
    assert story.held_by(late) == story.held_by(next(iter(story.agents.values())))
    since = story.hold(late.name, "over night").hold.since
    story.engine_again(late)
    story.restart_manager()
    story.wait(60.0)
    assert story.held_by(late) is None, "nothing brings it up"
    told = status_of(story, late.name)
    assert (told.hold.since, told.hold.reason) == (since, "over night")
    assert f"({'over night'})" in told.drift.reason
    story.release(late.name)
    story.restart_manager()
    story.wait(5.0)
    assert story.held_by(late) is not None


def test_an_attempt_that_runs_is_cut_short(story: Story) -> None:
    """It has not begun to install, since its plan takes time."""
    story.replica()
    group = story.ranks(kind="snapshot")
    story.update(group)
    story.join_replica(manager_pb2.MODE_STANDALONE)
    late = list(story.agents.values())[-1]
    story.until(lambda: f"bringing up {late.name}" in story.phase)
    over = story.cluster.manager.operate(manager_pb2.HoldReplicaRequest(name=late.name))  # type: ignore[union-attr]
    story.until(lambda: over.value is not None)
    story.wait(30.0)
    assert story.held_by(late) is None
    assert HELD in status_of(story, late.name).drift.reason


def test_what_is_asked_again_changes_nothing_but_the_reason(story: Story) -> None:
    held = story.replica()
    first = story.hold(held.name).hold
    story.wait(5.0)
    assert story.hold(held.name).hold == first
    second = story.hold(held.name, "now it has one").hold
    assert (second.since, second.reason) == (first.since, "now it has one")
    assert story.hold(held.name).hold == second
    assert story.release(held.name).message == "released; nothing is meant for it yet"
    assert story.release(held.name).message == "nothing is to be done: it is not held"


def test_what_cannot_be_held(story: Story) -> None:
    held = story.replica()
    colocated = story.replica(manager_pb2.MODE_COLOCATED)
    refused(story.hold("nobody"), Problem.CODE_NOT_FOUND, "there is no replica 'nobody'")
    refused(story.release("nobody"), Problem.CODE_NOT_FOUND, "there is no replica 'nobody'")
    refused(story.hold(colocated.name), Problem.CODE_FAILED_PRECONDITION, "it receives no weights")
    refused(story.hold(held.name, "x" * (REASON_CHARACTERS + 1)), Problem.CODE_INVALID_ARGUMENT, "got 501")
    assert not status_of(story, held.name).HasField("hold")


def test_a_disk_that_refuses_changes_nothing(story: Story) -> None:
    held = story.replica()
    story.ledger.refuses = "the disk is full"
    refused(story.hold(held.name), Problem.CODE_FAILED_PRECONDITION, "the disk is full")
    assert not status_of(story, held.name).HasField("hold")
    story.ledger.refuses = ""
    story.hold(held.name)
    story.ledger.refuses = "the disk is full"
    refused(story.release(held.name), Problem.CODE_FAILED_PRECONDITION, "the disk is full")
    assert status_of(story, held.name).HasField("hold")


def test_a_name_stays_held_while_its_replica_is_gone_and_is_free_once_it_is_evicted(story: Story) -> None:
    held = story.replica()
    story.hold(held.name)
    held.leave()
    story.wait(1.0)
    (warning,) = story.cluster.manager.machine.status().warnings  # type: ignore[union-attr]
    assert f"no replica {held.name!r} is registered, and its name is {HELD}" in warning
    assert "no replica of that name is registered now" in story.release(held.name).message
    other = story.replica()
    story.hold(other.name)
    story.evict(other.name)
    story.wait(1.0)
    assert story.ledger.holds == {}


def test_two_calls_about_one_replica_do_not_cross(story: Story) -> None:
    held = story.replica()
    manager = story.cluster.manager
    assert manager is not None
    first = manager.operate(manager_pb2.HoldReplicaRequest(name=held.name))
    second = manager.operate(manager_pb2.ReleaseReplicaRequest(name=held.name))
    story.wait(1.0)
    assert isinstance(first.value, manager_pb2.HoldReplicaResponse)
    refused(second.value, Problem.CODE_ABORTED, "try again")
    assert held.name in story.ledger.holds


# ------------------------------------------------------------------------------------------ rules, taken out one by one


def no_attempt_is_made_for_what_is_held(patch: Patch) -> None:
    """It is brought up as if it were not held."""
    original = CatchUp._hindrance

    def hindrance(self: CatchUp, replica: Replica, content: Content) -> str:
        found = original(self, replica, content)
        return "" if "held by an operator" in found else found

    patch.setattr(CatchUp, "_hindrance", hindrance)


def an_attempt_that_runs_is_cut_short(patch: Patch) -> None:
    """It goes on."""
    original = OperatorHolds.written

    def written(self: OperatorHolds, *arguments: Any) -> None:
        with pytest.MonkeyPatch.context() as within:
            within.setattr(self.late_replicas, "cut_short", lambda *_: None)
            original(self, *arguments)

    patch.setattr(OperatorHolds, "written", written)


def updates_leave_out_what_is_held(patch: Patch) -> None:
    """They are for it as for all others."""
    original = Recipients.prepare

    def prepare(self: Recipients, seconds: float) -> None:
        holds, self._state.holds = self._state.holds, {}
        original(self, seconds)
        self._state.holds = holds

    patch.setattr(Recipients, "prepare", prepare)


def holds_outlive_the_manager(patch: Patch) -> None:
    """Another one does not know of them."""
    original = ManagerMachine.__init__

    def init(self: ManagerMachine, *arguments: Any, **named: Any) -> None:
        original(self, *arguments, **named | {"holds": {}})

    patch.setattr(ManagerMachine, "__init__", init)


def a_hold_counts_once_it_is_on_the_disk(patch: Patch) -> None:
    """It is answered, and not written."""
    original = ManagerShell._task

    def task(self: ManagerShell, task: Any, record: Any) -> Any:
        if not isinstance(task, events.RecordHold):
            return (yield from original(self, task, record))
        before = dict(self.ledger.holds)
        hold = yield from original(self, task, record)
        self.ledger.holds = before
        return hold

    patch.setattr(ManagerShell, "_task", task)


RULES: list[Callable[[Patch], None]] = [
    no_attempt_is_made_for_what_is_held,
    an_attempt_that_runs_is_cut_short,
    updates_leave_out_what_is_held,
    holds_outlive_the_manager,
    a_hold_counts_once_it_is_on_the_disk,
]


@pytest.mark.parametrize("mistake", RULES, ids=name_of)
def test_the_simulation_notices_without_the_rule(mistake: Mistake, monkeypatch: pytest.MonkeyPatch) -> None:
    must_be_noticed(mistake, monkeypatch, Slant(often=frozenset({"somebody_holds"})))
