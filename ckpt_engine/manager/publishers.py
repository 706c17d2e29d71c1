"""Updates from directories: one publishing process a lineage, started when needed and kept until others need its place.

The manager reads no checkpoint file itself: if a file is truncated while it is mapped, its reader is killed. The
processes dial a socket of the manager's own, in a directory that only its user may enter.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import fields
from pathlib import Path

from ckpt_engine.core.arguments import checked_version
from ckpt_engine.core.deadlines import ENVIRONMENT, Deadlines, check_seconds
from ckpt_engine.core.names import LINEAGE_BYTES, check_line
from ckpt_engine.core.problems import CkptEngineError, deadline, internal, precondition, unavailable
from ckpt_engine.host.modules import module_command, module_environment
from ckpt_engine.manager.errors import stopping
from ckpt_engine.publishing.frames import EVENT, HEAD, LINEAGE, REQUEST, encode_frame
from ckpt_engine.security.client import AUTHORITY, CERTIFICATE, KEY, SERVER_NAME, TOKEN_FILE
from ckpt_engine.v1 import manager_pb2, weights_pb2

MOST_KEPT = 4
"""Processes, each of which has torch loaded. The least recently used one gives way to another lineage's."""

ENDED_SECONDS = 0.5
"""How long to wait for the exit status of a process with a broken pipe, before it is killed."""

_MEMBERS = frozenset((AUTHORITY, CERTIFICATE, KEY, SERVER_NAME, TOKEN_FILE))
"""Variables with which members reach a remote manager."""

Request = manager_pb2.UpdateFromDirectoryRequest
EventQueue = asyncio.Queue[manager_pb2.UpdateEvent | CkptEngineError]

log = logging.getLogger("ckpt_engine.manager")


def lineage_of(request: Request) -> str:
    """The lineage of a call's versions."""
    return request.lineage or LINEAGE


class Publishers:
    """Runs the processes that publish directories, one a lineage. Used on the manager's event loop thread."""

    def __init__(self, roots: Sequence[Path], deadlines: Deadlines) -> None:
        """roots: directories below which anything may be published; none: nothing may."""
        self._roots, self._deadlines = roots, deadlines
        self._publishers: dict[str, _LineagePublisher] = {}
        self._running: set[asyncio.Task[None]] = set()
        self._ending: set[asyncio.Task[None]] = set()
        self._stopping = False
        self._own: tempfile.TemporaryDirectory[str] | None = None
        if roots:
            self._own = tempfile.TemporaryDirectory(prefix="ckpt-engine-", ignore_cleanup_errors=True)
            if len(self._own.name) > 80:  # the name of a socket has 107 bytes
                self._own.cleanup()
                self._own = tempfile.TemporaryDirectory(prefix="ckpt-engine-", dir="/tmp", ignore_cleanup_errors=True)

    @property
    def address(self) -> str:
        """Where the processes dial the manager; empty: no directory may be published."""
        return "" if self._own is None else f"unix:{self._own.name}/manager"

    async def update(self, request: Request) -> AsyncIterator[manager_pb2.UpdateEvent]:
        """Runs an update and yields its events, the report last. It continues if the caller stops listening.

        Raises CkptEngineError: FAILED_PRECONDITION if there are no roots, UNAVAILABLE if the process died or
        the manager is stopping, DEADLINE_EXCEEDED, and the problem with which the process refused the update.
        """
        if self._stopping:
            raise stopping()
        lineage, seconds = lineage_of(request), self._seconds(request)
        if not self._roots:
            raise precondition(
                "this manager publishes no directories: start it with --allow-directory ROOT, or publish from where "
                "the files are: `ckpt-engine update --checkpoint DIR`"
            )
        check_line("a lineage's name", lineage, LINEAGE_BYTES)
        if request.HasField("version"):
            checked_version(request.version)
        publisher = self._publisher(lineage)
        events: EventQueue = asyncio.Queue()
        running = asyncio.ensure_future(self._run(publisher, request, seconds, events))
        self._running.add(running)
        running.add_done_callback(lambda task: self._end_run(task, publisher))
        while True:
            event = await events.get()
            if isinstance(event, CkptEngineError):
                raise event
            yield event
            if event.HasField("report"):
                return

    def refuse(self) -> None:
        """Refuses updates with UNAVAILABLE from now on; running ones continue."""
        self._stopping = True

    async def stop(self) -> None:
        """Ends running updates and the processes. No call may follow."""
        self.refuse()
        for running in tuple(self._running):
            running.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        ends = await asyncio.gather(
            *(each.end() for each in self._publishers.values()), *self._ending, return_exceptions=True
        )
        for error in (each for each in ends if isinstance(each, BaseException)):
            log.error("a process for directories did not end: %r", error)
        self._publishers.clear()
        if self._own is not None:
            self._own.cleanup()

    def _seconds(self, request: Request) -> float:
        if request.options.timeout_seconds:
            check_seconds("a timeout", request.options.timeout_seconds)
        return request.options.timeout_seconds or self._deadlines.update

    def _publisher(self, lineage: str) -> _LineagePublisher:
        """The process of a lineage, which becomes the most recently used one, with one user more."""
        found = self._publishers.pop(lineage, None)
        if found is None:
            if len(self._publishers) >= MOST_KEPT:
                idle = next((name for name, each in self._publishers.items() if not each.users), None)
                if idle is None:
                    raise unavailable(f"directories of {MOST_KEPT} lineages are published now: try again later")
                ending = asyncio.ensure_future(self._publishers.pop(idle).end())
                self._ending.add(ending)
                ending.add_done_callback(self._end_process)
            found = _LineagePublisher(self.address, lineage, self._roots, self._deadlines)
        self._publishers[lineage] = found
        found.users += 1
        return found

    def _end_run(self, running: asyncio.Task[None], publisher: _LineagePublisher) -> None:
        self._running.discard(running)
        publisher.users -= 1

    def _end_process(self, ending: asyncio.Task[None]) -> None:
        self._ending.discard(ending)
        if not ending.cancelled() and (error := ending.exception()) is not None:
            log.error("a process for directories did not end: %r", error)

    async def _run(self, publisher: _LineagePublisher, request: Request, seconds: float, events: EventQueue) -> None:
        try:
            await publisher.update(request, seconds, events)
        except CkptEngineError as error:
            log.warning("no update from directory=%r problem=%r", request.directory, error.problem.message)
            events.put_nowait(error)
        except asyncio.CancelledError:
            events.put_nowait(stopping())
            raise
        except Exception as error:
            log.exception("an update from a directory failed")
            events.put_nowait(internal(f"the update from a directory failed: {type(error).__name__}: {error}"))


