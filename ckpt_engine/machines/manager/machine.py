"""The manager's machine: it hands each event to the parts that it concerns, and then begins what can begin.

Decides which members may join, which call begins an update, and what waits for what:
- In each pool one update runs at a time, perhaps beside the installs of the one before it; those of different pools run
  side by side (`updates`). Meanwhile the ranks of other lineages gather, side by side, and take turns (`gathers`);
  another call of the lineage that is being updated is ABORTED, naming the update.
- A rollback waits for what runs in its pool, and goes before updates that are gathered.
- Sleep and Wake are ABORTED while their replicas are in use; calls for their pool that come later wait for their end.
- When no update goes on in a pool, its late replicas are brought up by attempts, a few at a time. An update that is
  next, or that waits for holders of an attempt, cuts the attempt short: at once before its install begins, afterwards
  when the replica's outcome has come.
- A manager that was restarted waits a moment before its first update, so that all members can dial in again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ckpt_engine.core.deadlines import Deadlines
from ckpt_engine.core.manifest import DIGEST_FORMAT
from ckpt_engine.core.problems import CkptEngineError, aborted, unavailable
from ckpt_engine.core.version import Version
from ckpt_engine.machines.deciding import commands_of
from ckpt_engine.machines.events import (
    Call,
    CallCancelled,
    ClosePeer,
    Done,
    FinishCall,
    Key,
    ManagerCommand,
    ManagerEvent,
    Message,
    OperatorCall,
    OperatorHold,
    Peer,
    PeerLost,
    RollbackCall,
    SleepCall,
    TimerFired,
    UpdateCall,
    WaitCall,
    WakeCall,
)
from ckpt_engine.machines.manager.course import UpdateTask, UpdateTimer
from ckpt_engine.machines.manager.deployments import (
    DeploymentCallEnd,
    DeploymentCommit,
    DeploymentLook,
    Deployments,
    DeploymentWrite,
    ReportWrite,
)
from ckpt_engine.machines.manager.forgetting import ForgetTimer, Forgetting, ForgottenWrite, LineagesLook
from ckpt_engine.machines.manager.goal import Goal
from ckpt_engine.machines.manager.holdings import Holdings, JoinRetry, located
from ckpt_engine.machines.manager.jobs import Entry
from ckpt_engine.machines.manager.ledger_recovery import CommitsRead, CommitsRetry, LedgerRecovery
from ckpt_engine.machines.manager.members import Hello, Holder, Member, Replica, TrainerRank, take_beat, tells_nothing
from ckpt_engine.machines.manager.operators import HoldWrite, OperatorHolds, operate
from ckpt_engine.machines.manager.plan_pipeline import PlanTask
from ckpt_engine.machines.manager.publications import Merge, Publications
from ckpt_engine.machines.manager.reconcile import CatchUp, CatchUpRetry, Drift, Drifts, LateReplicas
from ckpt_engine.machines.manager.report import Correction
from ckpt_engine.machines.manager.sleep_wake import SleepWakeCall, SleepWakeEnd, SleepWakeResend, SleepWakeSpending
from ckpt_engine.machines.manager.state import EpochRetry, EpochSpending, ManagerState
from ckpt_engine.machines.manager.status import Watched, blobs_in_use, status_of, watched
from ckpt_engine.machines.manager.turns import Turns
from ckpt_engine.machines.manager.versions import Commits
from ckpt_engine.v1 import manager_pb2, weights_pb2


@dataclass(frozen=True, slots=True)
class LeaseEnd:
    """Key of the timer that ends a silent stream."""

    peer: Peer


@dataclass(frozen=True, slots=True)
class SettleEnd:
    """Key of the timer that ends a restarted manager's wait for its members."""


