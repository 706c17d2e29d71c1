"""The manager's streams and calls, around its state machine; `shell/loop.py` has the rest of the loop.

It decides nothing. All of it runs on the manager's event loop thread; only tasks leave it (see ``tasks``).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, assert_never

from google.protobuf.message import Message as ProtobufMessage

from ckpt_engine.core.problems import CkptEngineError, internal, unavailable
from ckpt_engine.machines import events
from ckpt_engine.machines.events import Call, ManagerEvent, Peer
from ckpt_engine.machines.manager.machine import LeaseEnd, ManagerMachine
from ckpt_engine.machines.manager.members import Replica
from ckpt_engine.machines.manager.reconcile import Drift
from ckpt_engine.machines.manager.status import Watched
from ckpt_engine.machines.wire import pack
from ckpt_engine.manager.blobs import BlobStore
from ckpt_engine.manager.metrics import ManagerMetrics
from ckpt_engine.manager.refusals import Refusal, Refusals
from ckpt_engine.manager.tasks import Tasks
from ckpt_engine.manager.watchers import Watchers
from ckpt_engine.shell.loop import Loop
from ckpt_engine.shell.outbox import Outbox
from ckpt_engine.trace import trace
from ckpt_engine.v1 import manager_pb2, weights_pb2

SESSION_QUEUE = 1024
"""Messages that may wait for one peer. An update sends each peer a handful, so this many mean that it is stuck."""

CALL_QUEUE = 4096
"""Events that may wait for one caller; from half of it on, progress is dropped and only reports are kept."""

BEATS = (manager_pb2.Heartbeat, manager_pb2.ReplicaHeartbeat, manager_pb2.Progress)
"""Nearly all messages."""

log = logging.getLogger("ckpt_engine.manager")


@dataclass
class _OpenSession:
    envelope: type[ProtobufMessage]
    outbox: Outbox[Any]


class Shell:
    """Runs the manager's machine: turns streams and calls into its events, and its commands into messages and tasks."""

    def __init__(
        self,
        machine: ManagerMachine,
        tasks: Tasks,
        blobs: BlobStore,
        metrics: ManagerMetrics,
        leads: Callable[[], bool] = lambda: True,
    ) -> None:
        """leads: whether this manager may decide anything now. Once it may not, nothing reaches the machine."""
        self.failed = asyncio.Event()  # set once the machine has raised an exception; the shell then does nothing more
        self._machine = machine
        self._loop = Loop("manager", machine, self._perform, tasks.run, self._fail, self._handled, leads)
        self._blobs = blobs
        self._metrics = metrics
        self._sessions: dict[Peer, _OpenSession] = {}
        self._calls: dict[Call, Outbox[Any]] = {}
        self._updates: dict[Call, manager_pb2.UpdateWeightsRequest] = {}
        self._rollbacks: dict[Call, manager_pb2.RollbackRequest] = {}
        self.refusals = Refusals()
        self._pinned: dict[str, list[manager_pb2.BlobRef]] = {}
        self._changes_shown = 0
        self._status: manager_pb2.GetStatusResponse | None = None
        self._status_of = 0  # the number of changes that it includes
        self._numbers = count(1)
        self._idle = asyncio.Event()
        self._idle.set()
        self.watchers = Watchers(machine.watched)

    @property
    def problem(self) -> weights_pb2.Problem | None:
        """Why the machine has stopped; None: it runs."""
        return self._loop.problem

    # -- what the servicer calls

    def open_session(
        self, kind: str, envelope: type[ProtobufMessage], hello: ProtobufMessage
    ) -> tuple[Peer, Outbox[Any]]:
        """Makes a peer of a stream after its hello. envelope: the type of outgoing messages."""
        peer = Peer(f"{kind}-{next(self._numbers)}")
        outbox: Outbox[Any] = Outbox(peer, SESSION_QUEUE)
        self._sessions[peer] = _OpenSession(envelope, outbox)
        if self.problem is not None:
            self._close(peer, _ending(self.problem))
        self.handle(events.Message(peer, hello))
        return peer, outbox

    def end_session(self, peer: Peer, reason: str) -> None:
        """Tells the machine that a stream ended, unless the machine ended it."""
        if self._sessions.pop(peer, None) is not None:
            self.handle(events.PeerLost(peer, reason))

    def open_call(self, kind: str, event: Callable[[Call], ManagerEvent]) -> tuple[Call, Outbox[Any]]:
        """Begins a call. Its events and its response come out of the outbox, which its end closes."""
        call = Call(f"{kind}-{next(self._numbers)}")
        outbox: Outbox[Any] = Outbox(call, CALL_QUEUE)
        self._calls[call] = outbox
        self._idle.clear()
        if self.problem is not None:
            outbox.close(_ending(self.problem))
        happened = event(call)
        if isinstance(happened, events.UpdateCall):
            self._updates[call] = happened.request
            self._metrics.called(happened.request.lineage)
        if isinstance(happened, events.RollbackCall):
            self._rollbacks[call] = happened.request
        self.handle(happened)
        return call, outbox

    async def answer(self, kind: str, event: Callable[[Call], ManagerEvent]) -> ProtobufMessage:
        """Returns the machine's response to a call. Raises CkptEngineError with the machine's problem."""
        call, outbox = self.open_call(kind, event)
        try:
            response: ProtobufMessage | None = await outbox.take()
        finally:
            self.end_call(call)
        if response is None:
            raise CkptEngineError(outbox.problem or internal("the call ended without an answer").problem)
        return response

    def end_call(self, call: Call) -> None:
        """Ends a call whose handler returns, and tells the machine unless it finished the call itself."""
        outbox = self._calls.pop(call, None)
        self._rollbacks.pop(call, None)
        if not self._calls:
            self._idle.set()
        if outbox is not None and not outbox.closed:
            self.handle(events.CallCancelled(call))
        request = self._updates.pop(call, None)
        if request is not None and not any(each.lineage == request.lineage for each in self._updates.values()):
            self._metrics.forget_calls(request.lineage)

    @property
    def changes(self) -> int:
        """How many events so far may have changed the status."""
        return self._machine.changes

    def status(self, *, replicas: bool = True) -> manager_pb2.GetStatusResponse:
        """The answer of GetStatus. replicas: False leaves them out. Only read it: while nothing changes it is the same
        message, in which only the times of drifts are new."""
        if not replicas:
            return self._machine.status(replicas=False)
        if self._status is None or self._status_of != self._machine.changes:
            self._status, self._status_of = self._machine.status(), self._machine.changes
        elif drifts := self._machine.drifts():
            for replica in self._status.replicas:
                if replica.name in drifts:
                    replica.drift.CopyFrom(drifts[replica.name].message())
        return self._status

    def replicas(self) -> Mapping[str, Replica]:
        """All replicas by name. Only read them, and at once."""
        return self._machine.replicas()

    def drifts(self) -> dict[str, Drift]:
        """The replicas that do not hold what they should serve, by name."""
        return self._machine.drifts()

    def holds(self) -> Mapping[str, events.OperatorHold]:
        """The replicas that operators hold, by name."""
        return self._machine.holds()

    def watched(self) -> Watched:
        """The state that WatchReplicas sends."""
        return self._machine.watched()

    def deserted_for(self) -> float:
        """Seconds since a member was heard, if every member has lost its session without a goodbye; else 0."""
        heard = self._machine.last_heard()
        return 0.0 if heard is None else time.monotonic() - heard

    def located(self, request: manager_pb2.LocateVersionRequest) -> manager_pb2.LocateVersionResponse:
        """The answer of LocateVersion. Raises CkptEngineError."""
        return self._machine.located(request)

    async def quiet(self, seconds: float) -> bool:
        """Waits until no call runs any more, for at most `seconds`. Returns whether that was reached."""
        try:
            await asyncio.wait_for(self._idle.wait(), seconds)
        except TimeoutError:
            return False
        return True

    async def stop(self, problem: weights_pb2.Problem, seconds: float) -> None:
        """Ends all calls and sessions with this problem, then timers and tasks. Nothing reaches the machine afterwards.

        seconds: for tasks, so that the report of an update that just ended is still stored.
        """
        for outbox in self._calls.values():
            outbox.close(problem)
        for session in self._sessions.values():
            session.outbox.close(problem)
        self._sessions.clear()
        self.watchers.stop(problem)
        await self._loop.stop(seconds)

    # -- the loop

    def handle(self, event: ManagerEvent) -> None:
        """Feeds one event to the machine, and performs its commands."""
        if isinstance(event, events.Message) and isinstance(event.body, manager_pb2.Sealed):
            self._metrics.sealed(event.body)
        self._loop.feed(event)

    def _handled(self, event: object, commands: Sequence[object]) -> None:
        self._count_refusal(commands)
        if self._machine.changes == self._changes_shown:
            return
        self._changes_shown = self._machine.changes
        if not _claims_no_blobs(event):
            self._pin()
        self.watchers.changed(beat=isinstance(event, events.Message) and isinstance(event.body, BEATS))

    def _fail(self, event: object, problem: weights_pb2.Problem) -> None:
        """Ends all sessions and calls. The peer that sent the failing message gets the problem itself, so that it does
        not send it again; the others may try again."""
        if isinstance(event, events.Message):
            self._close(event.peer, problem)
        for peer in tuple(self._sessions):
            self._close(peer, _ending(problem))
        for outbox in self._calls.values():
            outbox.close(_ending(problem))
        self.watchers.stop(_ending(problem))
        self.failed.set()

    def _perform(self, command: events.Send | events.ClosePeer | events.EmitEvent | events.FinishCall) -> None:
        match command:
            case events.Send(peer, body):
                trace("manager.sends", type(body).__name__)
                if (session := self._sessions.get(peer)) is not None:
                    session.outbox.put(pack(session.envelope, body))
            case events.ClosePeer(peer, problem):
                self._close(peer, problem)
            case events.EmitEvent(call, event):
                if (outbox := self._calls.get(call)) is not None and (event.HasField("report") or outbox.has_room):
                    outbox.put(event)
            case events.FinishCall(call, problem, response):
                if (outbox := self._calls.get(call)) is not None:
                    if response is not None:
                        outbox.put(response)
                    outbox.close(problem)
            case _:
                assert_never(command)

    def _close(self, peer: Peer, problem: weights_pb2.Problem | None) -> None:
        session = self._sessions.pop(peer, None)
        if session is not None:
            if problem is not None:
                session.outbox.put(pack(session.envelope, manager_pb2.Refused(problem=problem)))
            session.outbox.close(problem)

    def _count_refusal(self, commands: Sequence[object]) -> None:
        """Counts a refused update once, however many ranks called it: one event refuses all of them together."""
        counted: set[str] = set()
        for command in commands:
            if not isinstance(command, events.FinishCall) or not command.problem:
                continue
            problem = command.problem
            if (rollback := self._rollbacks.get(command.call)) is not None:
                target = (rollback.lineage, rollback.version)
                log.warning("rollback refused lineage=%r version=%d problem=%r", *target, problem.message)
                self.refusals.add(Refusal(*target, problem))
                self._metrics.refused(problem)
            elif (request := self._updates.get(command.call)) is not None and request.lineage not in counted:
                counted.add(request.lineage)
                version = request.version if request.HasField("version") else None
                lineage, rank = request.lineage, request.rank
                log.warning("update refused lineage=%r rank=%d problem=%r", lineage, rank, problem.message)
                self.refusals.add(Refusal(request.lineage, version, problem))
                self._metrics.refused(problem)

    def _pin(self) -> None:
        in_use = self._machine.blobs_in_use()
        for owner, refs in in_use.items():
            if self._pinned.get(owner) != refs:
                self._blobs.pin(owner, refs)
        for owner in self._pinned.keys() - in_use.keys():
            self._blobs.unpin(owner)
        self._pinned = in_use


def _claims_no_blobs(event: object) -> bool:
    """Whether an event cannot start to use a blob. Such events come from each replica in each update, so they skip the
    check of all blobs in use; a blob that is no longer used is unpinned at the next other event."""
    if isinstance(event, events.TimerFired):
        return isinstance(event.key, LeaseEnd)
    return isinstance(event, events.Message) and isinstance(event.body, (*BEATS, manager_pb2.ReplicaOutcome))


def _ending(problem: weights_pb2.Problem) -> weights_pb2.Problem:
    """The problem for members that are not to blame: they may try again when the manager was restarted."""
    return unavailable(f"the manager ends: {problem.message}").problem
