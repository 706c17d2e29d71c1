"""A relay as a process: the shell around its machine.

The session and its machine live on one asyncio loop. One thread counts and fills, one task after the other. Another one
digests for workers that need finer pieces, so that they do not wait for a filling. Decides nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from ckpt_engine.core.problems import CkptEngineError, deadline
from ckpt_engine.core.rates import Rate
from ckpt_engine.core.relay_layout import SLOTS
from ckpt_engine.core.sizes import in_words
from ckpt_engine.digest.host import warm_up
from ckpt_engine.digest.placed import warm_up_search
from ckpt_engine.host.facts import this_host
from ckpt_engine.host.relay_directory import made_directory, relay_directory
from ckpt_engine.host.room import memory_room
from ckpt_engine.machines.events import (
    ChunksPassed,
    FillingProgress,
    PublicationDecided,
    SealSource,
    SessionEnded,
    SessionOpened,
    StopFilling,
    Task,
)
from ckpt_engine.machines.relay.member import RelayMachine
from ckpt_engine.machines.relay.tasks import CountSlot, FillSlot, LetGoOf, SlotFilled
from ckpt_engine.relay import narration
from ckpt_engine.relay.alone import alone
from ckpt_engine.relay.archive import Archive
from ckpt_engine.relay.archiving import Archiving
from ckpt_engine.relay.fill import Progress
from ckpt_engine.relay.metrics import RelayState, of_relay
from ckpt_engine.relay.settings import RelaySettings
from ckpt_engine.relay.slots import Slots, SlotVersion
from ckpt_engine.relay.work import RelayWork
from ckpt_engine.scraping import scraped_at
from ckpt_engine.trainer.session import Notice, OfferingSession, SealFigures
from ckpt_engine.transport.archive.files import ArchiveTransport
from ckpt_engine.transport.archive.kind import NAME as ARCHIVE
from ckpt_engine.transport.registry import all_transports
from ckpt_engine.v1 import manager_pb2, weights_pb2

log = logging.getLogger("ckpt_engine.relay")

PROGRESS_SECONDS = 0.5
"""Least seconds between two reports of a filling's progress."""

LOOKERS_SECONDS = 0.5
"""How long agents that look for a relay may have the directory's lock."""


async def run_relay(settings: RelaySettings, stop: asyncio.Event) -> None:
    """Runs one relay until `stop` is set: then it says goodbye and takes back what it lends. Leaves nothing behind.

    Raises CkptEngineError: TakenError; the directory or the memory is not available; the manager refuses it for good;
    its machine failed (INTERNAL)."""
    state = RelayState(settings.called)
    folder = made_directory(bool(settings.users))
    with alone(folder, LOOKERS_SECONDS), scraped_at(settings.metrics, lambda: of_relay(state)) as scraped:
        if scraped:
            log.info("metrics at http://%s/metrics", scraped)
        transports = all_transports()
        if settings.archive is not None:
            transports[ARCHIVE] = ArchiveTransport()
        slots = Slots(
            settings.called,
            this_host(settings.advertise),
            settings.memory,
            transports,
            settings.slot_grace,
            settings.users,
            settings.network(),
            settings.deltas,
        )
        archive = None
        try:
            if settings.archive is not None:
                archive = await asyncio.to_thread(Archive, settings.archive, settings.keep, settings.called, slots.host)
            await asyncio.to_thread(warm_up_search)
            if slow := await asyncio.to_thread(warm_up):  # the first filling must not wait for a compiler
                log.warning(
                    "%s: what is brought is digested by numpy, at a tenth of the speed; pip install numba", slow
                )
            relay = _RunningRelay(settings, slots, tuple(transports), state, archive)
            try:
                problem = await relay.until(stop)
            finally:
                await relay.close("it was asked to stop" if stop.is_set() else "it cannot go on")
        finally:
            if archive is not None:
                await asyncio.to_thread(archive.close)
            await asyncio.to_thread(slots.close)
        if problem is not None:
            raise CkptEngineError(problem)
        log.info("relay %s has ended, and nothing of it is left", settings.called)


