"""Desired and observed: what DESIGN.md ("One mechanism") wants to be true, checked over the code as it is.

An *attempt* is an Install command, its *commit* the intent that it carries out: its own, or for a late replica the one
that decided what it is to serve. Each function that begins with `check_` is one statement. What today's code does not
promise has a name in `Today`; each time that it happens is counted, and README.md says which step of the redesign ends
it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from ckpt_engine.core.deadlines import CATCH_UP_ATTEMPTS
from ckpt_engine.core.sleeping import AWAKE, WEIGHTS
from ckpt_engine.core.version import Fence, Version
from ckpt_engine.machines import events
from ckpt_engine.machines.manager.absences import LEFT_SECONDS
from ckpt_engine.machines.manager.claims import Claim
from ckpt_engine.machines.manager.course import UpdateTask
from ckpt_engine.machines.manager.deployments import DeploymentCommit
from ckpt_engine.machines.manager.holdings import JoinRetry
from ckpt_engine.machines.manager.ledger_recovery import CommitsRead
from ckpt_engine.machines.manager.members import Replica, TrainerRank
from ckpt_engine.machines.manager.reconcile import Attempts, CatchUpRetry, _given_up
from ckpt_engine.machines.manager.update import Entry, Update
from ckpt_engine.machines.manager.versions import Content, everybody
from ckpt_engine.v1 import manager_pb2, weights_pb2
from tests.simulation.weights import HeldSource
from tests.simulation.world import BrokenPromiseError

if TYPE_CHECKING:
    from tests.simulation.manager import ManagerShell
    from tests.simulation.members import AgentShell
    from tests.simulation.scenario import Scenario

DRIFT = 1.04

LATE = 0.1
"""Seconds by which a timer may be late."""


class Today(Enum):
    """What the code as it is does not promise."""

    LOST_READER = "a call ends while a replica reads the trainer that has had no session for a lease"
    OTHER_POOL = (
        "a replica that was moved is brought to its new pool's commit, which is older than the one in its words"
    )
    NUMBERS_OF_A_LOST_LEDGER = "a number has another root after the ledger was replaced by an older one"


@dataclass
class Attempt:
    """What a replica was told to install, by one manager."""

    epoch: int
    live: frozenset[str]  # sessions of trainer ranks whose changing memory it reads
    end: float  # when its deadline has passed


class Mechanism:
    """Watches one scenario. excused: how often today's code did what it does not promise to avoid. reasons: how often
    a replica stood still for which reason, counted at changes of the manager."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.excused: Counter[Today] = Counter()
        self.reasons: Counter[str] = Counter()
        self._attempts: dict[tuple[int, str], Attempt] = {}  # by the manager's generation and replica
        self._ended: set[tuple[int, int]] = set()  # by generation, epochs of which all outcomes were recorded
        self._commits: dict[tuple[str, int], int] = {}  # by the fence of an attempt, the epoch of its commit
        self._pools: dict[tuple[str, int], str] = {}  # by the fence of a commit, whose it is
        self._sealed_by: dict[tuple[str, int], str] = {}  # by lineage and rank, the session that was told so last
        self._seals: dict[str, int] = {}  # by a rank's session, the fill fence for which it was last told to seal
        self._plans: dict[bytes, frozenset[bytes]] = {}  # the tables that a plan reads
        self._roots: dict[tuple[str, int], bytes] = {}  # by number
        self._served: dict[bytes, weights_pb2.Identity] = {}  # by boot id
        self._desired: dict[tuple[int, str], Version | None] = {}  # by generation and replica
        self._tries: dict[str, tuple[Attempts, int, float]] = {}
        self._sessions: dict[events.Call, str] = {}  # of the ranks that call
        self._left: dict[str, tuple[int, float]] = {}  # by session, the highest epoch when its caller went, and when
        self._changes = (0, 0)

    # -- commands of the manager, before they are performed

    def command(self, manager: ManagerShell, command: Any) -> None:
        """Looks at one."""
        match command:
            case events.Send(peer, manager_pb2.Install() as body):
                self._install(manager, manager.machine._members.by_peer[peer].name, body)
            case events.Send(peer, manager_pb2.SleepWake() as body):
                self.scenario.truth.sleep_fences.add((body.fence.cluster, body.fence.epoch))
                self.check_one_attempt_a_replica(manager, manager.machine._members.by_peer[peer].name, body.fence.epoch)
            case events.Send(peer, manager_pb2.Seal() as body) if not body.keep:
                member = manager.machine._members.by_peer[peer]
                self._seals[member.session_id] = body.fence.epoch
                if isinstance(member, TrainerRank):
                    self._sealed_by[member.lineage, member.rank] = member.session_id
            case events.Send(peer, manager_pb2.FillRelay() as body):
                self.check_a_relay_keeps_what_its_claim_says(
                    manager, manager.machine._members.by_peer[peer].source, body
                )
            case events.Run(_, events.RecordIntent() as task):
                self._intent(manager, task)
            case events.Run(_, events.RecordOutcome(report)):
                self._ended.add((manager.generation, report.fence.epoch))
            case events.FinishCall(call, None, None) if call in manager.calls:
                request = manager.calls[call].request
                if isinstance(request, manager_pb2.UpdateWeightsRequest):
                    self.check_a_call_ends_when_nothing_reads_its_memory(manager, request.session_id)

    def _intent(self, manager: ManagerShell, task: events.RecordIntent) -> None:
        if task.deployment is not None:
            self._commits[manager.ledger.cluster, task.epoch] = task.epoch
            self._pools[manager.ledger.cluster, task.epoch] = task.deployment.pool
            return
        update = next(each for each in manager.machine._updates.all() if _installs(each, task.epoch))
        self.check_what_is_held_is_left_alone(manager, update)
        cluster, late = manager.ledger.cluster, update.goal.is_attempt
        commit = manager.machine._state.versions.commit_of(update.goal.replicas[0]) if late else None
        self._commits[cluster, task.epoch] = task.epoch if commit is None else commit.epoch
        if late:
            self.scenario.truth.uncalled.add((cluster, task.epoch))
            self.check_desired_is_the_newest_commit(manager, update.goal.replicas[0], task.identity)
        else:
            self._pools[cluster, task.epoch] = update.goal.pool
            self.check_min_replicas_before_the_commit(update)

    def _install(self, manager: ManagerShell, name: str, body: manager_pb2.Install) -> None:
        update = manager.update_of(body.fence)
        known = self._attempts.get((manager.generation, name))
        self.check_attempts_go_toward_a_durable_commit(body)
        if known is None or known.epoch != body.fence.epoch:
            self.check_one_attempt_a_replica(manager, name, body.fence.epoch)
            self.check_no_attempt_toward_an_older_commit(manager, name, body.fence)
            self.check_a_number_names_one_root(body.identity)
            if update is not None:
                self.check_nobody_wakes_what_sleeps(manager, name, update)
            end = self.scenario.world.now + body.deadline_seconds * DRIFT
            known = Attempt(body.fence.epoch, self._live(manager, body), end)
            self._attempts[manager.generation, name] = known
        if known.live:
            self.check_live_memory_is_read_by_its_own_seal(update, name, known.live)
            self.check_live_memory_is_read_while_its_ranks_call(manager, name, known)

    def _live(self, manager: ManagerShell, body: manager_pb2.Install) -> frozenset[str]:
        """Sessions of the ranks whose memory, which does not stay sealed, its plans read."""
        tables: set[bytes] = set()
        for worker in body.workers:
            digest = worker.plan.digest
            if digest not in self._plans:
                plan = json.loads(manager.blobs.peek(digest))
                self._plans[digest] = frozenset(map(bytes.fromhex, plan.values()))
            tables |= self._plans[digest]
        sources = [self.scenario.truth.sources[table] for table in tables]
        live = [each for each in sources if not isinstance(each, HeldSource) and not each.stays_sealed]
        return frozenset(self._sealed_by.get((each.lineage, each.rank), "never sealed") for each in live)

    def check_a_relay_keeps_what_its_claim_says(
        self, manager: ManagerShell, relay: str, body: manager_pb2.FillRelay
    ) -> None:
        """A relay is filled by a job that has it, and goes on holding what others may read beside that."""
        (update,) = (each for each in manager.machine._updates.all() if each.course.relay_fence == Fence.of(body.fence))
        claim = manager.machine._state.claims.granted[update.number]
        keeps = Version.of(body.keep) if body.HasField("keep") else None
        if relay not in claim.fills or keeps not in (None, claim.keeps):  # None: seen when a slot is overwritten
            raise BrokenPromiseError(f"{relay} is told to keep {keeps}, and the claim of {update.number} is {claim}")

    def check_attempts_go_toward_a_durable_commit(self, body: manager_pb2.Install) -> None:
        """A replica is told to install only what an intent on the disk says, under that intent's fence."""
        if Version.of(body.identity) not in self.recorded(body.fence):
            raise BrokenPromiseError(f"epoch {body.fence.epoch} is installed without its intent")

    def recorded(self, fence: weights_pb2.Fence) -> list[Version]:
        """One intent; more only if an old copy of the ledger was put back."""
        found = self.scenario.truth.recorded.get((fence.cluster, fence.epoch), [])
        if len(found) > 1 and not self.scenario.ledgers_replaced:
            raise BrokenPromiseError(f"epoch {fence.epoch} was given out twice")
        return found

    def check_one_attempt_a_replica(self, manager: ManagerShell, name: str, epoch: int) -> None:
        """A replica is told to install, to sleep or to wake when the attempt before has an outcome, and not before."""
        before = self._attempts.get((manager.generation, name))
        if before is not None and before.epoch != epoch and (manager.generation, before.epoch) not in self._ended:
            raise BrokenPromiseError(f"{name} is told to do {epoch} while {before.epoch} goes on")
        sleep_wake = manager.machine._sleep_wake
        if sleep_wake is None or sleep_wake.finished or sleep_wake.fence.epoch in (0, epoch):
            return
        if name in sleep_wake._names and name not in sleep_wake._results:
            raise BrokenPromiseError(f"{name} is told to install {epoch} while it goes to sleep or wakes")

    def check_no_attempt_toward_an_older_commit(
        self, manager: ManagerShell, name: str, fence: weights_pb2.Fence
    ) -> None:
        """No attempt is made toward a commit that is older than the one in the workers' words."""
        agent = self.scenario.agents[name]
        if agent.engine is None or not agent.engine.alive or agent.cluster_served != fence.cluster:
            return
        toward = self._commits.get((fence.cluster, fence.epoch), fence.epoch)
        for worker in agent.engine.workers:
            held = self._commits.get((fence.cluster, worker.epoch), 0)
            if held <= toward:
                continue
            if self._pools.get((fence.cluster, held)) != manager.machine._members.replicas[name].pool:
                self._excuse(Today.OTHER_POOL)
            else:
                raise BrokenPromiseError(f"{name} has words of commit {held}, and is told to install {toward}")

    def check_min_replicas_before_the_commit(self, update: Update) -> None:
        """A version is committed only if as many replicas can be installed into as its caller wants."""
        able = len(update._parts.recipients.prepared())
        if able < update.goal.least:
            raise BrokenPromiseError(f"an intent for {able} replicas, {update.goal.least} were asked for")

    def check_desired_is_the_newest_commit(self, manager: ManagerShell, name: str, identity: Version) -> None:
        """A replica alone is brought to a version of that lineage whose commit for it, or for its pool, is newest."""
        ledger = manager.ledger
        if manager.generation != ledger.generation or self.scenario.ledgers_replaced:
            return
        pool = manager.machine._members.replicas[name].pool
        commits = [ledger.desired[key] for key in (name, everybody(pool)) if key in ledger.desired]
        newest = max(commits, key=lambda commit: commit.epoch, default=None)
        if newest is not None and newest.identity != identity:
            raise BrokenPromiseError(f"{name} is brought to {identity}, its newest commit is {newest}")

    def check_nobody_wakes_what_sleeps(self, manager: ManagerShell, name: str, update: Update) -> None:
        """A replica that sleeps is installed into only by an update that somebody called for."""
        if update.goal.is_attempt and manager.machine._members.replicas[name].asleep:
            raise BrokenPromiseError(f"{name} sleeps, and is brought to {update.goal.sealed}")

    def check_live_memory_is_read_by_its_own_seal(self, update: Update | None, name: str, live: frozenset[str]) -> None:
        """Memory that does not stay sealed is read only by installs of the update for which it was sealed last."""
        if update is None or update.goal.sealed is not None:
            raise BrokenPromiseError(f"{name} is told to read live memory by an update that sealed nothing")
        own = update.fence.epoch if update.goal.resumes is None else update.goal.resumes.fill
        if others := {self._seals.get(session, 0) for session in live} - {own, 0}:
            raise BrokenPromiseError(f"{name} reads what was sealed for {others}, not for {own}")

    def check_live_memory_is_read_while_its_ranks_call(
        self, manager: ManagerShell, name: str, attempt: Attempt
    ) -> None:
        """Memory that does not stay sealed is read only while every one of its ranks waits in the call. Of one that
        leaves after the intent it is looked first whether it lives: memory of the dead does not change."""
        requests = (call.request for call in manager.calls.values())
        inside = {each.session_id for each in requests if isinstance(each, manager_pb2.UpdateWeightsRequest)}
        for session in attempt.live - inside:
            epoch, since = self._left.get(session, (0, 0.0))
            if epoch < attempt.epoch:
                raise BrokenPromiseError(f"{name} is told to read memory of {session}, which left before {attempt}")
            trainers = manager.machine._members.trainers.values()
            lives = any(each.session_id == session and each.peer is not None for each in trainers)
            if lives and self.scenario.world.now > since + LEFT_SECONDS + LATE:
                raise BrokenPromiseError(f"{name} is told to read memory of {session}, which left and lives")

    def check_a_call_ends_when_nothing_reads_its_memory(self, manager: ManagerShell, session: str) -> None:
        """A call ends when no attempt reads what its rank offers live any more, or at the attempt's deadline."""
        for (generation, name), attempt in self._attempts.items():
            if generation != manager.generation or session not in attempt.live:
                continue
            agent = self.scenario.agents[name]
            if not self._may_read(agent, attempt.epoch) or self.scenario.world.now >= attempt.end:
                continue
            replica = manager.machine._members.replicas.get(name)
            if replica is None or replica.peer is None or replica.session_id != agent.machine._session_id:
                self._excuse(Today.LOST_READER)
            else:
                raise BrokenPromiseError(f"a call ends while {name} reads its memory for epoch {attempt.epoch}")

    def _may_read(self, agent: Any, epoch: int) -> bool:
        """Whether a worker carries out an order of this epoch, or may yet be given one."""
        engine, operation = agent.engine, agent.machine.replica.operation
        now = self.scenario.world.now
        if engine is not None and engine.alive and any(each.carries_out(epoch, now) for each in engine.workers):
            return True
        installs = operation is not None and operation.kind == "install" and operation.fence.epoch == epoch
        return agent.alive and installs and (operation._giving_orders or not operation._going_back)

    # -- words of workers

    def word(self, worker: Any) -> None:
        """Looks at what a worker that calls itself clean says, if it says something new."""
        if self._served.get(worker.boot_id) is not worker.identity:
            self._served[worker.boot_id] = worker.identity
            self.check_a_number_names_one_root(worker.identity)

    def check_a_number_names_one_root(self, identity: weights_pb2.Identity) -> None:
        """Whatever is installed or held under one number of a lineage has one root."""
        known = self._roots.setdefault((identity.lineage, identity.version), identity.root)
        if known == identity.root:
            return
        if not self.scenario.ledgers_replaced:
            raise BrokenPromiseError(f"version {identity.version} of {identity.lineage} has two roots")
        self._excuse(Today.NUMBERS_OF_A_LOST_LEDGER)

    # -- what the manager is like after an event

    def took(self, manager: ManagerShell, event: object) -> None:
        """The manager has taken one event, and its commands were performed."""
        match event:
            case events.UpdateCall(call, request):
                self._sessions[call] = request.session_id
            case events.CallCancelled(call) if call in self._sessions:
                self._left[self._sessions.pop(call)] = manager.machine._state.epoch, self.scenario.world.now
        changes = manager.generation, manager.machine.changes
        if changes == self._changes:
            return
        self._changes = changes
        self.check_whatever_waits_holds_nothing(manager)
        self.check_nothing_uncalled_is_in_the_way(manager)
        self.check_tries_have_a_pace_and_an_end(manager)
        for name, replica in manager.machine._members.replicas.items():
            content = manager.machine._state.versions.of(name)
            self.check_a_word_teaches_of_its_replica_only(manager, replica, content, event)
            if content is not None and replica.peer is not None and replica.receives:
                self.check_it_stands_still_for_a_reason(manager, replica, content)

    def check_whatever_waits_holds_nothing(self, manager: ManagerShell) -> None:
        """Only what goes on has holders, or a place among those that wait for them."""
        machine = manager.machine
        jobs, going = machine._state.claims, {update.number for update in machine._updates.running}
        going |= machine._state.deployments.keys()  # whose versions stay where they are held
        asked = {-number for number in machine._turns.rollbacks.waiting}
        left = (jobs.granted.keys() - going) | (jobs.waiting.keys() - going - asked)
        if left:
            raise BrokenPromiseError(f"{sorted(left)} are over, and have holders or wait for some")
        for number in jobs.waiting:
            if jobs.granted.get(number, Claim()) != Claim():
                raise BrokenPromiseError(f"{number} waits with {jobs.granted[number]} in its hands")

    def check_nothing_uncalled_is_in_the_way(self, manager: ManagerShell) -> None:
        """An attempt for a replica gives way to every update that it meets, and gives its holders to every one whose
        turn has come."""
        machine = manager.machine
        attempts = [update for update in machine._updates.attempts() if not update.course.cut]
        turn = {each.call for each in machine._turns._next(machine._may_begin)} if attempts else set()
        for update in attempts:
            granted = machine._state.claims.granted[update.number]
            for coming in machine._turns.turning():
                holders = coming.call in turn and machine._updates.claim(coming.goal).meets(granted)
                if coming.goal.meets(update.goal) or holders:
                    raise BrokenPromiseError(f"{coming.description} waits for {update.describe()}")

    def check_tries_have_a_pace_and_an_end(self, manager: ManagerShell) -> None:
        """Workers are tried again when their next try is due, and a replica that serves a few times only."""
        for name, attempts in manager.machine._catch_up.attempts.items():
            known = self._tries.get(name)
            if known is not None and known[0] is attempts and known[1] == attempts.count:
                if known[2] != attempts.next:
                    self._tries[name] = attempts, attempts.count, attempts.next
                continue
            self._tries[name] = attempts, attempts.count, attempts.next
            if known is None or known[0] is not attempts or attempts.count < known[1]:
                continue
            replica = manager.machine._members.replicas.get(name)
            if known[1] >= CATCH_UP_ATTEMPTS and replica is not None and replica.serving:
                raise BrokenPromiseError(f"{name} is tried for the {attempts.count}th time")
            if known[2] > manager.clock:
                raise BrokenPromiseError(f"{name} is tried {known[2] - manager.clock:.2f} s too early")

    def check_a_word_teaches_of_its_replica_only(
        self, manager: ManagerShell, replica: Replica, content: Content | None, event: object
    ) -> None:
        """What a replica is to serve changes with a commit, with its own words and with its pool, and with nothing
        else."""
        key = manager.generation, replica.name
        desired = None if content is None else content.identity
        before = self._desired.get(key, desired)
        self._desired[key] = desired
        if before == desired:
            return
        match event:
            case events.Done(UpdateTask(_, Entry.INTENT)) | events.Done(CommitsRead() | DeploymentCommit()):
                return
            case events.Message(peer, manager_pb2.ReplicaHello()) if peer == replica.peer:
                return
            case _:
                raise BrokenPromiseError(f"{replica.name} is to serve {desired} after {before}, because of {event}")

    def check_what_is_held_is_left_alone(self, manager: ManagerShell, update: Update) -> None:
        """Once an operator was told that a replica is held, no attempt of its own gets an intent, and no update that
        begins later is for it, also after the manager was restarted."""
        promised = {} if manager.generation != manager.ledger.generation else manager.ledger.promised
        for name in update._parts.recipients.prepared():
            if name in promised and (update.goal.is_attempt or update.number > promised[name]):
                raise BrokenPromiseError(f"{name} is held by an operator, and {update.describe()} is for it")

    def check_it_stands_still_for_a_reason(self, manager: ManagerShell, replica: Replica, content: Content) -> None:
        """A replica that is connected and does not hold what it is to serve is being brought to it, or there is a timer
        for that, or a reason that is told."""
        if replica.holds(content.identity):
            return
        reason = next((said for said, holds in REASONS.items() if holds(manager, replica, content)), "")
        self.reasons[reason] += 1
        if not reason:
            raise BrokenPromiseError(
                f"{replica.name} is to serve {content.identity}, and nothing happens: "
                f"{manager.machine._catch_up.attempts.get(replica.name)}"
            )

    def _excuse(self, what: Today) -> None:
        self.excused[what] += 1


