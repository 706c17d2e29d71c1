"""The one loop around the manager's state machine: events go in, commands are carried out.

It decides nothing. All of it runs on the manager's event loop thread; only tasks leave it (see ``tasks``).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any, assert_never

from google.protobuf.message import Message as ProtobufMessage

from ckpt_engine.core.machines import events
from ckpt_engine.core.machines.events import Call, Key, ManagerCommand, ManagerEvent, Peer
from ckpt_engine.core.machines.manager import ManagerMachine
from ckpt_engine.core.machines.wire import pack
from ckpt_engine.core.problems import internal
from ckpt_engine.manager.blobs import BlobStore
from ckpt_engine.manager.metrics import Metrics
from ckpt_engine.manager.sessions import Outbox
from ckpt_engine.manager.tasks import Tasks
from ckpt_engine.manager.watchers import Watchers
from ckpt_engine.trace import span, trace
from ckpt_engine.v1 import manager_pb2, weights_pb2

SESSION_QUEUE = 1024
"""Messages that may wait for one peer. An update sends each peer a handful, so this many mean that it is stuck."""

CALL_QUEUE = 4096
"""Events that may wait for one caller; from half of it on, progress is dropped and only reports are kept."""

log = logging.getLogger("ckpt_engine.manager")


@dataclass
class _Session:
    envelope: type[ProtobufMessage]
    outbox: Outbox[Any]


class Shell:
    """Streams, calls, timers and tasks of one machine."""

    def __init__(self, machine: ManagerMachine, tasks: Tasks, blobs: BlobStore, metrics: Metrics) -> None:
        self._machine = machine
        self._tasks = tasks
        self._blobs = blobs
        self._metrics = metrics
        self._sessions: dict[Peer, _Session] = {}
        self._calls: dict[Call, Outbox[Any]] = {}
        self._timers: dict[Key, asyncio.TimerHandle] = {}
        self._running: set[asyncio.Task[None]] = set()
        self._pinned: dict[str, list[manager_pb2.BlobRef]] = {}
        self._numbers = count(1)
        self._idle = asyncio.Event()
        self._idle.set()
        self.watchers = Watchers(machine.watched)

    # -- what the servicer calls

    def open_session(
        self, kind: str, envelope: type[ProtobufMessage], hello: ProtobufMessage
    ) -> tuple[Peer, Outbox[Any]]:
        """Makes a peer of a stream whose hello came. ``envelope`` is the message type of the way out."""
        peer = Peer(f"{kind}-{next(self._numbers)}")
        outbox: Outbox[Any] = Outbox(peer, SESSION_QUEUE)
        self._sessions[peer] = _Session(envelope, outbox)
        self.handle(events.Message(peer, hello))
        return peer, outbox

    def end_session(self, peer: Peer, reason: str) -> None:
        """Tells the machine that a stream ended, unless the machine ended it."""
        if self._sessions.pop(peer, None) is not None:
            self.handle(events.PeerLost(peer, reason))

    def open_call(self, kind: str, event: Callable[[Call], ManagerEvent]) -> tuple[Call, Outbox[Any]]:
        """Begins a call; its events and its response come out of the outbox, and its end closes that."""
        call = Call(f"{kind}-{next(self._numbers)}")
        outbox: Outbox[Any] = Outbox(call, CALL_QUEUE)
        self._calls[call] = outbox
        self._idle.clear()
        self.handle(event(call))
        return call, outbox

    def end_call(self, call: Call) -> None:
        """The handler of a call returns; the machine hears of it unless it finished the call itself."""
        outbox = self._calls.pop(call, None)
        if not self._calls:
            self._idle.set()
        if outbox is not None and not outbox.closed:
            self.handle(events.CallCancelled(call))

    def status(self) -> manager_pb2.GetStatusResponse:
        """What GetStatus answers."""
        return self._machine.status()

    async def quiet(self, seconds: float) -> bool:
        """Waits until no call runs any more, at most so long; whether that came true."""
        try:
            await asyncio.wait_for(self._idle.wait(), seconds)
        except TimeoutError:
            return False
        return True

    async def stop(self, problem: weights_pb2.Problem, seconds: float) -> None:
        """Ends all calls and sessions with this problem, then timers and tasks. Nothing reaches the machine after.

        Tasks get so many ``seconds``, so that the report of what just ended is still stored.
        """
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        for outbox in self._calls.values():
            outbox.close(problem)
        for session in self._sessions.values():
            session.outbox.close(problem)
        self._sessions.clear()
        self.watchers.stop(problem)
        if self._running:
            await asyncio.wait(self._running, timeout=seconds)
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    # -- the loop

    def handle(self, event: ManagerEvent) -> None:
        """One event into the machine, and everything out of it that it commands."""
        try:
            commands = self._machine.handle(event, time.monotonic())
        except Exception:
            # A defect of ours. Whoever waits is freed by the machine's own timers; the sender is sent away, so that
            # the same message is not tried for ever.
            log.exception("the state machine failed event=%s", type(event).__name__)
            if isinstance(event, events.Message):
                self._close(event.peer, internal("the manager failed on a message; its log says why").problem)
            return
        for command in commands:
            self._perform(command)
        self._count_refusal(commands)
        beat = _changes_no_blobs(event)
        if not beat:
            self._pin()
        self.watchers.changed(beat)

    def _perform(self, command: ManagerCommand) -> None:
        match command:
            case events.Send(peer, body):
                trace("manager.sends", type(body).__name__)
                if (session := self._sessions.get(peer)) is not None:
                    session.outbox.put(pack(session.envelope, body))
            case events.ClosePeer(peer, problem):
                self._close(peer, problem)
            case events.SetTimer(key, seconds):
                self._cancel_timer(key)
                self._timers[key] = asyncio.get_running_loop().call_later(seconds, self._fire, key)
            case events.CancelTimer(key):
                self._cancel_timer(key)
            case events.Run(key, task):
                running = asyncio.ensure_future(self._run(key, task))
                self._running.add(running)
                running.add_done_callback(self._running.discard)
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

    async def _run(self, key: Key, task: events.Task) -> None:
        with span("manager.does", type(task).__name__):
            done = await self._tasks.run(key, task)
        self.handle(done)

    def _fire(self, key: Key) -> None:
        del self._timers[key]
        self.handle(events.TimerFired(key))

    def _cancel_timer(self, key: Key) -> None:
        if (timer := self._timers.pop(key, None)) is not None:
            timer.cancel()

    def _close(self, peer: Peer, problem: weights_pb2.Problem | None) -> None:
        session = self._sessions.pop(peer, None)
        if session is not None:
            if problem is not None:
                session.outbox.put(pack(session.envelope, manager_pb2.Refused(problem=problem)))
            session.outbox.close(problem)

    def _count_refusal(self, commands: list[ManagerCommand]) -> None:
        """Counts a refused update once, however many ranks called it: one event refuses all of them together."""
        for command in commands:
            if isinstance(command, events.FinishCall) and command.problem and command.call.startswith("update-"):
                log.warning("update refused problem=%r", command.problem.message)
                self._metrics.refused()
                return

    def _pin(self) -> None:
        wanted = self._machine.blobs_in_use()
        for owner in self._pinned.keys() - wanted.keys():
            self._blobs.unpin(owner)
        for owner, refs in wanted.items():
            if self._pinned.get(owner) != refs:
                self._blobs.pin(owner, refs)
        self._pinned = wanted


def _changes_no_blobs(event: ManagerEvent) -> bool:
    """Heartbeats are nearly all events there are, so they are spared the look at what is pinned."""
    return isinstance(event, events.Message) and isinstance(
        event.body, (manager_pb2.Heartbeat, manager_pb2.ReplicaHeartbeat, manager_pb2.Progress)
    )
