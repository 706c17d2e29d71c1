"""What must be true after every event, whatever happens: promises 1 and 2 of the design.

1. Weights are whole: an open gate means that every worker holds, byte for byte, what was sealed under the identity that
   all of them name; and while a worker holds half of a version its engine is paused.
2. Every update ends: calls and installs by their deadline; an agent that says NEW or OLD SERVING is serving that; an
   engine that is paused is known to be by its agent. Epochs only rise, are spent before they are used, and nothing is
   installed whose intent is not on the disk.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckpt_engine.core.machines import events
from ckpt_engine.v1 import manager_pb2, weights_pb2
from tests.simulation.engine import CLEAN, DIRTY, Engine

if TYPE_CHECKING:
    from tests.simulation.members import AgentShell
    from tests.simulation.scenario import Scenario

BOUND = 1.0
"""Seconds that something may be over its deadline: messages travel, tasks are noticed."""


class BrokenPromiseError(AssertionError):
    """A promise was broken."""


class Invariants:
    """Watches one scenario."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.world = scenario.world
        self.outcomes: dict[str, int] = {}
        self._installs: dict[tuple[AgentShell, int], float] = {}
        self._highest_intent = 0
        self._seen: dict[str, object] = {}

    def check(self) -> None:
        """After every event."""
        for name, agent in self.scenario.agents.items():
            if agent.engine is not None and agent.engine.alive:
                self._whole(agent.engine)
            if agent.alive:
                self._agent(name, agent)
        manager = self.scenario.cluster.manager
        if manager is not None and manager.alive:
            for call in manager.calls.values():
                patience = call.request.timeout_seconds or self.scenario.deadlines.update
                if self.world.now > call.begun + patience + BOUND:
                    raise BrokenPromiseError(f"the call of rank {call.request.rank} has no end after {patience} s")

    def _whole(self, engine: Engine) -> None:
        workers = engine.workers
        first = workers[0].identity
        if all(worker.state == CLEAN and (worker.identity is first or worker.identity == first) for worker in workers):
            assert first is not None
            content = self.scenario.truth.content.get(first.root)
            if content is None:
                raise BrokenPromiseError(f"{engine.name} serves {first}, which nobody sealed")
            for worker in workers:
                if worker.weights != content:
                    raise BrokenPromiseError(f"{engine.name} worker {worker.rank} has {worker.weights}, not {content}")
        elif not engine.paused and any(worker.state == DIRTY for worker in workers):
            raise BrokenPromiseError(f"{engine.name} computes with half a version")

    def _agent(self, name: str, agent: AgentShell) -> None:
        replica = agent.machine.replica
        engine = agent.engine
        if engine is not None and engine.paused and replica.paused is False:
            raise BrokenPromiseError(f"{name} is paused, and its agent thinks that it is not")
        outcome = replica.last_outcome
        if outcome is not None and outcome is not self._seen.get(name):
            self._seen[name] = outcome
            self._outcome(name, engine, outcome)
        operation = replica.operation
        if operation is not None and operation.kind == "install":
            key = (agent, operation.number)
            end = self._installs.setdefault(key, self.world.now + operation.install.deadline_seconds)
            if self.world.now > end + BOUND:
                raise BrokenPromiseError(f"{name} has no outcome of epoch {operation.fence.epoch} in time")

    def _outcome(self, name: str, engine: Engine | None, outcome: manager_pb2.ReplicaOutcome) -> None:
        kind = manager_pb2.Outcome.Name(outcome.outcome)
        self.outcomes[kind] = self.outcomes.get(kind, 0) + 1
        self.world.note(f"{name}: epoch {outcome.fence.epoch} {kind} {outcome.problem.message}")
        if outcome.outcome == manager_pb2.QUARANTINED:
            if not outcome.problem.message:
                raise BrokenPromiseError(f"{name} was quarantined without a reason")
            return
        if engine is None or not engine.alive:
            return  # it died in the same moment; the next words say so
        words = engine.words()
        if engine.paused or not words.open:
            raise BrokenPromiseError(f"{name} says {kind}, but it is {'paused' if engine.paused else words.reason}")
        if outcome.outcome == manager_pb2.NEW_SERVING:
            wanted = self.scenario.ledger.intents[outcome.fence.epoch]
            if outcome.after != wanted:
                raise BrokenPromiseError(f"{name} says NEW_SERVING of {wanted}, but it holds {outcome.after}")
        if words.identity != outcome.after:
            raise BrokenPromiseError(f"{name} says that it holds {outcome.after}, but it holds {words.identity}")

    def watch(self, command: Any) -> None:
        """Every command of the manager, before it is performed."""
        ledger = self.scenario.ledger
        match command:
            case events.Send(_, manager_pb2.Install() as body):
                intent = ledger.intents.get(body.fence.epoch)
                if intent is None or intent != body.identity:
                    raise BrokenPromiseError(f"epoch {body.fence.epoch} is installed without its intent")
                self._fence(body.fence)
            case events.Send(_, manager_pb2.Prepare() | manager_pb2.Seal() | manager_pb2.SleepWake() as body):
                self._fence(body.fence)
            case events.Run(_, events.RecordIntent(epoch, identity)):
                if epoch <= self._highest_intent:
                    raise BrokenPromiseError(f"intent {epoch} after {self._highest_intent}")
                self._highest_intent = epoch
                self._order(identity)
                self.world.note(f"intent {epoch} version {identity.version} of {identity.lineage}")
            case events.EmitEvent(_, event) if event.HasField("report"):
                self._report(event.report)
            case events.FinishCall(call, problem) if problem is not None:
                self.world.note(f"{call} refused: {problem.message}")

    def _fence(self, fence: weights_pb2.Fence) -> None:
        ledger = self.scenario.ledger
        if fence.cluster != ledger.cluster or fence.epoch > ledger.epoch:
            raise BrokenPromiseError(f"epoch {fence.epoch} is used, but only {ledger.epoch} are spent")
        if fence.epoch < self._highest_intent:
            raise BrokenPromiseError(f"epoch {fence.epoch} is used after intent {self._highest_intent}")

    def _order(self, identity: weights_pb2.Identity) -> None:
        """Versions rise, one number has one root, and a new version is what all ranks had when they called."""
        before = [other for other in self.scenario.ledger.intents.values() if other.lineage == identity.lineage]
        for other in before:
            if other.version > identity.version:
                raise BrokenPromiseError(f"version {identity.version} after {other.version} of {identity.lineage}")
            if other.version == identity.version and other.root != identity.root:
                raise BrokenPromiseError(f"version {identity.version} of {identity.lineage} has two roots")
        content = self.scenario.truth.content[identity.root]
        if len(set(content)) != 1:
            raise BrokenPromiseError(f"version {identity.version} of {identity.lineage} is of several steps: {content}")

    def _report(self, report: manager_pb2.UpdateReport) -> None:
        for outcome in report.replicas:
            if outcome.outcome == manager_pb2.OUTCOME_UNSPECIFIED:
                raise BrokenPromiseError(
                    f"{outcome.replica} has no outcome in the report of epoch {report.fence.epoch}"
                )
            if outcome.outcome != manager_pb2.NEW_SERVING and not outcome.problem.message:
                raise BrokenPromiseError(f"{outcome.replica} has no reason in the report of epoch {report.fence.epoch}")
        if report.ok != all(outcome.outcome == manager_pb2.NEW_SERVING for outcome in report.replicas):
            raise BrokenPromiseError(f"the report of epoch {report.fence.epoch} calls itself {report.ok}")