def check_sleep_is_changed_by_fenced_commands_only(agent: AgentShell, task: events.EngineTask) -> None:
    """An engine is put to sleep by a Sleep command only, and one that is to rest is woken by a Wake command or by an
    install that somebody called for."""
    operation, truth = agent.machine.replica.operation, agent.cluster.truth
    if operation is None or not isinstance(task, events.SleepEngine | events.WakeEngine | events.DiscardEngine):
        return
    fence = operation.fence.cluster, operation.fence.epoch
    if operation.kind == "sleep":
        if fence not in truth.sleep_fences:
            raise BrokenPromiseError(f"{agent.name} sleeps or wakes under {fence}, which no such command has")
    elif not isinstance(task, events.WakeEngine):
        raise BrokenPromiseError(f"{agent.name} is put to sleep by {operation.kind}")
    elif _rests(agent) and (operation.kind != "install" or fence in truth.uncalled):
        raise BrokenPromiseError(f"{agent.name} is to rest, and is woken by {operation.kind} of {fence}")


def _rests(agent: AgentShell) -> bool:
    """Whether its mark says that nobody wakes it without being asked to."""
    marked = AWAKE if agent.engine is None else agent.engine.mark.sleeping
    return bool(marked.tags) and not (marked.rousing and WEIGHTS not in marked.tags)


