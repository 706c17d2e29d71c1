"""Each rule of DESIGN.md ("Rules that close the holes", and the gate) is taken out, and some seed must notice.

A test's id is the rule. README.md says which rules the simulation cannot break, and where they are tested.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from typing import Any

import pytest

from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.core.version import Version
from ckpt_engine.gate import page
from ckpt_engine.machines.agent import install as agent_install
from ckpt_engine.machines.agent import ready as agent_ready
from ckpt_engine.machines.agent.machine import AgentMachine
from ckpt_engine.machines.agent.sleep import SleepingOrWaking
from ckpt_engine.machines.agent.state import AgentReplica as AgentReplica
from ckpt_engine.machines.events import PeerLost, StampEngine
from ckpt_engine.machines.manager import ledger_recovery, members, recipients, update
from ckpt_engine.machines.manager.plan_pipeline import Way
from ckpt_engine.machines.trainer.machine import TrainerMachine
from ckpt_engine.v1 import manager_pb2, weights_pb2, worker_pb2
from tests.simulation import world
from tests.simulation.engine import CLEAN, DIRTY, NONE, Engine, Worker
from tests.simulation.manager import Ledger
from tests.simulation.mistakes import Mistake, Patch, must_be_noticed, name_of
from tests.simulation.scenario import Machines, Slant, run_seed
from tests.simulation.weights import SourceGoneError
from tests.simulation.world import Signal, Steps

# ------------------------------------------------------------------------------------------- marks, and who is believed


class LateMark(Engine):
    def _read(self, worker: Worker, order: worker_pb2.InstallOrder, end: float) -> Steps:
        source = self.truth.sources[bytes.fromhex(json.loads(order.plan)["0"])]
        with contextlib.suppress(SourceGoneError):
            worker.weights[0] = source.read(0)
        yield 0.01
        yield from super()._read(worker, order, end)


class EarlyMark(Engine):
    def _read(self, worker: Worker, order: worker_pb2.InstallOrder, end: float) -> Steps:
        try:
            yield from super()._read(worker, order, end)
        finally:
            worker.state, worker.identity = CLEAN, order.identity


def a_worker_is_dirty_before_the_first_byte(patch: Patch) -> Machines:
    """It writes first and marks itself then."""
    return Machines(engine=LateMark)


def a_worker_is_clean_only_after_verifying(patch: Patch) -> Machines:
    """It calls clean whatever it has read."""
    return Machines(engine=EarlyMark)


def a_new_agent_believes_workers_only(patch: Patch) -> None:
    """It assumes that its engine is as an engine should be: running, and with no order on its way."""
    original = AgentMachine._engine_ready

    def ready(self: AgentMachine, event: Any, now: float) -> None:
        original(self, event, now)
        self.replica.paused, self.replica.accounted = False, True

    patch.setattr(AgentMachine, "_engine_ready", ready)


def an_unknown_boot_id_means_version_none(patch: Patch) -> None:
    """What the page says of a dead worker is believed."""
    original = Worker.word

    def word(self: Worker) -> page.WorkerWord:
        alive, self.alive = self.alive, True
        try:
            return original(self)
        finally:
            self.alive = alive

    patch.setattr(Worker, "word", word)


def there_is_one_agent_for_an_engine(patch: Patch) -> None:
    """The lock in the engine's directory does not hold."""
    patch.setattr(Engine, "held_by_another", lambda self, agent: False)


# -------------------------------------------------------------------------------------------------- installs and fences


def an_install_goes_on_without_its_manager(patch: Patch) -> None:
    """It is dropped when the manager is lost."""
    original = AgentMachine.handle

    def handle(self: AgentMachine, event: Any, now: float) -> list[Any]:
        operation = self.replica.operation
        if isinstance(event, PeerLost) and operation is not None and operation.kind == "install":
            self.replica.operation = None
        return original(self, event, now)

    patch.setattr(AgentMachine, "handle", handle)


