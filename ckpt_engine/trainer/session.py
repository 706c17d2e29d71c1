"""The shell around a trainer's state machine: streams, timers and tasks on one asyncio loop.

It decides nothing: `TrainerMachine` does (core/machines). Everything here runs on the loop of the thread that
`Trainer` starts. Nothing here touches weights: sealing is handed to whoever made the session.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import grpc
import grpc.aio

from ckpt_engine.client import error_of, get_blob, manager_stub, open_channel, problem_of, put_blob
from ckpt_engine.core.machines.events import (
    CancelTimer,
    ClosePeer,
    Done,
    Key,
    Message,
    OpenStream,
    Peer,
    PeerLost,
    PublicationDecided,
    PutBlobs,
    Released,
    Run,
    SealResult,
    SealSource,
    Send,
    SessionEnded,
    SessionOpened,
    SetTimer,
    Start,
    Stop,
    Task,
    TimerFired,
    TrainerCommand,
    TrainerEvent,
)
from ckpt_engine.core.machines.trainer import TrainerMachine
from ckpt_engine.core.machines.wire import pack, unpack
from ckpt_engine.core.problems import CkptEngineError, aborted, deadline, internal, unavailable
from ckpt_engine.trace import span, trace
from ckpt_engine.v1 import manager_pb2, weights_pb2

ATOMS_KEPT = 4
"""Lists of atoms that are kept: the current one, and those of replicas that join late."""

Sealing: TypeAlias = tuple[weights_pb2.Digests, float, float]
"""Digests, the seconds of copying, the seconds of digesting."""

logger = logging.getLogger("ckpt_engine.trainer")


@dataclass
class _Stream:
    """One session stream. None in the outgoing queue ends it."""

    outgoing: asyncio.Queue[manager_pb2.TrainerMessage | None] = field(default_factory=asyncio.Queue)
    task: asyncio.Task[None] | None = None


class TrainerSession:
    """One rank's session with the manager at `address`, from `start` to `stop`.

    seal: performs a SealSource on whichever thread it belongs; awaited on the loop; raises CkptEngineError.
    notify: is told SessionOpened, SessionEnded, PublicationDecided and Released, on the loop.
    """

    def __init__(
        self,
        address: str,
        machine: TrainerMachine,
        seal: Callable[[SealSource, weights_pb2.Atoms], Awaitable[Sealing]],
        notify: Callable[[SessionOpened | SessionEnded | PublicationDecided | Released], None],
        goodbye_seconds: float,
    ) -> None:
        """goodbye_seconds: how long a stream may take to end once everything on it was sent."""
        self._goodbye_seconds = goodbye_seconds
        self._channel = open_channel(address)
        self._stub = manager_stub(self._channel)
        self._machine = machine
        self._seal = seal
        self._seal_epoch = 0
        self._failed = False
        self._notify = notify
        self._streams: dict[Peer, _Stream] = {}
        self._timers: dict[Key, asyncio.TimerHandle] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._known_atoms: dict[bytes, weights_pb2.Atoms] = {}

    def start(self) -> None:
        """Connects, and stays connected."""
        self.feed(Start())

    async def stop(self, reason: str) -> None:
        """Says goodbye and ends everything. Takes at most a few seconds."""
        self.feed(Stop(reason))
        for handle in self._timers.values():
            handle.cancel()
        ending = [stream.task for stream in self._streams.values() if stream.task is not None]
        for stream in self._streams.values():
            stream.outgoing.put_nowait(None)
        if ending:
            await asyncio.wait(ending, timeout=2 * self._goodbye_seconds)
        for task in (*ending, *self._tasks):
            task.cancel()
        await asyncio.gather(*ending, *self._tasks, return_exceptions=True)
        await self._channel.close(None)

    def feed(self, event: TrainerEvent) -> None:
        """Gives the machine an event and performs what it commands. A machine that raises goes on no more."""
        if self._failed:
            return
        try:
            commands = self._machine.handle(event, time.monotonic())
        except Exception as error:
            logger.exception("the trainer's machine failed")
            self._failed = True
            problem = internal(f"this trainer failed on {type(event).__name__}: {error!r}; its log says where").problem
            commands = [*(ClosePeer(peer) for peer in self._streams), SessionEnded(problem, final=True)]
        for command in commands:
            self._perform(command)

    async def update(
        self,
        request: manager_pb2.UpdateWeightsRequest,
        seconds: float,
        on_event: Callable[[manager_pb2.UpdateEvent], None],
    ) -> None:
        """Makes the UpdateWeights call and passes its events on. Raises CkptEngineError when it fails."""
        try:
            async for event in self._stub.UpdateWeights(request, timeout=seconds):
                on_event(event)
        except grpc.RpcError as error:
            raise error_of(error) from error

    async def status(self, seconds: float) -> manager_pb2.GetStatusResponse:
        """Asks the manager how things are. Raises CkptEngineError when it does not answer."""
        try:
            answer: manager_pb2.GetStatusResponse = await self._stub.GetStatus(
                manager_pb2.GetStatusRequest(), timeout=seconds
            )
        except grpc.RpcError as error:
            raise error_of(error) from error
        return answer

    async def sleep_or_wake(
        self, request: manager_pb2.SleepRequest | manager_pb2.WakeRequest, seconds: float
    ) -> list[manager_pb2.SleepWakeResult]:
        """Asks for replicas to sleep or wake. Raises CkptEngineError when that is refused or not answered."""
        try:
            if isinstance(request, manager_pb2.SleepRequest):
                return list((await self._stub.Sleep(request, timeout=seconds)).results)
            return list((await self._stub.Wake(request, timeout=seconds)).results)
        except grpc.RpcError as error:
            raise error_of(error) from error

    # ------------------------------------------------------------------------------------------ commands

    def _perform(self, command: TrainerCommand) -> None:
        match command:
            case Send(peer, body):
                trace("trainer.sends", type(body).__name__)
                if peer in self._streams:
                    self._streams[peer].outgoing.put_nowait(pack(manager_pb2.TrainerMessage, body))
            case OpenStream(peer):
                stream = self._streams[peer] = _Stream()
                stream.task = asyncio.ensure_future(self._carry(peer, stream))
            case ClosePeer(peer):
                if peer in self._streams:
                    self._streams[peer].outgoing.put_nowait(None)
            case SetTimer(key, seconds):
                self._cancel_timer(key)
                self._timers[key] = asyncio.get_running_loop().call_later(seconds, self._fire, key)
            case CancelTimer(key):
                self._cancel_timer(key)
            case Run(key, task):
                running = asyncio.ensure_future(self._run(key, task))
                self._tasks.add(running)
                running.add_done_callback(self._tasks.discard)
            case SessionOpened() | SessionEnded() | PublicationDecided() | Released():
                self._notify(command)

    def _fire(self, key: Key) -> None:
        del self._timers[key]
        self.feed(TimerFired(key))

    def _cancel_timer(self, key: Key) -> None:
        handle = self._timers.pop(key, None)
        if handle is not None:
            handle.cancel()

    # ------------------------------------------------------------------------------------------- streams

    async def _carry(self, peer: Peer, stream: _Stream) -> None:
        """Carries one session stream both ways until it ends, and tells the machine."""
        closing = False

        async def outgoing() -> AsyncIterator[manager_pb2.TrainerMessage]:
            nonlocal closing
            while (message := await stream.outgoing.get()) is not None:
                yield message
            closing = True
            asyncio.get_running_loop().call_later(self._goodbye_seconds, call.cancel)

        call: Any = self._stub.TrainerSession(outgoing())
        problem = unavailable("the manager ended the session").problem
        try:
            async for command in call:
                body = unpack(command)
                if body is not None and not closing:
                    self.feed(Message(peer, body))
        except grpc.RpcError as error:
            problem = problem_of(error)
        except asyncio.CancelledError:
            # Either this task is ended by `stop`, or the call was cancelled above: its end is all that matters.
            problem = unavailable("closed").problem
            if not closing:
                raise
        finally:
            given_up = closing
            call.cancel()
            # grpc leaves the iterator waiting when it was the other side that ended the call.
            stream.outgoing.put_nowait(None)
            del self._streams[peer]
        if not given_up:
            self.feed(PeerLost(peer, problem.message, problem.code))

    # --------------------------------------------------------------------------------------------- tasks

    async def _run(self, key: Key, task: Task) -> None:
        try:
            async with asyncio.timeout(task.seconds):
                with span("trainer.does", type(task).__name__):
                    result = await self._perform_task(task)
        except TimeoutError:
            late = deadline(f"{type(task).__name__} was not done within {task.seconds:.1f} s")
            self.feed(Done(key, problem=late.problem, answered=False))
        except CkptEngineError as error:
            self.feed(Done(key, problem=error.problem))
        except Exception as error:
            # Whatever it is, the update must end with a reason instead of a deadline.
            logger.exception("%s failed", type(task).__name__)
            self.feed(Done(key, problem=internal(f"{type(error).__name__}: {error}").problem))
        else:
            self.feed(Done(key, result))

    async def _perform_task(self, task: Task) -> object:
        if isinstance(task, PutBlobs):
            return tuple([await put_blob(self._stub, blob, task.seconds) for blob in task.blobs])
        assert isinstance(task, SealSource), "a trainer's machine asks for nothing else"
        self._seal_epoch = task.epoch
        atoms = await self._atoms(task)
        if task.epoch < self._seal_epoch:
            # Its atoms came late; sealing anew would change what the later update's readers read.
            raise aborted(f"sealing for epoch {task.epoch} was overtaken by epoch {self._seal_epoch}")
        digests, copy_seconds, digest_seconds = await self._seal(task, atoms)
        ref = await put_blob(self._stub, digests.SerializeToString(deterministic=True), task.seconds)
        return SealResult(ref, copy_seconds, digest_seconds)

    async def _atoms(self, task: SealSource) -> weights_pb2.Atoms:
        """What to digest; it is the same from update to update, as long as replicas and layouts are."""
        atoms = self._known_atoms.pop(task.atoms.digest, None)
        if atoms is None:
            atoms = weights_pb2.Atoms.FromString(await get_blob(self._stub, task.atoms, task.seconds))
        self._known_atoms[task.atoms.digest] = atoms
        while len(self._known_atoms) > ATOMS_KEPT:
            del self._known_atoms[next(iter(self._known_atoms))]
        return atoms
