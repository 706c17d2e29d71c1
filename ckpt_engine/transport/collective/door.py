"""Where members knock: the listener of a process that may be the lead of a collective, and the meeting behind it.

A source that is offered for collectives has a door from when it is published until it closes, so its address is known
beforehand. The lead opens a meeting behind it when it hears of a communicator; a member that knocks earlier is told to
try again. There is one meeting at a time. Any thread; nothing here waits for a member.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import socket
import threading
import time
import weakref

from ckpt_engine.core.loopback import is_loopback
from ckpt_engine.transport.collective.frames import CALL_SECONDS, HELLO, LATER, read, tune, write
from ckpt_engine.transport.collective.meeting import SILENCE_SECONDS, Meeting

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"

_ANY = {socket.AF_INET: "0.0.0.0", socket.AF_INET6: "::"}  # only if other hosts were told an address
_ITSELF = {"0.0.0.0": LOOPBACK, "::": "::1"}
_BACKLOG = 1024
"""Members that knock at once, most of them again and again until there is a meeting."""

_KNOCKING = 1024
"""Connections that have not shown a key yet; more than these are closed."""

_AGAIN_SECONDS = 0.1


class MeetingDoor:
    """A listener, open from when it is made. host, port: where other members connect. address: where this process
    connects."""

    def __init__(self, advertise: str = "") -> None:
        """advertise: the name or address at which other hosts reach this one; empty: only this host connects. Raises
        OSError if no address can be bound."""
        self._lock = threading.Lock()
        self._meeting: tuple[bytes, bytes, Meeting] | None = None
        self._connections: set[socket.socket] = set()
        self._closed = False
        self.host: str = advertise or LOOPBACK
        self._listener = _bind(self.host)
        self._listener.listen(_BACKLOG)
        own_host, self.port = self._listener.getsockname()[:2]
        self.address: tuple[str, int] = _ITSELF.get(own_host, own_host), self.port
        _doors[os.getpid(), self.port] = self
        threading.Thread(target=self._accept, name="ckpt-engine door", daemon=True).start()

    def meeting(self, communicator: bytes, key: bytes, silence: float = SILENCE_SECONDS) -> Meeting:
        """The meeting of a communicator, made if there is none. Members must show the key. The meeting of any other
        communicator ends."""
        with self._lock:
            former = self._meeting
            if former is not None and former[:2] == (communicator, key):
                return former[2]
            meeting = Meeting(silence)
            self._meeting = communicator, key, meeting
            if self._closed:
                meeting.close()
        if former is not None:
            former[2].close()
        return meeting

    def close(self) -> None:
        """Ends the meeting for all members and stops listening. May be repeated."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            meeting, connections = self._meeting, list(self._connections)
        if meeting is not None:
            meeting[2].close()
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                self._wait(error)
                continue
            with self._lock:
                if room := len(self._connections) < _KNOCKING:
                    self._connections.add(connection)
            if not room:
                connection.close()
                continue
            thread = threading.Thread(target=self._serve, args=(connection,), name="ckpt-engine member", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                with self._lock:
                    self._connections.discard(connection)
                connection.close()
                self._wait(error)

    def _wait(self, error: Exception) -> None:
        """Pauses after a connection could not be accepted, mostly because no descriptors or threads are left."""
        if not self._closed:
            log.warning("ckpt-engine: cannot accept a connection of a collective's member; trying again: %s", error)
            time.sleep(_AGAIN_SECONDS)

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError, ValueError):
            try:
                admission = self._admit(connection)
            finally:
                with self._lock:
                    self._connections.discard(connection)
            if admission is not None:
                meeting, name = admission
                meeting.serve(connection, name)

    def _admit(self, connection: socket.socket) -> tuple[Meeting, str] | None:
        """The meeting that a hello is for, and the member's name; None: it is refused."""
        tune(connection)
        kind, name, credentials = read(connection, time.monotonic() + CALL_SECONDS)
        connection.settimeout(CALL_SECONDS)
        if kind != HELLO or self._closed:
            return None
        with self._lock:
            current = self._meeting
        size = 0 if current is None else len(current[1])
        if current is None or credentials[size:] != current[0]:
            write(connection, LATER)
            return None
        if not hmac.compare_digest(credentials[:size], current[1]):
            return None
        connection.settimeout(None)
        return current[2], name


def door_at(port: int) -> MeetingDoor | None:
    """The door of this process at a port; a forked child has none of its parent's."""
    return _doors.get((os.getpid(), port))


def _bind(host: str) -> socket.socket:
    """A socket bound to a free port of the address that a name resolves to.

    Binds to all addresses of this host if it does not have that one (a forwarded one), or if the name resolves to
    loopback here (as many hosts' own names do).
    """
    found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    family, _, _, _, address = found[0]
    local = is_loopback(host)
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        try:
            elsewhere = not local and any(is_loopback(str(each[4][0])) for each in found)
            listener.bind((_ANY[family], 0) if elsewhere else address)
        except OSError:
            if local:
                raise
            listener.bind((_ANY[family], 0))
    except BaseException:
        listener.close()
        raise
    return listener


_doors: weakref.WeakValueDictionary[tuple[int, int], MeetingDoor] = weakref.WeakValueDictionary()