def an_install_has_a_deadline(patch: Patch) -> None:
    """Its steps take whatever time they want."""
    original = agent_install.Installing.start

    def start(self: agent_install.Installing, now: float) -> None:
        original(self, now)
        self._end += 1000.0

    patch.setattr(agent_install.Installing, "start", start)


def every_worker_is_ready_before_its_engine_pauses(patch: Patch) -> None:
    """Nobody asks them: the first install after a publication opens and maps inside its pause."""
    patch.setattr(agent_ready.Readying, "unready", lambda self: [])


def workers_that_slept_are_asked_again(patch: Patch) -> None:
    """What they had ready before they let go of it for a sleep counts still."""
    original = SleepingOrWaking._next

    def following(self: SleepingOrWaking, now: float) -> None:
        ready = dict(self.replica.ready)
        original(self, now)
        self.replica.ready.update(ready)

    patch.setattr(SleepingOrWaking, "_next", following)


def an_agent_obeys_no_lower_fence(patch: Patch) -> None:
    """It obeys every command, however old."""
    patch.setattr(AgentMachine, "_highest", property(lambda self: 0, lambda self, value: None), raising=False)


def a_trainer_seals_for_no_lower_or_equal_fence(patch: Patch) -> None:
    """It seals for every command, however old or often it comes."""
    original = TrainerMachine._seal

    def seal(self: TrainerMachine, command: manager_pb2.Seal) -> None:
        self._epoch = 0
        original(self, command)

    patch.setattr(TrainerMachine, "_seal", seal)


def a_manager_drops_answers_with_other_fences(patch: Patch) -> None:
    """An outcome counts for whatever update runs."""
    original = update.Update.message

    def message(self: update.Update, member: Any, body: object, now: float) -> None:
        outcome = isinstance(body, manager_pb2.ReplicaOutcome) and self.phase == "installing"
        if outcome and member.name in self.goal.replicas:
            self._parts.recipients.take_outcome(body, member.name)
            self._go_on(now)
        else:
            original(self, member, body, now)

    patch.setattr(update.Update, "message", message)


# ---------------------------------------------------------------------------------------------------- inside an engine


class RaisingEngine(Engine):
    """An exception in one worker leaves its engine's other workers waiting for ever."""

    def _read(self, worker: Worker, order: worker_pb2.InstallOrder, end: float) -> Steps:
        try:
            yield from super()._read(worker, order, end)
        except Exception:
            yield Signal()


def nothing_raises_inside_an_engine(patch: Patch) -> Machines:
    """A worker that fails raises instead of telling."""
    return Machines(engine=RaisingEngine)


def a_version_is_stamped_after_verifying_only(patch: Patch) -> None:
    """The engine is stamped whatever its workers hold."""

    def judge(self: agent_install.Installing, now: float) -> None:
        self.run("stamp", StampEngine(self.install.identity, 1.0))

    patch.setattr(agent_install.Installing, "_judge", judge)


def a_call_without_an_answer_has_an_unknown_outcome(patch: Patch) -> None:
    """A pause that got no answer is taken for one that did not happen."""
    original = agent_install.Installing._paused

    def paused(self: agent_install.Installing, done: Any, now: float) -> None:
        original(self, done, now)
        if done.problem is not None:
            self.replica.paused = False

    patch.setattr(agent_install.Installing, "_paused", paused)


def nobody_resumes_while_an_order_may_be_acted_on(patch: Patch) -> None:
    """Orders that workers have fetched are forgotten."""
    patch.setattr(AgentReplica, "orders", property(lambda self: {}, lambda self, value: None), raising=False)


# -------------------------------------------------------------------------------------------------- leases and sources


def an_update_waits_for_every_reader(patch: Patch) -> None:
    """It ends when the first replica has its outcome."""
    original = recipients.Recipients.waiting_for
    patch.setattr(recipients.Recipients, "waiting_for", lambda self: [] if self.outcomes else original(self))


