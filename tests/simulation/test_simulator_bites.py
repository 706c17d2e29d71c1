"""Proof that the simulator finds broken rules: each of these mistakes is caught by one of a few seeds."""

from __future__ import annotations

from typing import Any

import pytest

from ckpt_engine.machines.agent import install as agent_install
from ckpt_engine.machines.agent.machine import AgentMachine
from ckpt_engine.machines.agent.state import AgentReplica
from ckpt_engine.machines.events import HoldRequests, Key, TimerFired
from ckpt_engine.machines.manager import rank_calls, recipients, update
from ckpt_engine.machines.manager.course import CourseTimer
from ckpt_engine.machines.manager.state import ManagerState
from ckpt_engine.machines.manager.versions import Versions
from ckpt_engine.v1 import manager_pb2, worker_pb2
from tests.simulation.engine import CLEAN, Engine, Worker
from tests.simulation.mistakes import Mistake, Patch, must_be_noticed, name_of
from tests.simulation.scenario import Machines
from tests.simulation.world import Steps


class TrustingEngine(Engine):
    """Its workers call everything clean that they have read."""

    def _read(self, worker: Worker, order: worker_pb2.InstallOrder, end: float) -> Steps:
        try:
            yield from super()._read(worker, order, end)
        finally:
            worker.state, worker.identity = CLEAN, order.identity


def workers_do_not_verify(patch: Patch) -> Machines:
    """Stale and torn weights under a new label."""
    return Machines(engine=TrustingEngine)


def half_a_version_is_resumed(patch: Patch) -> None:
    """The agent resumes whatever the state words say."""
    patch.setattr(agent_install.Installing, "_judge", lambda self, now: self._resume(now))


def the_engine_is_believed(patch: Patch) -> None:
    """The agent takes the end of the engine's call for success and does not look at the state words."""
    patch.setattr(agent_install.Installing, "_all_new", lambda self: not self._going_back)


def nobody_is_resumed_later(patch: Patch) -> None:
    """An engine that did not resume in time stays paused."""
    patch.setattr(AgentMachine, "_reconcile", lambda self, now: None)


def epochs_are_not_spent(patch: Patch) -> None:
    """An epoch is used that a restarted manager would use again."""
    patch.setattr(ManagerState, "epoch_ready", lambda self: True)


def intents_are_not_written(patch: Patch) -> None:
    """The install begins without a durable intent."""

    def advance(self: update.CandidateJob, now: float) -> update.Job:
        fence = self.parts.course.state.next_install()
        self.parts.recipients.decide(fence, self.version.identity)
        install = update.InstallJob(self.parts, self.version, fence, now)
        install.begin(now)
        return install

    patch.setattr(update.CandidateJob, "advance", advance)


def roots_are_not_compared(patch: Patch) -> None:
    """The same version number with other weights."""
    patch.setattr(Versions, "check_number", lambda self, identity, late: None)


def updates_have_no_end(patch: Patch) -> None:
    """The manager waits for ever for a replica whose agent lives, but never installs."""
    agents_never_install(patch)
    patch.setattr(update.Update, "_out_of_time", lambda self, now: None)


def agents_never_install(patch: Patch) -> None:
    """Agents that look well and drop every Install. No promise is broken by that alone until the world has healed."""
    original = AgentMachine._message

    def message(self: AgentMachine, body: object, now: float) -> None:
        if not isinstance(body, manager_pb2.Install):
            original(self, body, now)

    patch.setattr(AgentMachine, "_message", message)


def installs_are_not_repeated(patch: Patch) -> None:
    """A lost Install is never sent again, nor is anything else; the agent's own timers fire as always."""
    original = update.Update.timer

    def timer(self: update.Update, step: Key, now: float) -> None:
        if step is not CourseTimer.RESEND:
            original(self, step, now)

    patch.setattr(update.Update, "timer", timer)
    patch.setattr(recipients.Recipients, "leave_out", lambda self, name, problem: None)


def agents_ignore_time(patch: Patch) -> None:
    """An agent whose timers never fire: no heartbeat, no second look."""
    original = AgentMachine.handle

    def handle(self: AgentMachine, event: object, now: float) -> list[object]:
        return [] if isinstance(event, TimerFired) else original(self, event, now)  # type: ignore[arg-type,return-value]

    patch.setattr(AgentMachine, "handle", handle)


def outcomes_are_invented(patch: Patch) -> None:
    """An agent that calls every end a success."""
    original = agent_install.Installing._conclude

    def conclude(self: agent_install.Installing, outcome: manager_pb2.Outcome, now: float) -> None:
        original(self, manager_pb2.OUTCOME_NEW_SERVING, now)

    patch.setattr(agent_install.Installing, "_conclude", conclude)


def reports_leave_out_who_is_away(patch: Patch) -> None:
    """An update is for those that are connected, and a report for nobody else."""
    original = rank_calls.replicas_for

    def replicas_for(state: ManagerState, request: manager_pb2.UpdateWeightsRequest, now: float) -> tuple[str, ...]:
        return tuple(name for name in original(state, request, now) if state.members.replicas[name].peer is not None)

    patch.setattr(rank_calls, "replicas_for", replicas_for)


def one_is_always_enough(patch: Patch) -> None:
    """A report is ok as soon as one replica serves the new version."""
    original = update.build_report

    def build_report(*arguments: Any, **named: Any) -> manager_pb2.UpdateReport:
        report = original(*arguments, **named)
        report.ok = any(outcome.outcome == manager_pb2.OUTCOME_NEW_SERVING for outcome in report.replicas)
        return report

    patch.setattr(update, "build_report", build_report)


def requests_are_not_kept(patch: Patch) -> None:
    """The gate is not told that an install begins, so it refuses who comes."""
    patch.setattr(AgentReplica, "hold", lambda self, epoch, left, closed=False: HoldRequests(0, 0.0))


def nobody_is_let_in_again(patch: Patch) -> None:
    """Requests wait until the deadline of an update that has long ended well."""
    original = AgentReplica.hold

    def hold(self: AgentReplica, epoch: int, left: float, closed: bool = False) -> HoldRequests:
        return original(self, epoch or 1, left or 10.0, closed)

    patch.setattr(AgentReplica, "hold", hold)


def requests_wait_for_ever(patch: Patch) -> None:
    """What a dead agent leaves behind has no end."""
    original = AgentReplica.hold
    patch.setattr(AgentReplica, "hold", lambda self, epoch, left, closed=False: original(self, epoch, 1e6, closed))


MISTAKES: list[Mistake] = [
    workers_do_not_verify,
    half_a_version_is_resumed,
    the_engine_is_believed,
    nobody_is_resumed_later,
    epochs_are_not_spent,
    intents_are_not_written,
    roots_are_not_compared,
    updates_have_no_end,
    installs_are_not_repeated,
    agents_ignore_time,
    outcomes_are_invented,
    reports_leave_out_who_is_away,
    one_is_always_enough,
    requests_are_not_kept,
    nobody_is_let_in_again,
    requests_wait_for_ever,
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=name_of)
def test_a_mistake_is_found(mistake: Mistake, monkeypatch: pytest.MonkeyPatch) -> None:
    must_be_noticed(mistake, monkeypatch)