# ------------------------------------------------------------------------------- why a replica is not brought up now

Judge = Callable[["ManagerShell", Replica, Content], object]


def _installs(update: Update, epoch: int) -> bool:
    return update.installs is not None and update.installs.epoch == epoch


def everybody_in(pool: str) -> str:
    """What the ledger calls all of a pool."""
    return everybody(pool)


def _goals(manager: ManagerShell) -> Iterable[Any]:
    turns = manager.machine._turns
    return (*(update.goal for update in turns.updates.running), *(coming.goal for coming in turns.coming()))


def _nobody_can_be_read(manager: ManagerShell, replica: Replica, content: Content) -> bool:
    """It was told so in this session, and no connected holder that is believed holds the version."""
    attempts = manager.machine._catch_up.attempts.get(replica.name)
    if attempts is None or not attempts.no_source or attempts.no_source_notice != (replica.peer, attempts.no_source):
        return False
    joining = manager.machine._holdings.joinings.get((content.identity, False))
    refused = {} if joining is None or joining.joined is None else joining.joined.refused
    holders = manager.machine._members.connected_holders()
    held = [each.source for each in holders for held in each.held if held.identity == content.identity]
    return not set(held) - refused.keys()


def _used_up(manager: ManagerShell, replica: Replica, content: Content) -> bool:
    attempts = manager.machine._catch_up.attempts.get(replica.name)
    return attempts is not None and _given_up(replica, attempts)


