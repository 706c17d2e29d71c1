"""What must be true after every event, whatever happens: the promises of the design and the rules behind them.

1. Weights are whole: a worker that calls itself clean holds, byte for byte, what was sealed under the identity that it
   names; the gate is open if and only if all workers live and do so with one identity; and while a worker holds half of
   a version its engine is paused.
2. Every update ends: calls and installs by their deadline; an agent that says NEW or OLD SERVING is serving that; an
   engine that is paused is known to be by its agent, and so is one that calls its tokens by another version than that
   of their weights. Epochs only rise, at the manager, at every member and in every worker, fill fences and install
   fences apart; they are spent before they are used, an update's install fence is given out with its intent, and
   nothing is installed whose intent is not on the disk.
3. An engine on several nodes: what its gate reads of far workers is never better than the truth; without one of its
   nodes it is closed within a lease, with a reason; no node has a part that nobody leads, or two.

A process that was stopped (SIGSTOP) is excused for being late until it has gone on for a moment; nothing else is.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from ckpt_engine.core.enums import enum_word
from ckpt_engine.core.version import Fence, Version
from ckpt_engine.gate.holding import DecisionKind
from ckpt_engine.machines import events
from ckpt_engine.machines.agent.state import Operation
from ckpt_engine.machines.manager.update import Update
from ckpt_engine.machines.manager.versions import everybody
from ckpt_engine.v1 import manager_pb2, weights_pb2
from tests.simulation.engine import CLEAN, DIRTY, Engine, Worker
from tests.simulation.hosts import WORKERS_READ, ways
from tests.simulation.mechanism import Mechanism
from tests.simulation.nodes import LeadingAgentShell, SpreadEngine
from tests.simulation.waves import Waves
from tests.simulation.weights import HeldSource, ref_of
from tests.simulation.world import BrokenPromiseError

if TYPE_CHECKING:
    from tests.simulation.manager import ManagerShell
    from tests.simulation.members import AgentShell
    from tests.simulation.relays import RelayShell
    from tests.simulation.scenario import Scenario

BOUND = 1.0
"""Seconds that something may be over its deadline: messages travel, tasks are noticed."""

DRIFT = 1.04
"""What a deadline may take by another clock: clocks in the simulation drift by at most 3 %."""


class Invariants:
    """Watches one scenario."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.world = scenario.world
        self.mechanism = Mechanism(scenario)
        self.waves = Waves(scenario)
        self.outcomes: dict[str, int] = {}
        self._installs: dict[tuple[AgentShell, int], float] = {}
        self._highest_intent: dict[int, int] = {}  # by the manager's generation
        self._given_out: defaultdict[int, int] = defaultdict(int)  # of fences of both kinds
        self._epochs: dict[tuple[AgentShell, bool], int] = {}
        self._worker_epochs: dict[bytes, int] = {}
        self._begun: dict[AgentShell, Operation] = {}
        self._seen: dict[str, object] = {}
        self._mislabelled: dict[Engine, int] = {}
        self._said: set[tuple[Engine, int]] = set()  # that tokens of this install may be called by another version
        self._told_to_fill: set[tuple[int, int, str]] = set()
        self._registered: dict[Update, set[str]] = {}  # when each update began
        self._meant_for: dict[tuple[int, str], int] = {}  # by generation and replica, the last intent for it
        self._told_holders: dict[tuple[int, str], int] = {}  # by generation and session, the highest fill fence
        self.side_by_side = 0  # events at which updates of two pools went on
        self.installed: set[int] = set()  # epochs that some replica was told to install

    def check(self) -> None:
        """After every event."""
        for name, agent in self.scenario.agents.items():
            if agent.engine is not None and agent.engine.alive:
                self._whole(agent.engine)
                self._awake(agent.engine)
                self._labelled(agent.engine)
                self._kept(agent.engine, agent)
            if agent.alive:
                self._agent(name, agent)
            if isinstance(agent, LeadingAgentShell):
                agent.site.check(agent)
        self.scenario.truth.collectives.check()
        manager = self.scenario.cluster.manager
        updates = [] if manager is None else manager.machine._updates.all()
        self.side_by_side += len({update.goal.pool for update in updates if not update.goal.is_attempt}) > 1
        self._one_writes(updates)
        for update in updates:
            if update not in self._registered:
                members = manager.machine._members.replicas.items()
                pool = update.goal.pool
                self._registered[update] = {name for name, each in members if each.receives and each.pool == pool}
        if manager is not None and manager.alive and not manager.stopped:
            for call in manager.calls.values():
                patience = call.request.options.timeout_seconds or self.scenario.deadlines.update
                begun = max(call.begun, manager.excused)  # what came while it was stopped counts from its being read
                if self.world.now > begun + patience * DRIFT + BOUND:
                    raise BrokenPromiseError(f"a call has no end after {patience} s: {call.request}")

    def _one_writes(self, updates: list[Update]) -> None:
        """No two updates write to a replica at the same time."""
        names = [name for update in updates for name in update.under_way()[0]] if len(updates) > 1 else []
        if len(set(names)) != len(names):
            raise BrokenPromiseError(f"two updates write to one of {sorted(names)}")

    def _whole(self, engine: Engine) -> None:
        workers = engine.workers
        first = workers[0].identity
        all_clean = all_live = True
        for worker in workers:
            all_live = all_live and worker.alive
            self._order_of_marks(engine, worker)
            if worker.state == CLEAN:
                self.mechanism.word(worker)
                self._holds_what_it_says(engine, worker)
                all_clean = all_clean and (worker.identity is first or worker.identity == first)
            else:
                all_clean = False
                if worker.state == DIRTY and not engine.paused and all_live:
                    raise BrokenPromiseError(f"{engine.name} computes with half a version")
        if not engine.page_is_right(all_live and (all_clean or engine.mark.own_weights)):
            raise BrokenPromiseError(
                f"{engine.name}'s gate is {'open' if engine.words().open else 'closed'}: "
                f"{[(worker.alive, worker.state, worker.identity) for worker in workers]}"
            )

    def _holds_what_it_says(self, engine: Engine, worker: Worker) -> None:
        assert worker.identity is not None
        content = self.scenario.truth.content.get(worker.identity.root)
        if content is None:
            raise BrokenPromiseError(f"{engine.name} holds {worker.identity}, which nobody sealed")
        if worker.weights != content:
            raise BrokenPromiseError(f"{engine.name} worker {worker.rank} has {worker.weights}, not {content}")

    def _order_of_marks(self, engine: Engine, worker: Worker) -> None:
        before = self._worker_epochs.get(worker.boot_id, 0)
        if worker.epoch < before:
            raise BrokenPromiseError(f"{engine.name} worker {worker.rank} goes from epoch {before} to {worker.epoch}")
        self._worker_epochs[worker.boot_id] = worker.epoch

    def _awake(self, engine: Engine) -> None:
        """The gate lets nobody in while memory is given up, and nobody who is inside meets weights that are gone."""
        if engine.gate_open:
            engine.inside, engine.discarded = True, False
            if engine.asleep:
                raise BrokenPromiseError(f"{engine.name} lets requests in without {sorted(engine.asleep)}")
        elif engine.discarded and engine.inside and not engine.paused and not engine.asleep and not engine.words().open:
            raise BrokenPromiseError(f"{engine.name} computes with weights that were discarded")

    def _labelled(self, engine: Engine) -> None:
        """Remembers of which install an engine made tokens that it called by another version."""
        made = engine.computing
        if made is not None and engine.label != made:
            self._mislabelled[engine] = engine.workers[0].epoch

    def _kept(self, engine: Engine, agent: AgentShell) -> None:
        """No request is refused because weights change, and none waits for what may never come."""
        left = engine.hold.until - self.world.now
        if engine.hold.epoch and left > self.scenario.deadlines.update * DRIFT:
            raise BrokenPromiseError(f"{engine.name} keeps requests for {left:.0f} s")
        operation = agent.machine.replica.operation
        if operation is None or operation.kind != "install" or not agent.alive or not operation._giving_orders:
            return
        ours = left > 0 and engine.hold.epoch == operation.fence.epoch  # else its time is over, or it is another one's
        if ours and all(word.alive for word in engine.page()) and engine.gate().kind is not DecisionKind.HOLD:
            raise BrokenPromiseError(f"{engine.name} does not keep requests: {engine.gate()}")

    def _agent(self, name: str, agent: AgentShell) -> None:
        replica = agent.machine.replica
        engine = agent.engine
        if engine is not None and engine.paused and replica.paused is False:
            raise BrokenPromiseError(f"{name} is paused, and its agent thinks that it is not")
        if engine is not None and not agent.stopped and replica.labelled not in (None, engine.label):
            raise BrokenPromiseError(
                f"{name} calls its tokens by {engine.label}, its agent thinks by {replica.labelled}"
            )
        outcome = replica.last_outcome
        if outcome is not None and outcome is not self._seen.get(name):
            self._seen[name] = outcome
            self._outcome(name, engine, outcome)
        self._obeys(name, agent)
        operation = replica.operation
        if operation is not None and operation.fence.epoch:
            key = agent, operation.kind == "prepare"  # fill fences and install fences are compared apart
            if operation.fence.epoch < self._epochs.get(key, 0):
                raise BrokenPromiseError(f"{name} obeys epoch {operation.fence.epoch} after {self._epochs[key]}")
            self._epochs[key] = operation.fence.epoch
        begun = self._begun.pop(agent, None)
        if begun is not None and begun is not operation and (outcome is None or Fence.of(outcome.fence) != begun.fence):
            raise BrokenPromiseError(f"{name} gave up its install of epoch {begun.fence.epoch} without an outcome")
        if operation is not None and operation.kind == "install":
            self._begun[agent] = operation
            key = (agent, operation.number)
            end = self._installs.setdefault(key, self.world.now + operation.install.deadline_seconds * DRIFT)
            if self.world.now > end + BOUND and not agent.stopped:
                raise BrokenPromiseError(f"{name} has no outcome of epoch {operation.fence.epoch} in time")

    def _obeys(self, name: str, agent: AgentShell) -> None:
        """Nobody takes an install for an old one because something was filled since."""
        manager = self.scenario.cluster.manager
        if manager is None or self.scenario.ledgers_replaced or manager.generation != manager.ledger.generation:
            return
        given_out = manager.machine._state.installs
        if agent.machine._highest > given_out:
            raise BrokenPromiseError(f"{name} obeys epoch {agent.machine._highest}, the last install's was {given_out}")

    def _outcome(self, name: str, engine: Engine | None, outcome: manager_pb2.ReplicaOutcome) -> None:
        kind = enum_word(manager_pb2.Outcome, outcome.outcome)
        self.outcomes[kind] = self.outcomes.get(kind, 0) + 1
        self.world.note(f"{name}: epoch {outcome.fence.epoch} {kind} {outcome.problem.message}")
        if self.scenario.agents[name].stopped:
            return  # what it says was decided before it was stopped
        if outcome.outcome == manager_pb2.OUTCOME_QUARANTINED:
            if not outcome.problem.message:
                raise BrokenPromiseError(f"{name} was quarantined without a reason")
            return
        if engine is None or not engine.alive:
            return  # it died in the same moment; the next words say so
        words = engine.held()
        if isinstance(engine, SpreadEngine) and not all(worker.alive for worker in engine.workers):
            return  # of a far worker's death an agent hears within a lease
        if engine.paused or not words.open or engine.asleep:
            raise BrokenPromiseError(f"{name} says {kind}, but it is {'paused' if engine.paused else words.reason}")
        if engine.words().open and not engine.gate_open:
            raise BrokenPromiseError(f"{name} says {kind}, and lets nobody in: {engine.gate().detail}")
        if outcome.outcome == manager_pb2.OUTCOME_NEW_SERVING:
            wanted = self.mechanism.recorded(outcome.fence)
            if Version.of(outcome.after) not in wanted:
                raise BrokenPromiseError(f"{name} says NEW_SERVING of {wanted}, but it holds {outcome.after}")
        if outcome.label_problem:
            self._said.add((engine, outcome.fence.epoch))  # an agent after this one does not know of it
        elif outcome.after.lineage:
            if engine.label != outcome.after:
                raise BrokenPromiseError(f"{name} calls its tokens by {engine.label}, and does not say so")
            said = (engine, outcome.fence.epoch) in self._said
            if kind == "new_serving" and self._mislabelled.get(engine) == outcome.fence.epoch and not said:
                raise BrokenPromiseError(f"{name} made tokens before it was told their version, and does not say so")
        if words.identity != outcome.after:
            raise BrokenPromiseError(f"{name} says that it holds {outcome.after}, but it holds {words.identity}")

    def watch(self, manager: ManagerShell, command: Any) -> None:
        """Every command of a manager, before it is performed."""
        if self.scenario.chaos is not None:
            self.scenario.chaos.seen(command)
        if manager.ledger.term and manager.generation != manager.ledger.generation:
            raise BrokenPromiseError(f"former leader {manager.generation} does {command}")
        self.mechanism.command(manager, command)
        self.waves.command(manager, command)
        match command:
            case events.Send(peer, manager_pb2.Install() as body):
                self._install_fence(manager, peer, body.fence)
                self.installed.add(body.fence.epoch)
                self._late_sources(manager, body)
                self._held_sources(manager, body)
            case events.Send(peer, manager_pb2.FillRelay() as body):
                self._fill_fence(manager, body.fence)
                self._obeyed_by_holder(manager, peer, body.fence)
                self._upstream(manager, peer, body)
            case events.Send(peer, manager_pb2.SleepWake() as body):
                self._install_fence(manager, peer, body.fence)
            case events.Send(peer, manager_pb2.Seal() as body):
                self._fill_fence(manager, body.fence)
                self._obeyed_by_holder(manager, peer, body.fence)
            case events.Send(
                _,
                manager_pb2.Prepare() | manager_pb2.SealForReaders() | manager_pb2.Release() as body,
            ):
                self._fill_fence(manager, body.fence)
            case events.Run(_, events.RecordIntent(epoch, identity, deployment=deployment)):
                highest = max(self._highest_intent.get(manager.generation, 0), self._given_out[manager.generation])
                if epoch <= highest:
                    raise BrokenPromiseError(f"intent {epoch} after epoch {highest}: its fence was given out before it")
                self._highest_intent[manager.generation] = epoch
                for update in manager.machine._updates.all():
                    if update.installs is not None and update.installs.epoch == epoch:
                        names = update._parts.recipients.waiting_for()
                        self._meant_for |= dict.fromkeys([(manager.generation, name) for name in names], epoch)
                if manager.generation == manager.ledger.generation:
                    if deployment is None or deployment.number == epoch:
                        self._order(manager, epoch, identity)
                    else:
                        self._later_wave(manager, identity, deployment)
                self.world.note(f"intent {epoch} version {identity.number} of {identity.lineage}")
            case events.Run(_, events.CorrectOutcome(report)):
                self._outcomes(report)
            case events.Run(_, events.RecordOutcome(report)):
                self._report(manager, report)
            case events.EmitEvent(_, event) if event.report.held:
                if Version.of(event.report.identity) not in self.mechanism.recorded(event.report.fence):
                    raise BrokenPromiseError(f"callers of epoch {event.report.fence.epoch} return without its intent")
            case events.FinishCall(call, problem) if problem is not None:
                self.world.note(f"{call} refused: {problem.message}")

    def _late_sources(self, manager: ManagerShell, install: manager_pb2.Install) -> None:
        """A late replica may serve an older version, so it is not sent to ranks that have sealed another one since."""
        update = manager.update_of(install.fence)
        if update is None or not update.goal.is_attempt or manager.generation != manager.ledger.generation:
            return
        if install.HasField("collective"):
            raise BrokenPromiseError("a late replica is brought up by a collective")
        content = self.scenario.truth.content[install.identity.root]
        for offer in update.goal.published.sources:
            source = self.scenario.truth.sources[offer.table.digest]
            if offer.rank is not None and any(content[index] != tag for index, tag in source.sealed.items()):
                raise BrokenPromiseError(
                    f"{install.identity} is read from {offer.source}, which sealed {source.sealed}"
                )

    def _held_sources(self, manager: ManagerShell, install: manager_pb2.Install) -> None:
        """What goes on when its callers have returned reads from relays only."""
        update = manager.update_of(install.fence)
        if update is None or update.goal.until != manager_pb2.UNTIL_HELD:
            return
        for worker in install.workers:
            for digest in manager.blobs.get_json(worker.plan).values():
                if not isinstance(self.scenario.truth.sources[bytes.fromhex(digest)], HeldSource):
                    raise BrokenPromiseError(f"epoch {install.fence.epoch} reads the trainer after its callers return")

    def _upstream(self, manager: ManagerShell, peer: events.Peer, command: manager_pb2.FillRelay) -> None:
        """A relay is told to read only what it reaches, and holders that have the version by then."""
        told = manager.machine._members.by_peer[peer]
        repeated = command.fence.epoch, command.attempt, told.session_id
        if repeated in self._told_to_fill or self.scenario.ledgers_replaced:
            return
        self._told_to_fill.add(repeated)
        for ref in command.tables:
            source = self.scenario.truth.sources[ref.digest]
            if isinstance(source, HeldSource) and not source.relay:
                continue  # of a keeper nobody knows how it is read
            if not ways(source.host, source.offered, told.host, WORKERS_READ):
                raise BrokenPromiseError(f"{told.source} is to read memory of {source.host.name}, out of its reach")
            known = isinstance(source, HeldSource) and source.alive and not source.silent
            if known and source.filled != command.identity:
                raise BrokenPromiseError(f"{told.source} is to be filled from {source.relay}, which is not filled")

    def overwritten(self, relay: RelayShell, slot: HeldSource) -> None:
        """Nothing is filled where replicas read that an update waits for."""
        manager, digest = self.scenario.cluster.manager, ref_of(slot.table()).digest.hex()
        if manager is None or not manager.alive or manager.stopped or self.scenario.ledgers_replaced:
            return
        for update in manager.machine._updates.all():
            if update.phase != "installing" or update.goal.is_attempt or update.relays is None:
                continue
            for name in update._parts.recipients.waiting_for():
                way = update.relays.ways.get(name)
                if way is None or slot.filled is None or Version.of(slot.filled) != update.under_way()[1]:
                    continue
                for plan in way.compiled.plans.values():
                    if digest in manager.blobs.get_json(plan).values():
                        raise BrokenPromiseError(f"{relay.name} fills a slot that {name} reads")

    def _install_fence(self, manager: ManagerShell, peer: events.Peer, fence: weights_pb2.Fence) -> None:
        """An install fence is never below one whose intent was recorded for the same replica, nor below one that the
        replica obeys already."""
        self._spent(manager, fence)
        name = manager.machine._members.by_peer[peer].name
        if fence.epoch < self._meant_for.get((manager.generation, name), 0):
            raise BrokenPromiseError(f"epoch {fence.epoch} is used for {name} after a later intent")
        agent = self.scenario.agents[name]
        alone = manager.generation == manager.ledger.generation and not self.scenario.ledgers_replaced
        if alone and agent.alive and agent.cluster_served == fence.cluster and agent.machine._highest > fence.epoch:
            raise BrokenPromiseError(f"{name} obeys {agent.machine._highest}, and is told to do {fence.epoch}")

    def _obeyed_by_holder(self, manager: ManagerShell, peer: events.Peer, fence: weights_pb2.Fence) -> None:
        """Whoever is read by several updates is told rising fences only."""
        key = manager.generation, manager.machine._members.by_peer[peer].session_id
        if fence.epoch < self._told_holders.get(key, 0):
            raise BrokenPromiseError(f"{key[1]} is told fence {fence.epoch} after {self._told_holders[key]}")
        self._told_holders[key] = fence.epoch

    def _fill_fence(self, manager: ManagerShell, fence: weights_pb2.Fence) -> None:
        """Nobody prepares or seals under the fence of an install."""
        self._spent(manager, fence)
        if self.mechanism.recorded(fence) and not self.scenario.ledgers_replaced:
            raise BrokenPromiseError(f"epoch {fence.epoch} is that of an install, and is used for filling")

    def _spent(self, manager: ManagerShell, fence: weights_pb2.Fence) -> None:
        ledger = manager.ledger
        if fence.cluster != ledger.cluster or fence.epoch > ledger.epoch:
            raise BrokenPromiseError(f"epoch {fence.epoch} is used, but only {ledger.epoch} are spent")
        self._given_out[manager.generation] = max(self._given_out[manager.generation], fence.epoch)

    def _later_wave(self, manager: ManagerShell, identity: Version, row: manager_pb2.Deployment) -> None:
        """What a deployment commits after its first wave was committed before: its target, or what it goes back to."""
        wanted = row.base if row.state == manager_pb2.Deployment.STATE_UNDONE else row.target
        if identity != Version.of(wanted):
            raise BrokenPromiseError(f"deployment {row.number} commits {identity}, not {Version.of(wanted)}")
        if identity not in manager.ledger.intents.values() and not self.scenario.ledgers_replaced:
            raise BrokenPromiseError(f"deployment {row.number} commits {identity}, which never was")

    def _order(self, manager: ManagerShell, epoch: int, identity: Version) -> None:
        """Versions rise unless somebody goes back by name, one number has one root, and a new version is what all ranks
        had when they called."""
        lineage = identity.lineage
        update = next(each for each in manager.machine._updates.all() if each.installs and each.installs.epoch == epoch)
        before = {number: other for number, other in manager.ledger.intents.items() if other.lineage == lineage}
        known = not self.scenario.ledgers_replaced
        if update.goal.is_rollback:
            since = epoch
            wishes = [manager.calls[call].request.version for call in update.goal.calls.values()]
            if wishes != [identity.number] or (known and identity not in before.values()):
                raise BrokenPromiseError(f"goes back to {identity}, which is not {wishes}, or was never installed")
        else:
            since = 0
        late = update.goal.is_attempt  # to what it is to serve: Mechanism.check_desired_is_the_newest_commit
        for number, other in before.items():
            if other.number > identity.number and number >= since and not late:
                raise BrokenPromiseError(f"version {identity.number} after {other.number} of {identity.lineage}")
            if other.number == identity.number and other.root != identity.root:
                raise BrokenPromiseError(f"version {identity.number} of {identity.lineage} has two roots")
        content = self.scenario.truth.content[identity.root]
        if len(set(content)) != 1:
            raise BrokenPromiseError(f"version {identity.version} of {identity.lineage} is of several steps: {content}")

    def _report(self, manager: ManagerShell, report: manager_pb2.UpdateReport) -> None:
        if report.HasField("deployment"):
            self._outcomes(report)
            if report.ok and report.deployment.state != manager_pb2.Deployment.STATE_DEPLOYED:
                raise BrokenPromiseError(f"deployment {report.deployment.number} is not deployed, and calls itself ok")
            return
        update = manager.update_of(report.fence)
        assert update is not None
        reported = {outcome.replica for outcome in report.replicas}
        if reported != set(update.goal.replicas):
            raise BrokenPromiseError(f"replicas have no outcome in the report of epoch {report.fence.epoch}")
        unsaid = self._registered.get(update, reported) - reported  # that of an overtaken manager was not seen to begin
        if unsaid and everybody(update.goal.pool) in update.goal.selection and not update.goal.is_attempt:
            raise BrokenPromiseError(f"{unsaid} are registered, and not in the report of epoch {report.fence.epoch}")
        self._outcomes(report)
        new = sum(outcome.outcome == manager_pb2.OUTCOME_NEW_SERVING for outcome in report.replicas)
        enough = update.goal.min_replicas
        uncounted = sum(outcome.operator_hold or outcome.cannot_load for outcome in report.replicas)
        if report.ok != (new >= (len(reported) - uncounted if enough is None else enough)):
            raise BrokenPromiseError(f"the report of epoch {report.fence.epoch} calls itself {report.ok}")

    def _outcomes(self, report: manager_pb2.UpdateReport) -> None:
        for outcome in report.replicas:
            self._left_alone_rightly(report, outcome)
            if outcome.fence != report.fence:
                raise BrokenPromiseError(f"{outcome.replica}'s outcome of another epoch is in {report.fence.epoch}")
            if outcome.outcome == manager_pb2.OUTCOME_NEW_SERVING and outcome.after != report.identity:
                raise BrokenPromiseError(f"{outcome.replica} is reported with {outcome.after}, not {report.identity}")
            if outcome.outcome == manager_pb2.OUTCOME_UNSPECIFIED:
                raise BrokenPromiseError(
                    f"{outcome.replica} has no outcome in the report of epoch {report.fence.epoch}"
                )
            if outcome.outcome != manager_pb2.OUTCOME_NEW_SERVING and not outcome.problem.message:
                raise BrokenPromiseError(f"{outcome.replica} has no reason in the report of epoch {report.fence.epoch}")

    def _left_alone_rightly(self, report: manager_pb2.UpdateReport, outcome: manager_pb2.ReplicaOutcome) -> None:
        """What was not installed into, since it holds the version already, does; words may be some seconds old."""
        agent = self.scenario.agents[outcome.replica]
        if outcome.outcome != manager_pb2.OUTCOME_NEW_SERVING or outcome.stages or agent.engine is None:
            return
        old = self.world.now > agent.attached + self.scenario.deadlines.lease
        lives = agent.alive and agent.engine.alive and all(worker.alive for worker in agent.engine.workers)
        if old and lives and agent.engine.held().identity != report.identity:
            raise BrokenPromiseError(f"{outcome.replica} is reported to hold {report.identity}, and does not")
