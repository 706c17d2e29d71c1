"""Helper processes as their relay sees them: started, asked, killed. Any thread; nothing here waits without a deadline.

A helper is identified by a descriptor of its process (pidfd), so that no other process is ever killed in its place. A
helper counts as killed once the kernel says that it has ended. Its memory is unmapped by then, so it cannot write.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque

from ckpt_engine.core.problems import CkptEngineError, deadline, unavailable
from ckpt_engine.host.forks import forget_in_children
from ckpt_engine.transport.ucx import channel as c
from ckpt_engine.transport.ucx.fork_server import ADDRESSES, REQUEST, STARTED
from ckpt_engine.transport.ucx.settings import helper_environment

log = logging.getLogger(__name__)

START_SECONDS = 60.0
"""Seconds for a process to start, and for NIXL to find its devices."""

KILL_SECONDS = 30.0
"""Seconds for a killed process to end. A driver may hold it longer; then the relay ends instead of its helper."""

ANSWER_SECONDS = 60.0
"""Seconds for a helper to register memory: the kernel may have to pin all of it."""


class Helper:
    """One helper process. name: of its NIXL agent, unique."""

    def __init__(self, connection: socket.socket, pid: int, handle: int, name: str) -> None:
        self.pid = pid
        self.name = name
        self._connection = connection
        self._handle = handle
        self._lock = threading.RLock()
        self._number = 0
        self._unsent: deque[bytes] = deque()
        self._pending: set[int] = set()
        self._answers: dict[int, bytes | CkptEngineError] = {}
        self._why = ""
        self.registered: dict[int, int] = {}
        connection.setblocking(False)

    @property
    def ended(self) -> str:
        """Why it cannot be asked any more; empty while it lives."""
        with self._lock:
            self._pump()
            return self._why

    @property
    def killed(self) -> bool:
        """Whether its process was ended by `kill`."""
        return self._handle < 0

    @property
    def busy(self) -> bool:
        """Whether a request has no answer yet."""
        with self._lock:
            self._pump()
            return bool(self._pending)

    def ask(self, kind: int, value: int = 0, body: bytes = b"") -> int:
        """Sends a request; returns the number of its answer. Does not wait. Raises UNAVAILABLE."""
        with self._lock:
            self._pump()
            if self._why:
                raise unavailable(self._why)
            self._number += 1
            self._pending.add(self._number)
            self._unsent.append(c.message(kind, self._number, value, body))
            self._pump()
            return self._number

    def answer(self, number: int) -> bytes | None:
        """Takes the answer; None: there is none yet. Does not wait. Raises UNAVAILABLE with the helper's message, or if
        it has ended."""
        with self._lock:
            self._pump()
            found = self._answers.pop(number, None)
            if found is None and self._why:
                raise unavailable(self._why)
        if isinstance(found, CkptEngineError):
            raise found
        return found

    def wait(self, number: int, seconds: float) -> bytes:
        """Waits for the answer. Raises as `answer`, and DEADLINE_EXCEEDED."""
        until = time.monotonic() + seconds
        while (found := self.answer(number)) is None:
            remaining = until - time.monotonic()
            if remaining <= 0:
                raise deadline(f"UCX did not answer within {seconds:.3g} s")
            with contextlib.suppress(OSError, ValueError):  # it may be killed meanwhile
                readable(self._connection.fileno(), min(remaining, 0.2))
        return found

    def register(self, start: int, size: int) -> bytes:
        """Registers the first `size` bytes of the part of the arena at `start`; returns the answer.

        Raises UNAVAILABLE, DEADLINE_EXCEEDED.
        """
        found = self.wait(self.ask(c.LEND, size, c.OFFSET.pack(start)), ANSWER_SECONDS)
        self.registered[start] = max(size, self.registered.get(start, 0))
        return found

    def kill(self, why: str = "its helper process was ended") -> None:
        """Ends the process and waits for its end: then nothing lands in the arena through it any more. May be repeated.
        Never raises; if the helper does not end, this process does."""
        with self._lock:
            handle, self._handle = self._handle, -1
            if handle < 0:
                return
            self._why = self._why or why
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
            if not readable(handle, KILL_SECONDS):
                log.critical(
                    "UCX helper %d does not end, and it may still write to the relay's memory: this process ends",
                    self.pid,
                )
                os._exit(1)
            os.close(handle)
            self._connection.close()
            self._pending.clear()

    def forget(self) -> None:
        """Closes this process's copy of its connection: for a forked child."""
        with contextlib.suppress(OSError):
            self._connection.close()

    def _pump(self) -> None:
        """Sends queued requests as far as the socket takes them, and takes answers that have come."""
        if self._why:
            return
        try:
            with contextlib.suppress(BlockingIOError):
                while self._unsent:
                    self._connection.send(self._unsent[0])
                    self._unsent.popleft()
            with contextlib.suppress(BlockingIOError):
                while data := self._connection.recv(c.MOST_BYTES):
                    self._take_answer(data)
                self._note_end(None)
        except (OSError, ValueError) as error:
            self._note_end(error)

    def _note_end(self, error: Exception | None) -> None:
        self._why = f"the helper process {self.pid} has ended{f' ({error})' if error else ''}"

    def _take_answer(self, data: bytes) -> None:
        kind, number, _, body = c.parts(data)
        if kind == c.READY:
            self._answers[0] = unavailable(f"UCX cannot be used: {_words(body)}") if body else b""
            return
        if number not in self._pending:
            return
        self._pending.discard(number)
        if kind == c.DONE:
            self._answers[number] = body
        else:
            self._answers[number] = unavailable(f"UCX: {_words(body)}")


