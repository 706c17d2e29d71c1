"""An engine's process: started, watched, logged, and ended together with all that it started.

Runs in the agent. The launcher (see launcher.py) is the agent's only direct child, and it ends the tree. This module
talks to the launcher and, if that is killed, kills the rest of its session.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from ckpt_engine.agent import launcher
from ckpt_engine.agent.remedies import remedy
from ckpt_engine.core.deadlines import NOTICE_SECONDS

DIRECTORY_MODE = 0o700
LOG_MODE = 0o600
LOG_LIMIT_BYTES = 64 << 20
"""A log that has grown to this is renamed to `<name>.1`, replacing the one before it."""
LINE_LIMIT_BYTES = 64 << 10
"""A longer line is cut into lines of this length, so that an engine cannot fill our memory with one."""
LINES_KEPT = 200
LINES_SHOWN = 30
HEALTH_INTERVAL_SECONDS = 0.25
NOTICE_AGAIN_SECONDS = 60.0
"""Time between two lines about an engine that is still loading."""

logger = logging.getLogger(__name__)

LineSink = Callable[[str], None]
HealthCheck = Callable[[float], Awaitable[bool]]


class EngineProcessError(Exception):
    """The engine could not be started, ended, or did not become healthy. The message has its last lines."""


def describe_status(status: int) -> str:
    """Describes a Popen.returncode."""
    if status == launcher.CANNOT_START:
        return "could not be started (status 127)"
    if status >= 0:
        return f"exited with status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    return f"was killed by {name}"


TORCHRUN = re.compile(r"TORCHELASTIC_.*|((LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE))|ROLE_NAME|MASTER_(ADDR|PORT)")


def torchrun_variables(environment: Mapping[str, str]) -> frozenset[str]:
    """The variables that torchrun sets for a rank, if this is the environment of one; else none.

    An engine is not one of its ranks, but torch in the engine would take itself for one and wait for torchrun's store.
    """
    if "TORCHELASTIC_RUN_ID" not in environment:
        return frozenset()
    return frozenset(name for name in environment if TORCHRUN.fullmatch(name))


class LogPump(threading.Thread):
    """Copies an engine's output into its log file, line by line, and keeps the last lines.

    A separate thread, so that an engine never waits for our event loop because a pipe is full. It ends when the last
    process with the pipe has ended. on_line is called on this thread.
    """

    def __init__(self, descriptor: int, path: Path, on_line: LineSink | None) -> None:
        super().__init__(name=f"log {path.name}", daemon=True)
        self._descriptor = descriptor
        self._path = path
        self._on_line = on_line
        self._lines: deque[str] = deque(maxlen=LINES_KEPT)
        self._lock = threading.Lock()
        self.failure: OSError | None = None  # of writing the file; output is still read, or the engine would block

    def last_lines(self, count: int = LINES_SHOWN) -> list[str]:
        """The last lines, newest last. Any thread."""
        with self._lock:
            return list(self._lines)[-count:]

    def run(self) -> None:
        pending = b""
        file: BinaryIO | None = None
        try:
            file = self._open()
            # Engines draw progress bars with a bare carriage return; each of those is a line as well.
            while data := os.read(self._descriptor, 64 << 10):
                file = self._write(file, data)
                *lines, pending = re.split(rb"\r\n|\n|\r", pending + data)
                if len(pending) > LINE_LIMIT_BYTES:
                    lines, pending = [*lines, pending], b""
                for line in lines:
                    self._emit(line)
            self._emit(pending)
        finally:
            os.close(self._descriptor)
            if file is not None:
                file.close()

    def _open(self) -> BinaryIO | None:
        try:
            return open(os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, LOG_MODE), "ab", buffering=0)
        except OSError as error:
            self.failure = error
            return None

    def _write(self, file: BinaryIO | None, data: bytes) -> BinaryIO | None:
        if file is None:
            return None
        try:
            file.write(data)
            if file.tell() < LOG_LIMIT_BYTES:
                return file
            os.replace(self._path, self._path.with_name(self._path.name + ".1"))
        except OSError as error:
            self.failure = error
            return file
        file.close()
        return self._open()

    def _emit(self, line: bytes) -> None:
        for start in range(0, len(line), LINE_LIMIT_BYTES):
            text = line[start : start + LINE_LIMIT_BYTES].decode(errors="replace")
            if text.strip():
                with self._lock:
                    self._lines.append(text)
                self._pass_on(text)

    def _pass_on(self, text: str) -> None:
        if self._on_line is not None:
            try:
                self._on_line(text)
            except Exception:
                # Such as a closed terminal. The engine's output must still be read, or the engine would block.
                self._on_line = None
                logger.exception("the engine's output is not passed on any more; it is still in %s", self._path)


class EngineProcess:
    """One start of an engine. Used on one event loop; not started twice.

    argv, env: the command, and variables in addition to our own environment, which it inherits except for `without`.
    log_path: gets its standard output and error, appended. on_line: gets every line, too, on another thread.
    grace_seconds: between SIGTERM and SIGKILL in `stop`. start_seconds: for the launcher's first message.
    """

    def __init__(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        log_path: Path,
        *,
        on_line: LineSink | None = None,
        grace_seconds: float = 10.0,
        start_seconds: float = 30.0,
        without: Collection[str] = (),
    ) -> None:
        self._argv = tuple(argv)
        self._env = dict(env)
        self._unset = frozenset(without)
        self._log_path = log_path
        self._on_line = on_line
        self._grace = grace_seconds
        self._start_seconds = start_seconds
        self._process: asyncio.subprocess.Process | None = None
        self._lifeline: int | None = None  # our end of the launcher's standard input, which ends when we do
        self._pump: LogPump | None = None
        self.pid: int | None = None  # of the engine's first process, once started

    @property
    def running(self) -> bool:
        """Whether the launcher runs, and so possibly some process of the engine."""
        return self._process is not None and self._process.returncode is None

    def last_lines(self, count: int = LINES_SHOWN) -> list[str]:
        """The engine's last lines of output, oldest first."""
        return self._pump.last_lines(count) if self._pump is not None else []

    async def start(self) -> None:
        """Starts the engine; returns when its first process runs. Raises EngineProcessError if it cannot be started."""
        if self._process is not None:
            raise EngineProcessError("this engine process was started already; every start is a new EngineProcess")
        self._log_path.parent.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
        stdin, self._lifeline = os.pipe()
        output, stdout = os.pipe()
        status, status_writer = os.pipe()
        command = [sys.executable, "-I", launcher.__file__, str(self._grace), str(status_writer), *self._argv]
        try:
            self._process = await asyncio.create_subprocess_exec(
                *command,
                stdin=stdin,
                stdout=stdout,
                stderr=stdout,
                env={
                    **{name: value for name, value in os.environ.items() if name not in self._unset},
                    **self._env,
                },
                pass_fds=(status_writer,),
                start_new_session=True,
            )
        except BaseException:
            os.close(output)
            os.close(status)
            self._cut_lifeline()
            raise
        finally:
            for descriptor in (stdin, stdout, status_writer):
                os.close(descriptor)
        self._pump = LogPump(output, self._log_path, self._on_line)
        self._pump.start()
        # The launcher writes one line or ends, and then this pipe ends: the read cannot hang after that.
        reading = asyncio.ensure_future(asyncio.to_thread(_read_all, status))
        try:
            answer = await asyncio.wait_for(asyncio.shield(reading), self._start_seconds)
        except BaseException as error:
            await self.kill()
            if isinstance(error, TimeoutError):
                raise EngineProcessError(
                    f"the launcher of {self._argv[0]} said nothing for {self._start_seconds:g} s"
                ) from None
            raise
        if not answer[:1].isdigit():
            await self.wait()
            reason = answer[1:].decode(errors="replace") or self._with_lines("the launcher ended early")
            raise EngineProcessError(f"cannot start {self._argv[0]}: {reason}")
        self.pid = int(answer)

    async def wait(self) -> int:
        """Waits, without a deadline, until the whole tree has ended. Returns the status as Popen.returncode."""
        assert self._process is not None
        status = await self._process.wait()
        await self._clean_up()
        return status

    async def wait_healthy(
        self, check: HealthCheck, seconds: float, waiting: Callable[[float], None] | None = None
    ) -> None:
        """Waits until `check` returns True. Raises EngineProcessError with the engine's last lines if the engine ends,
        or after `seconds`; a living engine is not ended here.

        check: gets the seconds that it may take. waiting: called after a while, and then now and again, with the
        remaining seconds.
        """
        deadline = time.monotonic() + seconds
        notice = time.monotonic() + NOTICE_SECONDS
        end = asyncio.ensure_future(self.wait())
        try:
            while True:
                remaining = deadline - time.monotonic()
                if waiting is not None and time.monotonic() >= notice:
                    waiting(remaining)
                    notice += NOTICE_AGAIN_SECONDS
                if end.done():
                    raise EngineProcessError(self._with_lines(f"the engine {describe_status(end.result())}"))
                if remaining <= 0:
                    raise EngineProcessError(self._with_lines(f"the engine was not healthy within {seconds:g} s"))
                if await check(min(remaining, 5.0)):
                    return
                await asyncio.wait((end,), timeout=HEALTH_INTERVAL_SECONDS)
        finally:
            end.cancel()

    def describe_exit(self) -> str:
        """How the engine ended, with its last lines, for reports; empty while it runs."""
        if self._process is None or self._process.returncode is None:
            return ""
        return self._with_lines(f"the engine {describe_status(self._process.returncode)}")

    async def stop(self) -> int | None:
        """Ends the whole tree: SIGTERM, the grace, SIGKILL. Returns the status, None if it was never started. Safe to
        call twice."""
        if self._process is None:
            return None
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
        return await self._await_end(self._grace + launcher.KILL_SECONDS + 2)

    async def kill(self) -> int | None:
        """Ends the engine as `stop` does, with almost no grace: for an engine that does not react."""
        if self._process is None:
            return None
        self._cut_lifeline()
        return await self._await_end(launcher.ABANDONED_GRACE_SECONDS + launcher.KILL_SECONDS + 2)

    async def _await_end(self, seconds: float) -> int:
        assert self._process is not None
        try:
            return await asyncio.wait_for(self.wait(), seconds)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            return await self.wait()

    async def _clean_up(self) -> None:
        """Cleans up after the launcher has ended. If it was killed, the engine's processes are still in its session."""
        assert self._process is not None
        self._cut_lifeline()
        if (self._process.returncode or 0) < 0:
            await asyncio.to_thread(_kill_session, self._process.pid)
        if self._pump is not None:
            await asyncio.to_thread(self._pump.join, 2.0)

    def _cut_lifeline(self) -> None:
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None

    def _with_lines(self, message: str) -> str:
        lines = self.last_lines()
        if not lines:
            return f"{message}; it printed nothing (log: {self._log_path})"
        if advice := remedy(self._argv, lines):
            return f"{message}: {advice}; log: {self._log_path}"
        return f"{message}; log: {self._log_path}; its last {len(lines)} lines:\n" + "\n".join(lines)


def _read_all(descriptor: int) -> bytes:
    with open(descriptor, "rb") as file:
        return file.read()


def _kill_session(session: int) -> None:
    """Sends SIGKILL to every process of a session until none remains, for up to KILL_SECONDS."""
    deadline = time.monotonic() + launcher.KILL_SECONDS
    while time.monotonic() < deadline:
        members = []
        for pid in launcher.parents():
            with contextlib.suppress(OSError):
                if os.getsid(pid) == session:
                    members.append(pid)
        if not members:
            return
        for pid in members:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
