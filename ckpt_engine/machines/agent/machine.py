"""The agent's machine: one replica, its engine and its workers.

Decides which command is obeyed (fences), runs one operation on the engine at a time, answers repetitions as before,
tells the manager what the state words say, and resumes an engine that has no reason to be paused. It believes the
workers' state words over everything that the engine or the manager says.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from ckpt_engine.core.deadlines import Deadlines
from ckpt_engine.core.manifest import DIGEST_FORMAT
from ckpt_engine.core.scrub import difference_words
from ckpt_engine.core.sleeping import AWAKE
from ckpt_engine.core.version import Fence
from ckpt_engine.machines.agent.install import Installing
from ckpt_engine.machines.agent.label import Stamping
from ckpt_engine.machines.agent.operations import Preparing, Resuming
from ckpt_engine.machines.agent.sleep import SleepingOrWaking
from ckpt_engine.machines.agent.state import NO_WORDS, AgentReplica, Operation, acknowledged, no_order
from ckpt_engine.machines.deciding import commands_of
from ckpt_engine.machines.events import (
    AgentCommand,
    AgentEvent,
    Done,
    EngineExited,
    EngineReady,
    Key,
    Message,
    PeerLost,
    PutBlobs,
    ReadWords,
    Reply,
    Run,
    Say,
    SealDirectory,
    SealResult,
    SetTimer,
    Start,
    Stop,
    TimerFired,
    Words,
    WorkerAsked,
)
from ckpt_engine.machines.session import Session
from ckpt_engine.v1 import manager_pb2, weights_pb2, worker_pb2

LOOK: Key = ("words",)
MARK: Key = ("mark",)
OUTCOME: Key = ("outcome",)


class AgentMachine:
    """One agent process.

    name: of the replica. session_id: of this process. agent_epoch: from the engine's directory. transports: available
    on this host. Engine and workers may outlive the agent: a new one starts from what they say.

    A command that comes during an operation is left unanswered (the manager repeats it). One with a later install fence
    also turns back an install that no worker has begun. A fill fence (preparing, sealing files) does not: it is
    compared with fill fences only.
    """

    def __init__(
        self,
        name: str,
        session_id: str,
        agent_epoch: int,
        mode: manager_pb2.Mode,
        host: weights_pb2.Host,
        transports: tuple[str, ...],
        deadlines: Deadlines | None = None,
        pool: str = "",
        check_engine: str = "auto",
    ) -> None:
        self._pool = pool
        self._session_id = session_id
        self._agent_epoch = agent_epoch
        self._host = host
        self._transports = transports
        self._deadlines = deadlines or Deadlines()
        self._out: list[AgentCommand] = []
        self.replica = AgentReplica(name, mode, self._deadlines, self._out, check_engine=check_engine)
        self._session = Session(self._deadlines, self._out.append, self._dial, self._hello, self._beat)
        self.replica.session = self._session
        self._highest = 0  # install fence
        self._filled = 0  # fill fence
        self._answers: dict[str, manager_pb2.Prepared | manager_pb2.SleepWakeDone] = {}
        self._outcome_received = True
        self._seals: dict[Key, tuple[manager_pb2.SealForReaders, manager_pb2.Sealed | None]] = {}
        self._looking = False
        self._reported_state: object = None

    @property
    def busy(self) -> bool:
        """Whether an operation on the engine goes on; an orderly shutdown waits for its end."""
        return self.replica.operation is not None

    @property
    def closed_reason(self) -> str:
        """Why the replica is not serving; empty if it is."""
        return self.replica.closed_reason()

    def handle(self, event: AgentEvent, now: float) -> list[AgentCommand]:
        """Takes one event; returns the commands that follow from it."""
        return commands_of(self._out, lambda: self._take(event, now))

    def _take(self, event: AgentEvent, now: float) -> None:
        match event:
            case Message(peer, body):
                if self._session.heard(peer, now):
                    self._message(body, now)
            case PeerLost(peer, reason, code):
                self._session.lost(peer, reason, now, code)
            case TimerFired(key):
                self._timer(key, now)
            case Done():
                self._done(event, now)
            case WorkerAsked(request, question):
                self._out.append(Reply(request, self._reply_to(question, now)))
            case EngineReady():
                self._engine_ready(event, now)
            case EngineExited(reason):
                self._engine_exited(reason, now)
            case Start():
                self._session.start(now)
                self._out.append(SetTimer(LOOK, self._deadlines.words))
            case Stop(reason):
                self._session.stop(reason)
        while self.replica.ended:
            self._ended(self.replica.ended.pop(0), now)
        self._tell_changes(now)

    # -- session

    def _dial(self, now: float) -> None:
        """Stores needs before the hello that refers to them: the manager may have been restarted."""
        needs = tuple(self.replica.needs[rank] for rank in sorted(self.replica.prepared))
        if needs:
            self._out.append(Run(("put",), PutBlobs(needs, self._deadlines.blobs)))
        else:
            self._session.open(now)

    def _hello(self) -> manager_pb2.ReplicaHello:
        replica = self.replica
        return manager_pb2.ReplicaHello(
            cluster=self._session.cluster,
            name=replica.name,
            session_id=self._session_id,
            agent_epoch=self._agent_epoch,
            engine=None if replica.engine is None else replica.engine.engine,
            mode=replica.mode,
            host=self._host,
            workers=replica.words.workers,
            transports=self._transports,
            prepared=[replica.prepared[rank] for rank in sorted(replica.prepared)],
            last_outcome=replica.last_outcome,
            asleep=replica.asleep,
            epoch=max(self._highest, self._filled),
            pool=self._pool,
            digest_format=DIGEST_FORMAT,
        )

    def _beat(self, sequence: int) -> manager_pb2.ReplicaHeartbeat:
        replica = self.replica
        return manager_pb2.ReplicaHeartbeat(
            sequence=sequence,
            workers=replica.words.workers,
            serving=replica.serving(),
            asleep=replica.asleep,
            closed_reason=replica.closed_reason(),
            label_problem=replica.label_problem(),
            engine_check=replica.engine_check,
            stage_memory=replica.staging,
            scrubs=replica.scrubbing,
            guesses=replica.guesses,
            requests=replica.words.requests,
            failed_requests=replica.words.failed_requests,
        )

    def _tell_changes(self, now: float) -> None:
        """Sends a heartbeat at once if the state has changed, so that a late replica is brought up without delay."""
        replica = self.replica
        words, label = replica.words.workers, replica.label_problem()
        state = (
            words,
            replica.serving(),
            replica.asleep,
            replica.engine is None,
            label,
            replica.engine_check,
            replica.staging,
            len(replica.differences),
        )
        if state != self._reported_state and self._session.welcomed:
            self._reported_state = state
            self._session.beat_now(now)

    # -- messages

    def _message(self, body: object, now: float) -> None:
        match body:
            case manager_pb2.Welcome():
                if self._session.welcome(body, now):
                    self._highest = max(self._highest, body.fence.epoch)
                    self._reported_state = None
                    self._send_outcome()
            case manager_pb2.Refused():
                self._session.refused(body.problem, now)
            case manager_pb2.Prepare():
                if self._fills(fence := Fence.of(body.fence)):
                    self._command("prepare", fence, lambda: Preparing(self.replica, body), now)
            case manager_pb2.Install():
                if self._installs(fence := Fence.of(body.fence), now):
                    self._command("install", fence, lambda: Installing(self.replica, body), now)
                    operation = self.replica.operation
                    if isinstance(operation, Installing) and operation.fence == fence and not body.waits:
                        operation.go_on(now)
            case manager_pb2.SleepWake():
                if self._installs(fence := Fence.of(body.fence), now):
                    self._command("sleep", fence, lambda: SleepingOrWaking(self.replica, body), now)
            case manager_pb2.Abandon():
                self._abandon(body, now)
            case manager_pb2.OutcomeReceived():
                outcome = self.replica.last_outcome
                if outcome is not None and Fence.of(outcome.fence) == Fence.of(body.fence):
                    self._outcome_received = True
            case manager_pb2.Heartbeat():
                self._session.echoed(body, now)
            case manager_pb2.SealForReaders():
                self._seal(body)

    def _abandon(self, body: manager_pb2.Abandon, now: float) -> None:
        """Turns an install back if no byte was written. If its command was lost, reports the same outcome, and does not
        obey the command any more."""
        fence, operation = Fence.of(body.fence), self.replica.operation
        if operation is None and self._installs(fence, now):
            unheard = manager_pb2.Install(fence=body.fence, deadline_seconds=self._deadlines.words)
            self._command("install", fence, lambda: Installing(self.replica, unheard), now)
            operation = self.replica.operation
        if operation is not None and operation.fence == fence:
            operation.overtaken(body.reason, now)

    def _fills(self, fence: Fence) -> bool:
        """Whether a fill fence is obeyed; notes it if so."""
        if fence.cluster != self._session.cluster or fence.epoch < self._filled:
            return False
        self._filled = fence.epoch
        return True

    def _installs(self, fence: Fence, now: float) -> bool:
        """Whether an install fence is obeyed; a later one turns back what can still be turned back."""
        if fence.cluster != self._session.cluster or fence.epoch < self._highest:
            return False
        operation = self.replica.operation
        if operation is not None and fence.epoch > operation.fence.epoch:
            operation.overtaken(f"the manager went on to epoch {fence.epoch}", now)  # which may end it at once
        if self.replica.operation is None:
            self._highest = fence.epoch
        return True

    def _command(self, kind: str, fence: Fence, make: Callable[[], Operation], now: float) -> None:
        """Begins the operation that a command asks for, answers a repetition, or leaves the command unanswered."""
        operation = self.replica.operation
        if operation is not None:
            if operation.kind == kind and operation.fence == fence:
                operation.repeated(now)
            return
        outcome, answer = self.replica.last_outcome, self._answers.get(kind)
        if kind == "install" and outcome is not None and Fence.of(outcome.fence) == fence:
            self._outcome_received = False
            self._send_outcome()
        elif answer is not None and Fence.of(answer.fence) == fence:
            self._session.send(answer)
        else:
            self.replica.begin(make(), now)

    def _ended(self, operation: Operation, now: float) -> None:
        """Reports the result of an operation; an outcome is sent again until its arrival is confirmed."""
        if isinstance(operation, Installing):
            self._outcome_received = False
            self._send_outcome()
        elif isinstance(operation, (Preparing, SleepingOrWaking)) and operation.answer is not None:
            self._answers[operation.kind] = operation.answer
            self._session.send(operation.answer)
        if not isinstance(operation, Resuming | Stamping):  # what was refused waits for a look: others want a turn
            self._reconcile(now)

    def _send_outcome(self) -> None:
        if self.replica.last_outcome is not None and not self._outcome_received:
            self._session.send(self.replica.last_outcome)
            self._out.append(SetTimer(OUTCOME, self._deadlines.resend))

    # -- the engine and its workers

    def _engine_ready(self, event: EngineReady, now: float) -> None:
        if self.replica.engine is not None:
            self._engine_exited("it was started again", now)
        self.replica.engine = event
        self.replica.engine_reason = ""
        self.replica.checked, self.replica.engine_check = False, event.untested
        self.replica.labelled, self.replica.label_reason, self.replica.label_again = None, "", now
        # A pause that an earlier agent asked for may still be ahead of an engine that runs. That agent gave no orders
        # yet: those go out only after a pause has been answered.
        self.replica.paused = True if event.paused else None
        self.replica.accounted = event.paused is False
        if self.replica.mode == manager_pb2.MODE_COLOCATED:
            self.replica.accounted = True  # no agent gives a colocated engine install orders
        self.replica.sleeping = AWAKE if event.asleep is False else event.marked
        self.replica.holding = event.holding
        self._out.append(Run(MARK, self.replica.mark(self.replica.sleeping)))
        self._session.hello_again()
        self._look()

    def _engine_exited(self, reason: str, now: float) -> None:
        replica = self.replica
        replica.engine = None
        replica.engine_reason = reason
        replica.words = NO_WORDS
        replica.paused = None
        replica.sleeping = AWAKE
        replica.holding = False
        replica.orders.clear()
        replica.prepared.clear()
        replica.needs.clear()
        replica.ready.clear()
        replica.models.clear()
        replica.stage_memory.clear()
        replica.scrubs.clear()
        if replica.operation is not None:
            replica.operation.engine_exited(reason, now)

    def _look(self) -> None:
        if not self._looking:
            self._looking = True
            self._out.append(Run(LOOK, ReadWords(current=False)))

    def _reconcile(self, now: float) -> None:
        """Resumes the engine if its workers are whole and may not begin to write: it has no reason to be paused, half
        asleep, or to have requests wait. If it may name a wrong version, tells it the right one."""
        replica = self.replica
        if replica.operation is not None or replica.engine is None:
            return
        if (
            (replica.paused is not False or replica.sleeping or replica.holding)
            and not replica.asleep
            and replica.words.open
            and not replica.orders
        ):
            replica.begin(Resuming(replica, weights_pb2.Fence()), now)
        elif replica.mislabelled and now >= replica.label_again:
            replica.begin(Stamping(replica, weights_pb2.Fence()), now)

    def _reply_to(self, request: worker_pb2.WorkerRequest, now: float) -> worker_pb2.AgentReply | None:
        replica = self.replica
        kind = request.WhichOneof("body")
        if kind == "installed":
            replica.account_for(request.rank, request.boot_id, request.installed.fence.epoch)
        if kind == "scrub":
            if replica.take_scrub(request.scrub):
                self._out.append(Say(difference_words(request.scrub.last)))
                self._look()
            return acknowledged()
        reply = None if replica.operation is None else replica.operation.reply_to(request, now)
        if reply is not None:
            return reply
        return no_order(replica) if kind in ("want_prepare", "want_install", "early") else acknowledged()

    # -- timers and tasks

    def _timer(self, key: Key, now: float) -> None:
        if self._session.timer(key, now):
            return
        match key:
            case ("words",):
                if self.replica.engine is not None:
                    self._look()
                self._out.append(SetTimer(LOOK, self._deadlines.words))
            case ("outcome",):
                self._send_outcome()
            case ("operation", number, str() as step):
                operation = self.replica.operation
                if operation is not None and operation.number == number:
                    operation.timer(step, now)

    def _done(self, done: Done, now: float) -> None:
        match done.key:
            case ("words",):
                self._looking = False
                if done.problem is None and self.replica.engine is not None:
                    self.replica.take_words(cast(Words, done.result))
                    self._reconcile(now)
            case ("put",):
                if done.problem is None:
                    self._session.open(now)
                else:
                    self._session.failed(done.problem.message, now)
            case ("operation", number, str() as step):
                operation = self.replica.operation
                if operation is not None and operation.number == number:
                    operation.done(step, done, now)
            case ("seal", int(), bytes()) if done.key in self._seals:  # else of an update before this one
                self._sealed(done)

    # -- sealing a directory for its readers

    def _seal(self, seal: manager_pb2.SealForReaders) -> None:
        if not self._fills(Fence.of(seal.fence)):
            return
        key = ("seal", seal.fence.epoch, seal.table.digest)
        if key in self._seals:
            answer = self._seals[key][1]
            if answer is not None:
                self._session.send(answer)
            return
        self._seals = {other: entry for other, entry in self._seals.items() if entry[0].fence.epoch == seal.fence.epoch}
        self._seals[key] = (seal, None)
        task = SealDirectory(seal.table, seal.atoms, seal.deadline_seconds)
        self._out.append(Run(key, task))

    def _sealed(self, done: Done) -> None:
        seal = self._seals[done.key][0]
        answer = manager_pb2.Sealed(fence=seal.fence, atoms=seal.atoms, problem=done.problem)
        if done.problem is None:
            sealed = cast(SealResult, done.result)
            answer.digests.CopyFrom(sealed.digests)
            answer.copy_seconds = sealed.copy_seconds
            answer.digest_seconds = sealed.digest_seconds
        self._seals[done.key] = (seal, answer)
        self._session.send(answer)