class ManagerMachine:
    """Decides everything that the manager does.

    All of this is from the ledger (`Ledger` has a method of each name). cluster: its id. epoch: the last one that it
    spent. commits: what replicas are to serve. highest: each lineage's highest version. identities: all versions that
    it knows. holds: of operators, by replica.
    """

    def __init__(
        self,
        cluster: str,
        epoch: int,
        deadlines: Deadlines | None = None,
        software_version: str = "",
        commits: Commits | None = None,
        highest: Sequence[Version] = (),
        identities: Sequence[Version] = (),
        holds: Mapping[str, OperatorHold] | None = None,
    ) -> None:
        self._deadlines = deadlines or Deadlines()
        self._software_version = software_version
        self._state = ManagerState.from_ledger(cluster, epoch, self._deadlines, commits, highest, identities)
        self._members = self._state.members
        self._publications = Publications(self._state)
        self._holdings = Holdings(self._state, self._publications)
        self._catch_up = CatchUp(self._state, self._holdings)
        self._drifts = Drifts(self._state, self._catch_up)
        self._recovery = LedgerRecovery(self._state)
        self._forgetting = Forgetting(self._state)
        self._deployments = Deployments(self._state)
        self._turns = Turns(self._state, self._publications, self._holdings, self._deployments)
        self._updates = self._turns.updates
        self._late_replicas = LateReplicas(self._state, self._catch_up, self._turns)
        self._deployments.connect(self._updates.attempts, self._late_replicas.cut_short, self._turns.deployment_ended)
        self._stored = () if commits is None else commits.deployments
        self._state.holds |= holds or {}
        self._holds = OperatorHolds(self._state, self._catch_up, self._late_replicas)
        self._sleep_wake: SleepWakeCall | None = None
        self._restarted = epoch > 0
        self._settled = False
        self._started = False
        self._news = False
        self._now = 0.0  # of the last event
        self.changes = 0  # events taken that may have changed what it shows or does

    def handle(self, event: ManagerEvent, now: float) -> list[ManagerCommand]:
        """Takes one event and says what is to be done."""
        return commands_of(self._state.out, lambda: self._take(event, now))

    def _take(self, event: ManagerEvent, now: float) -> None:
        if not self._started:
            self._begin(now)
        self._news = not tells_nothing(event, self._members)
        self._now = now
        match event:
            case Message(peer, body):
                self._message(peer, body, now)
            case PeerLost(peer):
                self._lost(peer, now)
            case TimerFired(key):
                self._timer(key, now)
            case Done():
                self._done(event, now)
            case UpdateCall() | RollbackCall() | WaitCall():
                self._turns.join(event, now)
            case SleepCall() | WakeCall():
                self._sleep_call(event, now)
            case OperatorCall():
                self._operator_call(event, now)
            case CallCancelled(call):
                self._cancelled(call, now)
        if self._news:
            self.changes += 1
            speaker = self._members.by_peer.get(event.peer) if isinstance(event, Message) else None
            self._drifts.look([speaker] if isinstance(speaker, Replica) else (), now)
            self._next(now)

    def status(self, *, replicas: bool = True) -> manager_pb2.GetStatusResponse:
        """The answer to GetStatus. replicas: False leaves them out, which are nearly all of the work."""
        warnings, holdings = [*self._recovery.warnings(), *self._holds.warnings()], self.blobs_in_use()
        drifts = self.drifts() if replicas else None
        deployments = self._deployments.messages()
        answer = status_of(self._state, self._phase(), self._software_version, warnings, holdings, drifts, deployments)
        answer.waiting_for.extend(name for update in self._updates.all() for name in update.course.waiting_for())
        return answer

    def drifts(self) -> dict[str, Drift]:
        """The replicas that do not hold what they are to serve, by name."""
        return self._drifts.all(self._updates.all(), self._now)

    def holds(self) -> Mapping[str, OperatorHold]:
        """Operators' holds by replica. For reading only, and at once."""
        return self._state.holds

    def replicas(self) -> Mapping[str, Replica]:
        """All replicas by name, as they were last heard of. For reading only, and at once."""
        return self._members.replicas

    def last_heard(self) -> float | None:
        """As `Members.last_heard`."""
        return self._members.last_heard()

    def located(self, request: manager_pb2.LocateVersionRequest) -> manager_pb2.LocateVersionResponse:
        """The answer to LocateVersion. Raises CkptEngineError."""
        return located(self._state, request)

    def watched(self) -> Watched:
        """The state that WatchReplicas tells."""
        return watched(self._state, self._updates.all(), self._settled or not self._restarted)

    def blobs_in_use(self) -> dict[str, list[manager_pb2.BlobRef]]:
        """Blobs that must stay, by what needs them, for BlobStore.pin. Owners that are not named need none."""
        return blobs_in_use(self._state, self._publications, self._holdings, self._updates.all())

    def _phase(self) -> str:
        sleep_wake = [] if self._sleep_wake is None else [self._sleep_wake.describe()]
        running = [*(update.describe() for update in self._updates.all()), *sleep_wake, self._deployments.describe()]
        return "; ".join(filter(None, running)) or self._turns.describe() or "idle"

    # -- members

    def _message(self, peer: Peer, body: object, now: float) -> None:
        member = self._members.by_peer.get(peer)
        if member is not None:
            member.heard = now
        match body:
            case manager_pb2.TrainerHello() | manager_pb2.HolderHello() | manager_pb2.ReplicaHello():
                self._hello(peer, body, now)
            case _ if member is None:
                return  # of a stream that was refused or replaced
            case manager_pb2.Goodbye():
                self._goodbye(member, None, now)
            case manager_pb2.Heartbeat():
                self._state.send(member, manager_pb2.Heartbeat(sequence=body.sequence, clock=now))
            case manager_pb2.Publish() if isinstance(member, TrainerRank):
                self._publications.publish(member, body)
                self._updates.note_return(member, now)
            case manager_pb2.ReplicaHeartbeat() if isinstance(member, Replica):
                take_beat(member, body)
                if self._recovery.learn_epochs(member):
                    self._updates.outrun()
                    self._news = True
                self._state.send(member, manager_pb2.Heartbeat(sequence=body.sequence, clock=now))
                self._turns.heard(member.name)
            case manager_pb2.ReplicaOutcome() if isinstance(member, Replica):
                self._outcome(member, body, now)
            case manager_pb2.SleepWakeDone() if isinstance(member, Replica):
                if self._sleep_wake is not None:
                    self._sleep_wake.answer(member, body)
            case _:
                if isinstance(member, Holder):
                    member.words.note(body)
                self._updates.message(member, body, now)

    def _outcome(self, replica: Replica, outcome: manager_pb2.ReplicaOutcome, now: float) -> None:
        if outcome.fence.cluster != self._members.cluster:
            return
        last = replica.last_outcome
        if last is None or last.fence.epoch <= outcome.fence.epoch:
            replica.last_outcome = outcome
        replica.shut.note(replica.workers, outcome.unopened)
        self._updates.message(replica, outcome, now)
        self._turns.heard(replica.name)
        self._state.send(replica, manager_pb2.OutcomeReceived(fence=outcome.fence))

    def _hello(self, peer: Peer, hello: Hello, now: float) -> None:
        try:
            self._members.check_speaker(peer, hello)
            self._recovery.check(hello)
            known = self._members.known(hello)
            session = self._session_of(known)
            member, before = self._members.hello(peer, hello, now)
        except CkptEngineError as error:
            self._lost(peer, now)  # if the stream spoke for a member, it does not any more
            self._state.out.append(ClosePeer(peer, error.problem))
            return
        if before is not None and before != peer:
            self._state.cancel_timer(LeaseEnd(before))
            self._state.out.append(ClosePeer(before, aborted("another stream speaks for this member now").problem))
        if isinstance(member, Replica):
            self._state.versions.register(member.name, member.pool)
        if self._recovery.learn(hello):
            self._updates.outrun()
        fence = self._state.fence(self._installs(member)).message()
        welcome = manager_pb2.Welcome(fence=fence, clock=now, digest_format=DIGEST_FORMAT)
        welcome.lease_seconds, welcome.heartbeat_seconds = self._deadlines.lease, self._deadlines.heartbeat
        self._state.send(member, welcome)
        self._state.set_timer(LeaseEnd(peer), self._deadlines.lease)
        self._forgetting.cancel(member)
        if not isinstance(member, Replica) and session not in ("", member.session_id):
            self._updates.drop_member(member, now, alive=False)
        if isinstance(member, TrainerRank):
            self._publications.taken_back(known, member.table)
            self._publications.offered(member)
        elif isinstance(member, Holder):
            self._holdings.note_held(member)
        self._updates.note_return(member, now)
        if self._sleep_wake is not None:
            self._sleep_wake.send_missing(now)

    def _installs(self, member: Member) -> int:
        """The epoch of the install fence that a member is welcomed with: commands on their way to it are not below."""
        if not isinstance(member, Replica):
            return self._state.installs
        asleep = self._state.installs if self._sleep_wake is None else self._sleep_wake.installs(member.name)
        return min(self._updates.installs(member.name), asleep)

    def _session_of(self, member: Member | None) -> str:
        return "" if member is None else member.session_id

    def _goodbye(self, member: Member, problem: weights_pb2.Problem | None, now: float) -> None:
        peer = member.peer
        if peer is not None:
            self._state.cancel_timer(LeaseEnd(peer))
            self._state.out.append(ClosePeer(peer, problem))
        self._forgetting.cancel(member)
        self._members.forget(member)
        if isinstance(member, Replica):
            self._state.versions.unregister(member.name)
            self._drifts.since.pop(member.name, None)
            self._deployments.drop(member.name)
        member.peer = None
        self._notify_sleep_wake(member, now)
        self._updates.drop_member(member, now, alive=peer is not None)
        self._publications.taken_back(member, None)
        self._publications.prune()
        self._forgetting.prune()

    def _lost(self, peer: Peer, now: float) -> None:
        member = self._members.lose(peer)
        if member is None:
            return
        self._state.cancel_timer(LeaseEnd(peer))
        self._notify_sleep_wake(member, now)
        self._updates.lost(member, now)
        forgotten = self._forgetting.lost(member)
        if forgotten is not None:
            self._goodbye(forgotten, None, now)

    def _notify_sleep_wake(self, member: Member, now: float) -> None:
        if self._sleep_wake is not None and isinstance(member, Replica):
            self._sleep_wake.lost(member.name)

    def _lease(self, peer: Peer, now: float) -> None:
        member = self._members.by_peer.get(peer)
        if member is None:
            return
        silence = now - member.heard
        if silence < self._deadlines.lease:
            self._state.set_timer(LeaseEnd(peer), self._deadlines.lease - silence)
        else:
            message = f"nothing was heard from it for {silence:.1f} s"
            self._state.out.append(ClosePeer(peer, unavailable(message).problem))
            self._lost(peer, now)

    # -- calls

    def _sleep_call(self, event: SleepCall | WakeCall, now: float) -> None:
        try:
            sleep_wake = SleepWakeCall(self._state, event, now)
            self._late_replicas.cut_short(sleep_wake.meets, "a call to sleep or wake came", now)
            orders = [update.goal for update in self._updates.all()]
            orders += [coming.goal for coming in self._turns.coming()]
            if self._sleep_wake or any(map(sleep_wake.meets, orders)):
                raise aborted(f"replicas are in use: {self._phase()}")
            self._state.check_ledger()
            self._sleep_wake = sleep_wake
        except CkptEngineError as error:
            self._state.finish(event.call, error.problem)

    def _operator_call(self, event: OperatorCall, now: float) -> None:
        call, request = event.call, event.request
        if isinstance(request, manager_pb2.HoldReplicaRequest | manager_pb2.ReleaseReplicaRequest):
            self._holds.join(call, request)
            return
        if isinstance(request, manager_pb2.ForgetLineageRequest):
            self._forgetting.join(call, request)
            return
        if isinstance(request, manager_pb2.SteerDeploymentRequest):
            self._deployments.join(call, request)
            return
        if (
            isinstance(request, manager_pb2.EvictReplicaRequest)
            and request.name not in self._members.replicas
            and self._deployments.drop(request.name)
        ):  # it was lost before this manager began, and is known as a participant of a deployment only
            self._state.out.append(FinishCall(call, response=manager_pb2.EvictReplicaResponse()))
            return
        finish, evicted, problem = operate(self._state, self._catch_up, call, request)
        self._state.out.append(finish)
        for member in evicted:
            if isinstance(member, Replica):
                self._holds.evicted(member.name)
            self._goodbye(member, problem, now)

    def _cancelled(self, call: Call, now: float) -> None:
        if self._sleep_wake is not None and self._sleep_wake.call == call:
            self._sleep_wake.call = None
        self._turns.cancelled(call)
        self._updates.cancelled(call)
        self._deployments.cancelled(call)

    # -- what comes next

    def _begin(self, now: float) -> None:
        self._started = True
        self._deployments.take_up(self._stored, now)
        self._state.spend_ahead()
        self._forgetting.look()
        if self._restarted:
            self._state.set_timer(SettleEnd(), self._deadlines.reconnect_most + self._deadlines.heartbeat)
        else:
            self._settled = True

    def _next(self, now: float) -> None:
        """Goes on with what waited, and begins what can begin. Called after every event that may change something."""
        if self._sleep_wake is not None:
            self._sleep_wake.start(now)
            if self._sleep_wake.finished:
                self._sleep_wake = None
        self._updates.next(now)
        self._recovery.look()
        self._turns.look(self._settled, self._may_begin, now)
        self._deployments.join_calls(self._turns.coming(), now)
        self._deployments.make_way(self._turns.coming())
        self._deployments.look(self._settled, now)
        self._late_replicas.give_way(now)
        while self._state.epoch_ready():
            if self._turns.begin(self._may_begin, now):
                continue
            goal = self._late_replicas.next_goal(self._may_begin, now) if self._settled else None
            if goal is None:
                return
            self._updates.start(goal, now)

    def _may_begin(self, goal: Goal) -> bool:
        """Whether no call to sleep or wake and no deployment is in a goal's way, and the ledger is certain of what its
        replicas are to serve."""
        awake = self._sleep_wake is None or not self._sleep_wake.meets(goal)
        free = awake and self._deployments.lets(goal)
        return free and self._state.versions.is_certain((*goal.replicas, *goal.selection), goal.pool)

    # -- timers and tasks

    def _timer(self, key: Key, now: float) -> None:
        match key:
            case LeaseEnd(peer):
                self._lease(peer, now)
            case UpdateTimer():
                self._updates.timer(key, now)
            case SleepWakeEnd() | SleepWakeResend():
                if self._sleep_wake is not None:
                    self._sleep_wake.timer(key, now)
            case ForgetTimer():
                if (member := self._forgetting.due(key)) is not None:
                    self._goodbye(member, None, now)
            case LineagesLook():
                self._forgetting.look()
            case JoinRetry():
                self._holdings.retry(key)
            case SettleEnd():
                self._settled = True
            case EpochRetry():
                self._state.spend_ahead()
            case CommitsRetry():
                self._recovery.read()
            case DeploymentCallEnd(number):
                self._deployments.calls_over(number, now)
            case CatchUpRetry() | DeploymentLook():
                pass  # another look follows every event
            case _:
                self._turns.timer(key, now)

    def _done(self, done: Done, now: float) -> None:
        match done.key:
            case UpdateTask() as key:
                if self._updates.done(key, done, now) and key.step is Entry.INTENT:
                    self._committed(now)
            case DeploymentCommit() as key:
                self._deployments.committed(key, done, now)
                self._committed(now)
            case DeploymentWrite() as key:
                self._deployments.written(key, done, now)
            case PlanTask() as key:
                self._updates.planned(key, done, now)
                self._holdings.planned(key, done)
            case Merge() as key:
                self._publications.merged(key, done)
            case HoldWrite() as key:
                self._holds.written(key, done, now)
            case ForgottenWrite() as key:
                self._forgetting.written(key, done)
            case Correction() | ReportWrite():
                pass
            case CommitsRead():
                if (commits := self._recovery.take_commits(done)) is not None:
                    self._deployments.take_up(commits.deployments, now)
            case EpochSpending():
                self._state.spend_ended(done.problem)
            case SleepWakeSpending():
                if self._sleep_wake is not None:
                    self._sleep_wake.spent(done, now)
                self._state.spend_ahead()
            case _:
                self._turns.done(done)

    def _committed(self, now: float) -> None:
        """Forgets what a commit has made useless."""
        self._state.spend_ahead()
        for trainer in self._forgetting.taken_over():
            self._goodbye(trainer, None, now)
        self._forgetting.prune()