class BelievingEngine(Engine):
    def _read(self, worker: Worker, order: worker_pb2.InstallOrder, end: float) -> Steps:
        try:
            yield from super()._read(worker, order, end)
        except CkptEngineError as error:
            if error.problem.code != weights_pb2.Problem.CODE_DATA_LOSS:
                raise
            worker.state, worker.identity = CLEAN, order.identity


def what_is_served_hashes_to_what_was_sealed(patch: Patch) -> Machines:
    """A read that the optimizer overtook is taken as it is."""
    return Machines(engine=BelievingEngine)


def a_late_replica_gets_the_very_version(patch: Patch) -> None:
    """Whatever its sources have sealed by now is installed under the name of the latest version."""
    original = update.SealJob._next_job

    def next_job(self: update.SealJob, way: Way, now: float) -> update.Job:
        goal = self._parts.goal
        if goal.is_attempt and goal.sealed is not None:
            way = replace(way, combined=replace(way.combined, root=goal.sealed.root))
        return original(self, way, now)

    patch.setattr(update.SealJob, "_next_job", next_job)


# ----------------------------------------------------------------------------------------------------------- the ledger


def what_replicas_hold_comes_from_workers_only(patch: Patch) -> None:
    """The manager remembers what it has installed, and believes that."""

    def holds(self: members.Replica, identity: Version) -> bool:
        last = self.last_outcome
        return (
            last is not None and last.outcome == manager_pb2.OUTCOME_NEW_SERVING and Version.of(last.after) == identity
        )

    patch.setattr(members.Replica, "holds", holds)
    patch.setattr(members.Replica, "serving", property(lambda self: True, lambda self, value: None), raising=False)


def a_rolled_back_ledger_goes_on_above_its_members(patch: Patch) -> None:
    """Epochs begin again where the copy of the ledger ended."""
    patch.setattr(ledger_recovery.LedgerRecovery, "learn", lambda self, hello: False)


def one_manager_writes_a_ledger(patch: Patch) -> None:
    """A manager that lost its lock goes on writing."""
    original = Ledger.check
    patch.setattr(Ledger, "check", lambda self, generation, now: original(self, self.generation, now))


def only_remaining_durations_travel(patch: Patch) -> None:
    """A deadline is a moment by the manager's clock, and an agent compares it with its own."""
    worlds: list[world.World] = []
    made, started = world.World.__init__, agent_install.Installing.start

    def make(self: world.World, seed: int) -> None:
        made(self, seed)
        worlds.append(self)

    def start(self: agent_install.Installing, now: float) -> None:
        started(self, now)
        self._end += now - worlds[-1].now

    patch.setattr(world.World, "__init__", make)
    patch.setattr(agent_install.Installing, "start", start)


# ------------------------------------------------------------------------------------------------------------- the gate


def lenient_gate(patch: Patch, overlooked: str) -> None:
    """The gate's verdict without one of its conditions."""
    original = page.verdict

    def verdict(words: list[page.WorkerWord], own_weights: bool = False) -> page.Admission:
        if own_weights:
            return original(words, own_weights)
        shut = {
            "none": any(word.state == NONE for word in words),
            "dirty": any(word.state == DIRTY for word in words),
            "dead": not all(word.alive for word in words),
            "disagreeing": any(word.identity != words[0].identity for word in words if word.state == CLEAN),
        }
        reasons = [reason for reason, true in shut.items() if true and reason != overlooked]
        return page.Admission(not reasons, ", ".join(reasons), None if reasons else words[0].identity)

    patch.setattr(page, "verdict", verdict)


def the_gate_is_closed_before_the_first_install(patch: Patch) -> None:
    """Workers that hold nothing of ours do not close it."""
    lenient_gate(patch, "none")


def the_gate_is_closed_while_dirty(patch: Patch) -> None:
    """Workers that hold half a version do not close it."""
    lenient_gate(patch, "dirty")


def the_gate_is_closed_when_a_worker_died(patch: Patch) -> None:
    """A word counts although its worker is gone."""
    lenient_gate(patch, "dead")


