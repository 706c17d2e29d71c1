"""The shell around the machine of a member that offers weights: streams, timers and tasks on one asyncio loop.

It decides nothing: the machine does (machines/offering.py), which also says what kind of member this is.
Everything here runs on the loop of the thread that owns it. Nothing here touches weights: the owner of the session
seals, through a callback.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import grpc
import grpc.aio

from ckpt_engine.channel import ManagerStub, error_of, get_blob, open_channel, put_blob
from ckpt_engine.core.problems import CkptEngineError, aborted, precondition
from ckpt_engine.machines.events import (
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
    SealResult,
    SealSource,
    Send,
    SessionEnded,
    SessionOpened,
    Start,
    Stop,
    StopFilling,
    Task,
    TrainerCommand,
    TrainerEvent,
)
from ckpt_engine.machines.offering import OfferingMachine
from ckpt_engine.shell.loop import Loop
from ckpt_engine.shell.stream import MemberStream
from ckpt_engine.shell.tasks import carry_out
from ckpt_engine.trace import trace
from ckpt_engine.v1 import manager_pb2, weights_pb2

ATOMS_KEPT = 4
"""Lists of atoms to keep: the current one, and those of replicas that join late."""

WAIT_AGAIN = 0.5
"""Seconds before an absent manager is asked again how an update ended."""

SHORTEST_WAIT = 0.001


class SealFigures(NamedTuple):
    """The results of a seal."""

    digests: weights_pb2.Digests
    copy_seconds: float
    digest_seconds: float
    not_finite: Sequence[str] = ()  # tensors that hold NaN or infinity


Notice: TypeAlias = SessionOpened | SessionEnded | PublicationDecided | Released | StopFilling
"""News for the owner of a session. Only relays get StopFilling."""


class OfferingSession:
    """One member's session with the manager at `address`, from `start` to `stop`."""

    def __init__(
        self,
        address: str,
        machine: OfferingMachine,
        seal: Callable[[SealSource, weights_pb2.Atoms], Awaitable[SealFigures]],
        notify: Callable[[Notice], None],
        goodbye_seconds: float,
        further: Callable[[Task], Awaitable[object]] | None = None,
        role: str = "trainer",
        broken: Callable[[], bytes] = bytes,
    ) -> None:
        """seal: performs a SealSource on the thread where it belongs; awaited on the loop; raises CkptEngineError.
        notify: called on the loop with each Notice. goodbye_seconds: how long a stream may take to end once everything
        on it was sent. further: performs tasks that only this kind of member has; awaited as `seal`. role: the member's
        name in the log. broken: called after each seal for the SealResult's broken communicator."""
        self._goodbye_seconds = goodbye_seconds
        self._address = address
        self._channel = open_channel(address)
        self._stub = ManagerStub(self._channel)
        self._kind = machine.kind
        self._role = role
        self._loop = Loop(role, machine, self._perform, self._run, self._fail)
        self._seal = seal
        self._further = further
        self._broken = broken
        self._seal_epoch = 0
        self._notify = notify
        self._streams: dict[Peer, MemberStream] = {}
        self._updates: set[Any] = set()
        self._known_atoms: dict[bytes, weights_pb2.Atoms] = {}

    def start(self) -> None:
        """Connects, and stays connected."""
        self.feed(Start())

    async def stop(self, reason: str) -> None:
        """Says goodbye and ends everything. Takes at most a few seconds."""
        streams = tuple(self._streams.values())
        self.feed(Stop(reason))
        await asyncio.gather(*(stream.close() for stream in streams))
        await self._loop.stop(0.0)
        await self._channel.close(None)

    def feed(self, event: TrainerEvent) -> None:
        """Gives the machine an event and performs its commands. A machine that has raised gets no further event."""
        self._loop.feed(event)

    def _fail(self, _event: object, problem: weights_pb2.Problem) -> None:
        """Ends the session for good, and every update call that waits for the manager."""
        for peer in tuple(self._streams):
            self._perform(ClosePeer(peer))
        for call in tuple(self._updates):
            call.cancel()
        self._notify(SessionEnded(problem, final=True))

    async def update(
        self,
        request: manager_pb2.UpdateWeightsRequest,
        seconds: float,
        on_event: Callable[[manager_pb2.UpdateEvent], None],
    ) -> None:
        """Makes the UpdateWeights call and passes its events on. Raises CkptEngineError if call or session fails."""
        if self._loop.problem is not None:
            raise CkptEngineError(self._loop.problem)
        call: Any = self._stub.UpdateWeights(request, timeout=seconds)
        self._updates.add(call)
        try:
            async for event in call:
                on_event(event)
        except grpc.RpcError as error:
            raise error_of(error, self._address) from None
        except asyncio.CancelledError:
            if self._loop.problem is not None:
                raise CkptEngineError(self._loop.problem) from None
            raise
        finally:
            self._updates.discard(call)
            call.cancel()

    async def wait_for_update(
        self, request: manager_pb2.WaitForUpdateRequest, grace: float
    ) -> manager_pb2.UpdateReport:
        """Returns the report of an update once it has ended. Asks again while no manager answers, for as long as the
        request says. grace: seconds for the answer itself.

        Raises CkptEngineError: what the manager answered; UNAVAILABLE if none did.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + request.timeout_seconds
        while True:
            remaining = end - loop.time()
            request.timeout_seconds = max(remaining, SHORTEST_WAIT)
            try:
                answer: manager_pb2.UpdateReport = await self._stub.WaitForUpdate(
                    request, timeout=request.timeout_seconds + grace
                )
                return answer
            except grpc.RpcError as error:
                refusal = error_of(error, self._address)
                if refusal.problem.code != weights_pb2.Problem.CODE_UNAVAILABLE or remaining <= WAIT_AGAIN:
                    raise refusal from None
            await asyncio.sleep(WAIT_AGAIN)

    async def status(self, seconds: float) -> manager_pb2.GetStatusResponse:
        """Asks the manager for its status. Raises CkptEngineError when it does not answer."""
        try:
            answer: manager_pb2.GetStatusResponse = await self._stub.GetStatus(
                manager_pb2.GetStatusRequest(), timeout=seconds
            )
        except grpc.RpcError as error:
            raise error_of(error, self._address) from None
        return answer

    async def sleep_or_wake(
        self, request: manager_pb2.SleepRequest | manager_pb2.WakeRequest, seconds: float
    ) -> list[manager_pb2.SleepWakeResult]:
        """Has replicas sleep or wake. Raises CkptEngineError when that is refused or not answered."""
        try:
            if isinstance(request, manager_pb2.SleepRequest):
                return list((await self._stub.Sleep(request, timeout=seconds)).results)
            return list((await self._stub.Wake(request, timeout=seconds)).results)
        except grpc.RpcError as error:
            raise error_of(error, self._address) from None

    # ------------------------------------------------------------------------------------------ commands

    def _perform(self, command: TrainerCommand) -> None:
        match command:
            case Send(peer, body):
                trace(f"{self._role}.sends", type(body).__name__)
                if peer in self._streams:
                    self._streams[peer].send(body)
            case OpenStream(peer):
                self._streams[peer] = MemberStream(
                    getattr(self._stub, self._kind.session),
                    self._kind.message,
                    lambda body: self.feed(Message(peer, body)),
                    lambda problem: self._lost(peer, problem),
                    self._goodbye_seconds,
                )
            case ClosePeer(peer):
                if peer in self._streams:
                    self._loop.start(self._streams.pop(peer).close())
            case SessionOpened() | SessionEnded() | PublicationDecided() | Released() | StopFilling():
                self._notify(command)

    def _lost(self, peer: Peer, problem: weights_pb2.Problem) -> None:
        self._streams.pop(peer, None)
        self.feed(PeerLost(peer, problem.message, problem.code))

    # --------------------------------------------------------------------------------------------- tasks

    async def _run(self, key: Key, task: Task) -> Done:
        return await carry_out(self._role, key, task, self._perform_task)

    async def _perform_task(self, task: Task) -> object:
        if isinstance(task, PutBlobs):
            return tuple(await asyncio.gather(*(put_blob(self._stub, blob, task.seconds) for blob in task.blobs)))
        if not isinstance(task, SealSource):
            if self._further is None:
                raise precondition(f"a {self._role} does not perform {type(task).__name__}")
            return await self._further(task)
        self._seal_epoch = task.epoch
        atoms = await self._atoms(task)
        if task.epoch < self._seal_epoch:
            # Its atoms came late; sealing again would change what the later update's readers read.
            raise aborted(f"sealing for epoch {task.epoch} was overtaken by epoch {self._seal_epoch}")
        figures = await self._seal(task, atoms)
        digest_time = time.monotonic()
        ref = await put_blob(self._stub, figures.digests.SerializeToString(deterministic=True), task.seconds, ask=False)
        return SealResult(
            ref, figures.copy_seconds, figures.digest_seconds, self._broken(), digest_time, tuple(figures.not_finite)
        )

    async def put(self, data: bytes, seconds: float) -> manager_pb2.BlobRef:
        """Stores a blob with the manager. Raises CkptEngineError."""
        return await put_blob(self._stub, data, seconds)

    async def fetch(self, refs: Sequence[manager_pb2.BlobRef], seconds: float) -> list[bytes]:
        """Blobs that the manager has, in order. Raises CkptEngineError."""
        return [await get_blob(self._stub, ref, seconds) for ref in refs]

    async def _atoms(self, task: SealSource) -> weights_pb2.Atoms:
        """The atoms to digest: the same from update to update, as long as replicas and layouts are."""
        atoms = self._known_atoms.pop(task.atoms.digest, None)
        if atoms is None:
            atoms = weights_pb2.Atoms.FromString(await get_blob(self._stub, task.atoms, task.seconds))
        self._known_atoms[task.atoms.digest] = atoms
        while len(self._known_atoms) > ATOMS_KEPT:
            del self._known_atoms[next(iter(self._known_atoms))]
        return atoms