def _due_later(manager: ManagerShell, replica: Replica, content: Content) -> bool:
    attempts = manager.machine._catch_up.attempts.get(replica.name)
    return attempts is not None and attempts.next > manager.clock and CatchUpRetry() in manager._timers


def _looked_again(manager: ManagerShell, replica: Replica, content: Content) -> bool:
    joining = manager.machine._holdings.joinings.get((content.identity, False))
    return joining is not None and JoinRetry(joining.pipeline.number) in manager._timers


def _holders_in_use(manager: ManagerShell, replica: Replica, content: Content) -> bool:
    jobs = manager.machine._state.claims
    return any(claim != Claim() for claim in (*jobs.granted.values(), *jobs.waiting.values()))


REASONS: dict[str, Judge] = {
    "running: an update that is for it": lambda manager, replica, content: any(
        replica.name in goal.replicas for goal in _goals(manager)
    ),
    "told: its engine is not there": lambda manager, replica, content: not replica.workers,
    "told: an operator holds it": lambda manager, replica, content: replica.name in manager.machine.holds(),
    "told: asleep": lambda manager, replica, content: replica.asleep,
    "told: its engine can never load it": lambda manager, replica, content: manager.machine._catch_up._never_loads(
        replica, content
    ),
    "timer: the manager was restarted": lambda manager, replica, content: not manager.machine._settled,
    "told: the ledger cannot be written": lambda manager, replica, content: manager.machine._state.ledger_problem,
    "running: the ledger is read again": lambda manager, replica, _: bool(manager.machine._state.versions.doubtful),
    "running: epochs are made durable": lambda manager, replica, content: manager.machine._state.spending,
    "running: its pool's turn is another one's": lambda manager, replica, content: any(
        goal.pool == replica.pool or goal.lineage == content.identity.lineage for goal in _goals(manager)
    ),
    "running: a call to sleep or wake": lambda manager, replica, content: (
        manager.machine._sleep_wake is not None and not manager.machine._sleep_wake.finished
    ),
    "timer: CatchUpRetry": _due_later,
    "told: it serves, and was tried as often as that allows": _used_up,
    "running: a look at what holders hold": lambda manager, replica, content: manager.machine._holdings.looking(
        content
    ),
    "timer: that look is repeated": _looked_again,
    "told: nobody can be read": _nobody_can_be_read,
    "running: holders that another update uses": _holders_in_use,
}
"""What today's code counts as a reason, in the order in which it is asked: something that runs and whose end makes the
manager look again, a timer, or what status, or the replica's own log, tells people."""
