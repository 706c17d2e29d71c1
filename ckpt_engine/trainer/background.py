"""A trainer's background thread: an asyncio loop with the session, and the messages between the two threads.

Methods are called on the trainer's thread unless a comment says `loop`. Nothing on the loop waits for the trainer's
thread except through futures with a deadline.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import Coroutine
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from ckpt_engine.core.deadlines import NOTICE_SECONDS, Deadlines
from ckpt_engine.core.problems import CkptEngineError, ErrorCode, deadline, internal, precondition, unavailable
from ckpt_engine.leader import names_several
from ckpt_engine.machines.events import (
    PublicationDecided,
    PublishTable,
    Released,
    RunPart,
    SealSource,
    SessionEnded,
    SessionOpened,
    Task,
    WithdrawTable,
)
from ckpt_engine.machines.trainer.machine import TrainerMachine
from ckpt_engine.options import Progress
from ckpt_engine.trainer.call import CallInFlight
from ckpt_engine.trainer.part import RankPart
from ckpt_engine.trainer.sealer import Sealer
from ckpt_engine.trainer.session import Notice, OfferingSession, SealFigures
from ckpt_engine.v1 import manager_pb2, weights_pb2

logger = logging.getLogger("ckpt_engine.trainer")

T = TypeVar("T")

OTHERS_ASK_SECONDS = 30.0
"""Seconds after which ranks other than 0 ask why an update has not begun."""

_TELL_SECONDS = 8.0
"""Seconds at the end of a collective's time for stopping, and for telling the others and the manager why."""


class LostLeaderError(CkptEngineError):
    """Raised for an update whose manager was lost, where several are named. version: that this rank has sealed for it;
    None: it has not sealed. sealed: under which fence; None: likewise."""

    def __init__(
        self, problem: weights_pb2.Problem, version: int | None, sealed: weights_pb2.Fence | None = None
    ) -> None:
        super().__init__(problem)
        self.version, self.sealed = version, sealed