def the_gate_is_closed_while_workers_disagree(patch: Patch) -> None:
    """Different versions do not close it."""
    lenient_gate(patch, "disagreeing")


RULES: list[Mistake] = [
    a_worker_is_dirty_before_the_first_byte,
    a_worker_is_clean_only_after_verifying,
    a_new_agent_believes_workers_only,
    an_unknown_boot_id_means_version_none,
    there_is_one_agent_for_an_engine,
    an_install_goes_on_without_its_manager,
    an_install_has_a_deadline,
    every_worker_is_ready_before_its_engine_pauses,
    workers_that_slept_are_asked_again,
    an_agent_obeys_no_lower_fence,
    a_trainer_seals_for_no_lower_or_equal_fence,
    a_manager_drops_answers_with_other_fences,
    nothing_raises_inside_an_engine,
    a_version_is_stamped_after_verifying_only,
    a_call_without_an_answer_has_an_unknown_outcome,
    nobody_resumes_while_an_order_may_be_acted_on,
    an_update_waits_for_every_reader,
    what_is_served_hashes_to_what_was_sealed,
    a_late_replica_gets_the_very_version,
    what_replicas_hold_comes_from_workers_only,
    a_rolled_back_ledger_goes_on_above_its_members,
    one_manager_writes_a_ledger,
    only_remaining_durations_travel,
    the_gate_is_closed_before_the_first_install,
    the_gate_is_closed_while_dirty,
    the_gate_is_closed_when_a_worker_died,
    the_gate_is_closed_while_workers_disagree,
]


SLANTS: dict[Mistake, Slant] = {
    a_new_agent_believes_workers_only: Slant(often=frozenset({"agent_restarts"})),
    an_unknown_boot_id_means_version_none: Slant(often=frozenset({"worker_dies"})),
    there_is_one_agent_for_an_engine: Slant(often=frozenset({"second_agent"})),
    an_install_goes_on_without_its_manager: Slant(often=frozenset({"break_somebody"})),
    an_install_has_a_deadline: Slant(worse={"engine_hang": 0.4}),
    an_agent_obeys_no_lower_fence: Slant(worse={"delay": 1.0, "duplicate": 0.5}),
    nobody_resumes_while_an_order_may_be_acted_on: Slant(worse={"write_late": 0.5}),
    what_is_served_hashes_to_what_was_sealed: Slant(worse={"read_late": 0.3}),
    a_late_replica_gets_the_very_version: Slant(often=frozenset({"engine_is_swapped"}), worse={"task": 0.1}),
    what_replicas_hold_comes_from_workers_only: Slant(often=frozenset({"engine_is_swapped"}), repeats=0.7),
    one_manager_writes_a_ledger: Slant(often=frozenset({"lock_is_lost"})),
    a_rolled_back_ledger_goes_on_above_its_members: Slant(often=frozenset({"copy_is_put_back"})),
    only_remaining_durations_travel: Slant(worse={"engine_hang": 0.4, "drift": 0.03}),
    the_gate_is_closed_when_a_worker_died: Slant(often=frozenset({"worker_dies"})),
}
"""What makes it likely that a rule is needed."""


@pytest.mark.parametrize("rule", RULES, ids=name_of)
def test_some_seed_notices_without(rule: Mistake, monkeypatch: pytest.MonkeyPatch) -> None:
    must_be_noticed(rule, monkeypatch, SLANTS.get(rule))


@pytest.mark.parametrize(
    "seeds",
    [
        range(1),
        pytest.param(range(1, 4), marks=pytest.mark.slow),
        pytest.param(range(4, 10), marks=[pytest.mark.slow, pytest.mark.hours]),
    ],
    ids=["one", "more", "most"],
)
@pytest.mark.parametrize("rule", SLANTS, ids=name_of)
def test_no_seed_complains_with(rule: Mistake, seeds: range) -> None:
    """What is made more likely is not what breaks the promise."""
    for seed in seeds:
        run_seed(seed, crashes=True, slant=SLANTS[rule])