class _LineagePublisher:
    """The process of one lineage. Its updates take turns, in the order of their calls."""

    def __init__(self, address: str, lineage: str, roots: Sequence[Path], deadlines: Deadlines) -> None:
        self._lineage, self._deadlines = lineage, deadlines
        self._command = module_command("ckpt_engine.publishing.process", address, lineage, *map(str, roots))
        self._process: asyncio.subprocess.Process | None = None
        self._condemned = False
        """Whether the process must be killed, even if an earlier attempt was cancelled."""
        self._turn = asyncio.Lock()
        self.users = 0
        """Calls that run, wait for their turn, or are about to; counted by `Publishers`."""

    async def update(self, request: Request, seconds: float, events: EventQueue) -> None:
        """Runs an update and puts its events into the queue, the report last. Raises CkptEngineError."""
        try:
            async with asyncio.timeout(seconds):
                await self._turn.acquire()
        except TimeoutError:
            raise deadline(f"other updates of lineage {self._lineage!r} took {seconds:g} s: try again later") from None
        limits = self._deadlines
        try:
            # The process itself ends the update in time; this limit is for a process that hangs.
            async with asyncio.timeout(limits.start + seconds + 2 * limits.call_grace):
                await self._exchange(request, events)
        except TimeoutError:
            await self._kill()
            raise deadline(
                f"the process that publishes {request.directory} did not answer and was ended: its file system may hang"
            ) from None
        except asyncio.CancelledError:
            await self._kill()
            raise
        finally:
            self._turn.release()

    async def end(self) -> None:
        """Lets the process end its session, and kills it if it does not exit."""
        if (process := self._process) is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            async with asyncio.timeout(self._deadlines.stop):
                await process.wait()
        except TimeoutError:
            await self._kill()

    async def _exchange(self, request: Request, events: EventQueue) -> None:
        process = await self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(encode_frame(REQUEST, request.SerializeToString()))
            await process.stdin.drain()
            while True:
                kind, size = HEAD.unpack(await process.stdout.readexactly(HEAD.size))
                body = await process.stdout.readexactly(size)
                if kind != EVENT:
                    raise CkptEngineError(weights_pb2.Problem.FromString(body))
                event = manager_pb2.UpdateEvent.FromString(body)
                events.put_nowait(event)
                if event.HasField("report"):
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            raise unavailable(
                f"the process that published {request.directory} {await self._how_it_ended()}; see `ckpt-engine "
                "status` for the replicas, and update again"
            ) from None

    async def _start(self) -> asyncio.subprocess.Process:
        if self._condemned:
            await self._kill()
        if self._process is None or self._process.returncode is not None:
            log.info("a process for directories of lineage=%r is started", self._lineage)
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env=_environment(self._deadlines),
                start_new_session=True,  # Ctrl-C is the manager's, which lets an update end first
            )
        return self._process

    async def _how_it_ended(self) -> str:
        process = self._process
        await self._kill()
        status = 0 if process is None or process.returncode is None else process.returncode
        if status == -signal.SIGBUS:
            return "was ended by SIGBUS: a file was cut short while it was read"
        return f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"

    async def _kill(self) -> None:
        """Ends the process. Raises DEADLINE_EXCEEDED if a signal does not end it; the next call tries again."""
        process = self._process
        self._condemned = process is not None
        if process is None:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ENDED_SECONDS):
                await process.wait()
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            try:
                async with asyncio.timeout(self._deadlines.stop):
                    await process.wait()
            except TimeoutError:
                raise deadline(
                    f"process {process.pid}, which publishes directories of lineage {self._lineage!r}, does not end "
                    "even when it is killed: its file system may hang"
                ) from None
        self._process, self._condemned = None, False


def _environment(deadlines: Deadlines) -> dict[str, str]:
    """The environment of a process: with the manager's deadlines, and without credentials, since only its user can dial
    the socket."""
    ours = {name: value for name, value in os.environ.items() if name not in _MEMBERS}
    return module_environment(ours) | {
        ENVIRONMENT: " ".join(f"{each.name}={getattr(deadlines, each.name)}" for each in fields(deadlines))
    }