class Background:
    """Runs one OfferingSession on a daemon thread, from `start` to `stop`."""

    def __init__(self, address: str, machine: TrainerMachine, sealer: Sealer, deadlines: Deadlines, rank: int) -> None:
        self._address = address
        self._machine = machine
        self._sealer = sealer
        self._deadlines = deadlines
        # Rank 0 asks what an update waits for; the others only later, since all would ask the same.
        self._ask_after = NOTICE_SECONDS if rank == 0 else OTHERS_ASK_SECONDS
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="ckpt-engine trainer", daemon=True)
        self._keeper = ThreadPoolExecutor(1, thread_name_prefix="ckpt-engine keep")
        self._session: OfferingSession | None = None
        self._call: CallInFlight | None = None
        self._part = RankPart()
        self._broken = b""  # as RankPart.broken said when this rank sealed last
        self._manifest: manager_pb2.BlobRef | None = None
        self._cluster = ""  # of the last session
        self._closing = False
        # Guarded by the condition: the machine's last notices.
        self._changed = threading.Condition()
        self._open = False
        self._sessions = 0  # that were opened so far
        self._lost: weights_pb2.Problem | None = None
        self._final = False
        self._decision: PublicationDecided | None = None
        self._decided_at = 0.0

    def start(self) -> None:
        """Starts the thread, which connects."""
        self._thread.start()
        self._wait(self._begin(), self._deadlines.stop)

    def stop(self, reason: str) -> None:
        """Says goodbye, frees what collectives hold and ends the thread. May be repeated."""
        try:
            self._part.close()
        finally:
            self._end(reason)

    def _end(self, reason: str) -> None:
        if not self._thread.is_alive():
            return
        self._closing = True
        try:
            assert self._session is not None
            self._wait(self._session.stop(reason), self._deadlines.stop)
        except TimeoutError:
            logger.warning("the session with the manager at %s did not end in time", self._address)
        finally:
            self._keeper.shutdown(wait=False, cancel_futures=True)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(self._deadlines.stop)

    def publish(self, table: bytes) -> None:
        """Publishes a table, now or once there is a session. Ends a collective of the former table."""
        self.require_running()
        self._part.close()
        self._wait(self._tell(PublishTable(table)), self._deadlines.stop)

    def withdraw(self) -> None:
        """Takes the table back, now or once there is a session. Ends a collective of it."""
        self.require_running()
        self._part.close()
        self._wait(self._tell(WithdrawTable()), self._deadlines.stop)

    def await_published(self, connect_seconds: float, gather_seconds: float, settle_seconds: float) -> None:
        """Returns once the session is open and the tables of all ranks were accepted, or after `settle_seconds` of
        waiting for other ranks, which may be publishing again as well: the manager then names the missing ranks.

        Raises UNAVAILABLE after `connect_seconds` without a session, DEADLINE_EXCEEDED after `gather_seconds` without
        an answer to a single rank's table, and the problem with which the manager refused the session, or for
        `settle_seconds` the tables.
        """
        self.require_running()
        started = time.monotonic()
        notice = started + NOTICE_SECONDS
        with self._changed:
            while True:
                now = time.monotonic()
                if self._final:
                    assert self._lost is not None
                    raise CkptEngineError(self._lost)
                if self._open and self._decision is not None:
                    if self._decision.problem is None:
                        return
                    remaining = self._decided_at + settle_seconds - now
                    if remaining <= 0:
                        raise CkptEngineError(self._decision.problem)
                elif self._open and settle_seconds > 0:
                    remaining = started + settle_seconds - now
                    if remaining <= 0:
                        return
                else:
                    limit = gather_seconds if self._open else connect_seconds
                    remaining = started + limit - now
                    if remaining <= 0:
                        raise self._timeout_error(limit)
                    if now >= notice:
                        # The reason was logged when it became known.
                        why = self._missing_step() if self._lost is None else "there is still no session"
                        logger.warning("%s; waiting up to %.0f s more", why, remaining)
                        notice = math.inf
                self._changed.wait(min(remaining, max(0.0, notice - now)))

    def update(
        self, request: manager_pb2.UpdateWeightsRequest, seconds: float, on_progress: Progress | None
    ) -> manager_pb2.UpdateReport:
        """Makes the UpdateWeights call and seals on this thread when asked to. Raises as `CallInFlight.serve`;
        LostLeaderError if the session ended with the call and another manager may lead."""
        self.require_running()
        assert self._session is not None
        self._call = call = CallInFlight()
        with self._changed:
            session = self._sessions if self._open else -1
        rpc = asyncio.run_coroutine_threadsafe(self._session.update(request, seconds, call.event), self._loop)
        waiting_notice = asyncio.run_coroutine_threadsafe(self._tell_what_it_waits_for(call), self._loop)
        try:
            rpc.add_done_callback(call.finish)
            return call.serve(on_progress, seconds)
        except CkptEngineError as error:
            if error.code == ErrorCode.UNAVAILABLE and names_several(self._address) and self._ended(session):
                sealed = None if call.version is None else weights_pb2.Fence(cluster=call.cluster, epoch=call.sealed)
                raise LostLeaderError(error.problem, call.version, sealed) from None
            raise
        finally:
            self._call = None
            rpc.cancel()
            waiting_notice.cancel()
            call.close()

    def _ended(self, session: int) -> bool:
        """Whether a session has ended, or ends within NOTICE_SECONDS: a call may be told so first."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._open or self._sessions != session, NOTICE_SECONDS)

    def put(self, data: bytes) -> manager_pb2.BlobRef:
        """Stores a blob with the manager. Raises CkptEngineError; LostLeaderError if another manager may lead."""
        self.require_running()
        assert self._session is not None
        seconds = self._deadlines.blobs
        try:
            return self._wait(self._session.put(data, seconds), 2 * seconds)
        except CkptEngineError as error:
            if error.code == ErrorCode.UNAVAILABLE and names_several(self._address):
                raise LostLeaderError(error.problem, None) from None
            raise

    def wait_for_update(self, request: manager_pb2.WaitForUpdateRequest) -> manager_pb2.UpdateReport:
        """Returns the report of an update once it has ended. Any thread may call it. Raises CkptEngineError; an
        interrupt ends the call."""
        self.require_running()
        assert self._session is not None
        grace = self._deadlines.call_grace
        question = self._session.wait_for_update(request, grace)
        answer = asyncio.run_coroutine_threadsafe(question, self._loop)
        try:
            return answer.result(request.timeout_seconds + 2 * grace)
        except (TimeoutError, CancelledError) as error:
            raise unavailable(f"{self._missing_step()}, which was asked how an update ended") from error
        finally:
            answer.cancel()

    def status(self) -> manager_pb2.GetStatusResponse:
        """Asks the manager for its status. Raises CkptEngineError when it does not answer."""
        self.require_running()
        assert self._session is not None
        return self._wait(self._session.status(self._deadlines.status), 2 * self._deadlines.status)

    def sleep_or_wake(
        self, request: manager_pb2.SleepRequest | manager_pb2.WakeRequest, seconds: float
    ) -> list[manager_pb2.SleepWakeResult]:
        """Has replicas sleep or wake; returns a result for each. Raises CkptEngineError if the call fails."""
        self.require_running()
        assert self._session is not None
        return self._wait(self._session.sleep_or_wake(request, seconds), seconds + self._deadlines.status)

    # ---------------------------------------------------------------------------------------------- loop

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()

    async def _begin(self) -> None:
        self._session = OfferingSession(
            self._address,
            self._machine,
            self._seal,
            self._take_notice,
            self._deadlines.goodbye,
            self._take_part,
            broken=lambda: self._broken,
        )
        self._session.start()

    async def _tell_what_it_waits_for(self, call: CallInFlight) -> None:
        """Logs once what the update waits for, if it has not begun by then."""
        await asyncio.sleep(self._ask_after)
        if call.heard:
            return
        assert self._session is not None
        try:
            waits = (await self._session.status(self._deadlines.status)).phase
        except CkptEngineError as error:
            waits = error.problem.message
        if not call.heard:
            logger.warning("the update has not begun yet: %s", waits)

    async def _tell(self, change: PublishTable | WithdrawTable) -> None:
        assert self._session is not None
        with self._changed:
            self._decision = None
        self._session.feed(change)

    async def _seal(self, task: SealSource, atoms: weights_pb2.Atoms) -> SealFigures:
        if task.keep:
            self._broken = b""
            return await self._loop.run_in_executor(self._keeper, self._sealer.seal, atoms, True)
        call = self._call
        if call is None:
            raise precondition("this rank does not wait in update_weights, so its weights may be changing")
        call.sealed, call.cluster, call.version = task.epoch, self._cluster, task.version

        def seal() -> SealFigures:
            self._broken = self._part.broken()
            return self._sealer.seal(atoms, False)

        return await call.have("sealing", seal)

    async def _take_part(self, task: Task) -> object:
        """Takes part in a collective, the only further task of a trainer rank."""
        assert isinstance(task, RunPart), task
        # Ends some seconds before the task, so that the answer still names the members that failed.
        seconds = task.seconds - min(_TELL_SECONDS, task.seconds / 4)
        stop_at = time.monotonic() + seconds
        call, meeting = self._call, None
        try:
            meeting = self._part.begin(task)
            if call is None or call.sealed != task.sealed:
                raise precondition(
                    "this rank has left the call in which it sealed, so its weights may have changed: update again"
                )
            assert self._session is not None
            if self._manifest is None:
                raise precondition("this rank does not know the manifest of what it published")
            refs = [task.collective.plan, self._manifest]
            plan, manifest = await self._session.fetch(refs, min(seconds, self._deadlines.blobs))
            held = partial(self._sealer.held, weights_pb2.Manifest.FromString(manifest))
            take = partial(self._part.take, task, plan, held, meeting, min(stop_at, call.end))
            return await call.have("sending in a collective", take)
        except Exception as error:
            if not isinstance(error, CkptEngineError):
                logger.exception("a part in a collective failed unexpectedly")
                error = internal(f"{type(error).__name__}: {error}")
            return await self._loop.run_in_executor(None, self._part.refuse, task, error, meeting)

    def _take_notice(self, notice: Notice) -> None:
        with self._changed:
            match notice:
                case SessionOpened(cluster):
                    self._open, self._lost, self._cluster = True, None, cluster
                    self._sessions += 1
                    logger.info("connected to the manager at %s (cluster %s)", self._address, cluster)
                case SessionEnded(problem, final, patience=patience):
                    # A final refusal of the first session is raised by the call that needs it.
                    if not self._closing and (self._open or not (final or self._lost)):
                        outlook = "for good" if final else "trying again"
                        if patience:
                            outlook = f"waiting up to {patience:.0f} s, in case that is a process that has died"
                        logger.warning(
                            "no session with the manager at %s: %s; %s", self._address, problem.message, outlook
                        )
                    self._open, self._lost, self._final, self._decision = False, problem, final, None
                case PublicationDecided():
                    self._manifest = notice.manifest or self._manifest
                    self._decision, self._decided_at = notice, time.monotonic()
                case Released(epoch):
                    logger.debug("epoch %d is released", epoch)
            self._changed.notify_all()

    # ----------------------------------------------------------------------------------- trainer's thread

    def _timeout_error(self, seconds: float) -> CkptEngineError:
        if self._open:
            return deadline(f"the manager did not take this rank's table within {seconds:.0f} s")
        return unavailable(f"{self._missing_step()}; {seconds:.0f} s were waited for it")

    def _missing_step(self) -> str:
        """What is missing before an update can begin, as a sentence."""
        if self._open:
            return "the manager has not taken this rank's table yet: other ranks may not have published"
        why = f": {self._lost.message}" if self._lost is not None else ""
        return f"no session with a manager at {self._address}{why}"

    def require_running(self) -> None:
        """Raises FAILED_PRECONDITION after `stop`."""
        if not self._thread.is_alive():
            raise precondition("this Trainer was closed: make another one")

    def _wait(self, work: Coroutine[Any, Any, T], seconds: float) -> T:
        future: Future[T] = asyncio.run_coroutine_threadsafe(work, self._loop)
        return future.result(seconds)