def readable(descriptor: int, seconds: float) -> bool:
    """Whether a descriptor, of any number, becomes readable in time."""
    waiting = select.poll()
    waiting.register(descriptor, select.POLLIN)
    return bool(waiting.poll(seconds * 1000))


def _words(body: bytes) -> str:
    return body.decode("utf-8", "replace")


class ForkServer:
    """Makes the helpers of one arena. Made before the arena is sealed.

    arena, size: the arena's descriptor and bytes. Raises UNAVAILABLE, DEADLINE_EXCEEDED.
    """

    def __init__(self, arena: int, size: int) -> None:
        self._lock = threading.Lock()
        self._helpers: set[Helper] = set()
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connection.settimeout(START_SECONDS)
        with theirs:
            descriptors = (theirs.fileno(), arena)
            numbers = [str(each) for each in (*descriptors, size)]
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "ckpt_engine.transport.ucx.fork_server", *numbers],
                stdin=subprocess.DEVNULL,
                pass_fds=descriptors,
                start_new_session=True,  # Ctrl-C is for the relay, which ends what it has started
                env={
                    **helper_environment(os.environ),
                    "PYTHONPATH": os.pathsep.join(each for each in sys.path if each),
                },
            )
        forget_in_children(self)
        try:
            addresses = self._connection.recv(ADDRESSES.size)
        except TimeoutError:
            addresses = b""
        except OSError as error:
            log.warning("ckpt-engine: the process that makes UCX helpers cannot be heard: %s", error)
            addresses = b""
        if len(addresses) != ADDRESSES.size:
            self.close()
            raise unavailable("the process that starts UCX helpers did not start; its log says why")
        self.writable, self.readable = ADDRESSES.unpack(addresses)

    @property
    def pid(self) -> int:
        """The pid of its process."""
        return self._process.pid

    @property
    def helpers(self) -> list[int]:
        """The pids of helpers that were not killed."""
        return [each.pid for each in list(self._helpers) if not each.killed]

    def start(self, role: int, devices: str, seconds: float = START_SECONDS) -> Helper:
        """A new helper, ready. devices: as UCX_NET_DEVICES has them; empty: as UCX finds them.

        Raises UNAVAILABLE with what NIXL says, DEADLINE_EXCEEDED.
        """
        until = time.monotonic() + seconds
        name = f"ckpt-engine {secrets.token_hex(12)}"
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs, self._lock:
                self._connection.settimeout(max(0.01, seconds))
                try:
                    request = REQUEST.pack(role, name.encode(), devices.encode())
                    socket.send_fds(self._connection, [request], [theirs.fileno()])
                    pid, handle = self._await_start(name)
                except TimeoutError:
                    raise deadline(f"no UCX helper started within {seconds:.3g} s") from None
                except OSError as error:
                    raise unavailable(f"cannot start a UCX helper: {error}") from error
        except BaseException:
            ours.close()
            raise
        helper = Helper(ours, pid, handle, name)
        self._helpers = {each for each in self._helpers if not each.killed} | {helper}
        try:
            ours.send(b"\1")
            helper.wait(0, max(0.01, until - time.monotonic()))
        except OSError as error:
            helper.kill()
            raise unavailable(f"a UCX helper ended while it was starting: {error}") from error
        except BaseException:
            helper.kill()
            raise
        return helper

    def _await_start(self, name: str) -> tuple[int, int]:
        """Process id and descriptor of the helper with this name. Ends earlier ones, as their callers have given up."""
        while True:
            reply, descriptors, _, _ = socket.recv_fds(self._connection, STARTED.size, 1, socket.MSG_CMSG_CLOEXEC)
            if len(reply) != STARTED.size or not descriptors:
                raise unavailable(
                    "cannot start a UCX helper: the process that starts them has ended; restart the relay"
                )
            pid, agent = STARTED.unpack(reply)
            if agent.rstrip(b"\0").decode() == name:
                return pid, descriptors[0]
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(descriptors[0], signal.SIGKILL)
            os.close(descriptors[0])

    def close(self) -> None:
        """Ends it and every helper. May be repeated. Never raises."""
        for helper in list(self._helpers):
            helper.kill()
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)  # wakes up a thread that waits for a helper
        self._connection.close()
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # it holds nothing but its helpers, which have ended
            self._process.wait(KILL_SECONDS)

    def forget(self) -> None:
        """Closes this process's copies of the sockets: for a forked child, which would hide its parent's death."""
        for helper in list(self._helpers):
            helper.forget()
        with contextlib.suppress(OSError):
            self._connection.close()
