"""Leases on memory that the kernel does not count: which readers map it, and whether the owner still lives.

An owner listens on an abstract Unix socket (nothing lies on the disk). A reader connects before it maps memory, and
stays connected as long as it does: the connection is the lease. It ends in one of three ways, each of which the other
side notices at once and without asking:

- the reader unmaps, then closes;
- the owner withdraws: it stops sending, the reader unmaps and closes, and the owner waits for that before it frees;
- either process dies: the kernel closes its end.

A reader may also ask the owner for file descriptors of its memory, on a connection of its own. That needs no permission
to trace the owner. Reader and owner are processes of one user (or the other is root) in one network namespace.
"""

from __future__ import annotations

import array
import contextlib
import logging
import os
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator

from ckpt_engine.core.problems import CkptEngineError, data_loss, deadline, internal, unavailable
from ckpt_engine.host.forks import forget_in_children
from ckpt_engine.host.processes import is_ours, peer_user

log = logging.getLogger(__name__)

BATCH = 64
"""The most descriptors in one message; the kernel passes at most 253."""

ASK_SECONDS = 10.0
"""How long an owner may take to accept or to answer. Its thread waits only for the interpreter."""

_QUESTION = struct.Struct("<II")
_TEXT_BYTES = 1024

Export = Callable[[int, int], list[int]]
"""(region, first part) to descriptors of up to BATCH parts from there on, which the caller closes. Raises
CkptEngineError. Called on the owner's lease thread."""


class LeaseOffice:
    """The owner's end of all its leases. Callable from any thread; it has a thread of its own."""

    def __init__(self, export: Export | None = None) -> None:
        """export: hands out descriptors; None: there are none. Raises UNAVAILABLE without Unix sockets."""
        self._export = export
        self.name = f"ckpt-engine-{os.getpid()}-{secrets.token_hex(8)}"
        self._readers: set[socket.socket] = set()
        self._changed = threading.Condition()
        self._open = True
        self._selector = selectors.DefaultSelector()
        try:
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
            self._listener.bind("\0" + self.name)
            self._listener.listen(128)
            self._waker, self._woken = socket.socketpair()
        except OSError as error:
            raise unavailable(f"cannot open a Unix socket for leases: {error}") from error
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="ckpt-engine leases", daemon=True)
        forget_in_children(self)
        self._thread.start()

    @property
    def readers(self) -> int:
        """Connections that are open now."""
        with self._changed:
            return len(self._readers)

    def withdraw(self, seconds: float) -> None:
        """Refuses further readers, asks the others to unmap, and waits until all have. May be repeated.

        Raises DEADLINE_EXCEEDED if some have not; they may still map the memory, which is not free before they unmap.
        """
        stop_at = time.monotonic() + seconds
        with self._changed:
            if self._open:
                self._open = False
                with contextlib.suppress(OSError):
                    self._listener.shutdown(socket.SHUT_RD)  # connections are refused before the thread closes it
                for reader in self._readers:
                    _half_close(reader)
                self._wake()
            while self._readers and (remaining := stop_at - time.monotonic()) > 0:
                self._changed.wait(remaining)
            if self._readers:
                raise deadline(
                    f"{len(self._readers)} readers still map the memory after {seconds:g} s; it is not free before "
                    "they unmap it or end (an engine may be in the middle of an update)"
                )

    def forget(self) -> None:
        """Closes this process's copies of the sockets without telling their peers: for a forked child."""
        for each in (self._listener, self._waker, self._woken, *self._readers):
            with contextlib.suppress(OSError):
                each.close()

    def _serve(self) -> None:
        listening = True
        while listening or self._readers:
            for key, _ in self._selector.select():
                found = key.fileobj
                if found is self._listener:
                    self._accept()
                elif found is not self._woken and isinstance(found, socket.socket):
                    self._hear(found)
            if listening and not self._open:
                listening = False
                self._selector.unregister(self._listener)
                self._selector.unregister(self._woken)
                self._listener.close()
        self._selector.close()
        self._waker.close()
        self._woken.close()

    def _accept(self) -> None:
        try:
            reader, _ = self._listener.accept()
        except OSError:
            return
        reader.setblocking(False)
        with self._changed:
            if not self._open or not is_ours(peer_user(reader)):
                reader.close()
                return
            self._readers.add(reader)
            self._selector.register(reader, selectors.EVENT_READ)

    def _hear(self, reader: socket.socket) -> None:
        """Answers a question, or notes that a reader has closed its connection."""
        try:
            question = reader.recv(_QUESTION.size)
            if len(question) == _QUESTION.size:
                self._answer(reader, *_QUESTION.unpack(question))
                return
        except BlockingIOError:
            return
        except OSError:
            pass
        self._selector.unregister(reader)
        with self._changed:
            self._readers.discard(reader)
            reader.close()
            self._changed.notify_all()

    def _answer(self, reader: socket.socket, region: int, first: int) -> None:
        descriptors: list[int] = []
        try:
            if self._export is None:
                raise internal("this memory has no descriptors to ask for")
            descriptors = self._export(region, first)
            packed = array.array("i", descriptors)
            reader.sendmsg([b"\1"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, packed)])
        except CkptEngineError as error:
            reader.send(b"\0" + error.problem.message.encode()[:_TEXT_BYTES])
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._waker.send(b"\1")