class _RunningRelay:
    """One relay's session and threads. Made on the loop. slots: closed by the caller, after this. reads: names of
    transports with which it can read. state: kept up to date for its metrics. archive: closed by the caller, too."""

    def __init__(
        self, settings: RelaySettings, slots: Slots, reads: Sequence[str], state: RelayState, archive: Archive | None
    ) -> None:
        self._settings = settings
        self._slots = slots
        self._work = RelayWork(slots, self._fetch, self._report_rate)
        self._loop = asyncio.get_running_loop()
        self._worker = ThreadPoolExecutor(1, "ckpt-engine fill")
        self._digester = ThreadPoolExecutor(1, "ckpt-engine digest")
        self._final_problem: asyncio.Future[weights_pb2.Problem] = self._loop.create_future()
        self._closing = False
        self._disconnect_reason = ""  # why there is no session, as it was logged last
        self._state = state
        self._blobs: dict[bytes, bytes] = {}
        memory = SLOTS * slots.slot_bytes
        room = memory_room()
        log.info(
            "relay %s lends %s of memory (%d slots of %s) at %s; %s",
            settings.called,
            in_words(memory),
            SLOTS,
            in_words(slots.slot_bytes),
            relay_directory(),
            slots.pages,
        )
        if memory > room:
            log.warning(
                "%s of memory may be taken, and this host, or the cgroup of this process, has %s left: a version that "
                "needs more than that will be refused",
                in_words(memory),
                in_words(room),
            )
        self._filling = manager_pb2.Filling(
            memory_bytes=memory,
            everything=settings.everything,
            reads=reads,
            lends=slots.lends,
            chunks=slots.chunks,
        )
        machine = RelayMachine(settings.called, uuid.uuid4().hex, slots.host, self._filling, settings.deadlines)
        self._session = OfferingSession(
            settings.manager, machine, self._seal, self._notify, settings.deadlines.goodbye, self._perform, "relay"
        )
        self._archiving = None
        if archive is not None:
            self._archiving = Archiving(archive, settings.manager, settings.called, slots.host, settings.deadlines)

    async def until(self, stop: asyncio.Event) -> weights_pb2.Problem | None:
        """Serves until `stop` is set (None), or until it cannot go on: then why."""
        stopping = asyncio.ensure_future(stop.wait())
        try:
            self._session.start()
            if self._archiving is not None:
                self._archiving.start()
            await asyncio.wait((stopping, self._final_problem), return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
        return None if stop.is_set() else self._final_problem.result()

    async def close(self, reason: str) -> None:
        """Says goodbye and stops a filling."""
        self._closing = True
        if self._archiving is not None:
            await self._archiving.close(reason)
        await self._session.stop(reason)
        self._work.stop()
        for pool in (self._worker, self._digester):
            pool.shutdown(wait=False, cancel_futures=True)

    # -- the machine's tasks, on the loop

    async def _perform(self, task: Task) -> object:
        assert isinstance(task, CountSlot | FillSlot | LetGoOf), "a relay's machine asks for nothing else"
        if fills := isinstance(task, FillSlot):
            self._work.begin()
        self._state.filling = fills or self._state.filling
        try:
            done = await self._loop.run_in_executor(self._worker, self._work.perform, task, self._progress(task))
        except CkptEngineError as error:
            log.warning("%s", narration.failed(task, error.problem))
            overtaken = error.problem.code == weights_pb2.Problem.CODE_ABORTED
            if self._archiving is not None and isinstance(task, CountSlot | FillSlot) and not overtaken:
                self._archiving.doubt(task.command.identity)
            self._state.failed += isinstance(task, CountSlot | FillSlot) and not overtaken
            raise
        finally:
            self._state.filling = self._state.filling and not fills
        if isinstance(done, SlotFilled) and isinstance(task, FillSlot):
            self._state.filled(done.answer, task.slot, task.more)
            self._archive(self._slots.held(task.slot))
        self._filling.gpu_context_bytes = self._slots.gpu_context_bytes
        if line := narration.done(task, done):
            log.info("%s", line)
        return done

    def _archive(self, held: SlotVersion | None) -> None:
        if self._archiving is None or held is None:
            return
        if held.filled.faults or held.filled.missing:
            self._archiving.doubt(held.identity)
        self._archiving.take(held)

    async def _seal(self, task: SealSource, atoms: weights_pb2.Atoms) -> SealFigures:
        began = time.monotonic()
        values = await self._loop.run_in_executor(self._digester, self._slots.digest, atoms, task.version)
        return SealFigures(weights_pb2.Digests(values=values), 0.0, time.monotonic() - began)

    def _notify(self, notice: Notice) -> None:
        match notice:
            case SessionOpened(cluster):
                self._disconnect_reason, self._state.connected = "", True
                log.info("connected to the manager at %s (cluster %s)", self._settings.manager, cluster[:8])
            case SessionEnded():
                self._state.connected = False
                if notice.final and not self._final_problem.done():
                    self._final_problem.set_result(notice.problem)
                elif notice.problem.message != self._disconnect_reason and not self._closing:
                    self._disconnect_reason = notice.problem.message
                    log.warning("%s", narration.lost(self._settings.manager, notice))
            case PublicationDecided(_, problem) if problem is not None:
                log.warning(
                    "the manager did not accept what this relay holds, so nothing reads it here: %s", problem.message
                )
            case StopFilling(keep):
                self._work.stop(keep)

    # -- on the thread that fills

    def _fetch(self, refs: Sequence[manager_pb2.BlobRef], seconds: float) -> list[bytes]:
        """Fetches blobs from the manager, but not those that the last version had too."""
        by_digest = {ref.digest: ref for ref in refs}
        new = [ref for digest, ref in by_digest.items() if digest not in self._blobs]
        fetching = asyncio.run_coroutine_threadsafe(self._session.fetch(new, seconds), self._loop)
        try:
            blobs = fetching.result(seconds)
        except TimeoutError:
            raise deadline(f"{len(new)} blobs did not come from the manager within {seconds:.3g} s") from None
        finally:
            fetching.cancel()
        found = dict(zip((ref.digest for ref in new), blobs, strict=True))
        self._blobs = {digest: found[digest] if digest in found else self._blobs[digest] for digest in by_digest}
        return [self._blobs[ref.digest] for ref in refs]

    def _report_rate(self, command: manager_pb2.FillRelay, rate: Rate) -> None:
        """Reports a rate, from the thread of a reader; does nothing once the loop has ended."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._session.feed, ChunksPassed(command.fence, command.attempt, rate))

    def _progress(self, task: Task) -> Progress:
        last_report = time.monotonic()

        def progress(done: int, total: int) -> None:
            nonlocal last_report
            if isinstance(task, FillSlot) and time.monotonic() - last_report >= PROGRESS_SECONDS:
                last_report = time.monotonic()
                event = FillingProgress(task.command.fence, done, total)
                self._loop.call_soon_threadsafe(self._session.feed, event)

        return progress