class Lease:
    """The reader's end of a lease: a connection to the owner's LeaseOffice, and a thread that notices when it
    closes."""

    def __init__(self, name: str, on_end: Callable[[], None]) -> None:
        """on_end: called once, on a thread of its own, when the owner withdraws or dies; not after `close`.

        Raises UNAVAILABLE if the owner is gone, has withdrawn, or does not answer.
        """
        self._socket = _connect(name)
        self._socket.settimeout(None)
        self._on_end = on_end
        self._closed = threading.Event()
        forget_in_children(self)
        threading.Thread(target=self._watch, name="ckpt-engine lease", daemon=True).start()

    def close(self) -> None:
        """Tells the owner that this process maps none of its memory any more. May be repeated."""
        self._closed.set()
        _half_close(self._socket)  # wakes the watching thread, which closes it

    def forget(self) -> None:
        """Closes this process's copy of the socket without telling the peer: for a forked child."""
        with contextlib.suppress(OSError):
            self._socket.close()

    def _watch(self) -> None:
        with contextlib.suppress(OSError):
            while self._socket.recv(1):
                pass
        try:
            if not self._closed.is_set():
                self._on_end()
        except Exception:
            log.exception("ckpt-engine: could not unmap the memory of a source that has ended")
        finally:
            self._socket.close()


def fetch_descriptors(name: str, region: int, count: int) -> Iterator[int]:
    """Descriptors of the `count` parts of an owner's region, in order; the caller closes each before it goes on.

    Raises UNAVAILABLE (the owner is gone or cannot export them any more), DATA_LOSS (it has another number of parts).
    """
    with contextlib.closing(_connect(name)) as connection:
        first = 0
        while first < count:
            waiting = _ask(connection, region, first)
            first += len(waiting)
            try:
                if not waiting or first > count:
                    raise data_loss(
                        f"region {region} must have {count} parts, and its owner has another number of them"
                    )
                while waiting:
                    yield waiting.pop(0)
            finally:
                for descriptor in waiting:
                    os.close(descriptor)


def _ask(connection: socket.socket, region: int, first: int) -> list[int]:
    try:
        connection.send(_QUESTION.pack(region, first))
        answer, descriptors, _, _ = socket.recv_fds(connection, _TEXT_BYTES + 1, BATCH)
    except OSError as error:
        raise unavailable(f"the owner of region {region} does not hand out its memory: {error}") from error
    if answer[:1] == b"\1":
        return descriptors
    why = answer[1:].decode("utf-8", "replace") or "it has ended"
    raise unavailable(f"the owner of region {region} does not hand out its memory: {why}; publish again")


def _connect(name: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    connection.settimeout(ASK_SECONDS)
    try:
        connection.connect("\0" + name)
    except OSError as error:
        connection.close()
        raise unavailable(
            f"the owner of GPU memory has ended or withdrawn it (no lease at {name}: {error}); publish again. Owner "
            "and reader must be in one network namespace"
        ) from error
    return connection


def _half_close(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_WR)
