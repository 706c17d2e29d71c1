"""What both sides do with a connected socket: wait for a limited time, and end it for good."""

from __future__ import annotations

import array
import contextlib
import fcntl
import select
import socket
import ssl
import struct
import termios
import threading
from collections.abc import Callable, Sequence
from typing import Any

_KEEPALIVE = ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))
"""A host that has vanished is noticed within 20 s, also while nothing is asked of it."""


class Silence(Exception):  # noqa: N818
    """Nothing came, or could be sent, for as long as the socket waits."""


class HungUp(Exception):  # noqa: N818
    """The other side has closed the connection."""


def resolve(host: str, port: int, seconds: float) -> list[tuple[Any, ...]]:
    """What `getaddrinfo` finds for TCP. Raises OSError; Silence if the resolver does not answer in time: it may be more
    patient than we are, and goes on on a thread of its own."""
    found: list[list[tuple[Any, ...]]] = []
    failed: list[OSError] = []

    def ask() -> None:
        try:
            found.append(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        except OSError as error:
            failed.append(error)
        except UnicodeError as error:
            failed.append(OSError(f"{host!r} is not the name of a host: {error}"))

    asking = threading.Thread(target=ask, name="ckpt-engine resolver", daemon=True)
    asking.start()
    asking.join(seconds)
    if failed:
        raise failed[0]
    if not found:
        raise Silence
    return found[0]


def tune(connection: socket.socket, seconds: float) -> None:
    """Sets a socket's options for long runs and short questions. seconds: how long it waits in each call."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
    if isinstance(connection, ssl.SSLSocket):
        connection.settimeout(seconds)
        return
    # By the kernel: a socket with Python's timeout is polled before each call and cannot wait for all of a run.
    connection.settimeout(None)
    packed = struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, packed)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, packed)


def receive_some(connection: socket.socket, into: memoryview) -> int:
    """Receives some bytes, at least one; returns how many. Raises Silence, HungUp."""
    if isinstance(connection, ssl.SSLSocket):
        return _received(lambda: connection.recv_into(into))
    return _received(lambda: connection.recv_into(into, 0, socket.MSG_WAITALL))


def receive_parts(connection: socket.socket, parts: Sequence[memoryview]) -> int:
    """Receives into several parts in their order, in one call; returns how many bytes, at least one. Not for TLS.
    Raises Silence, HungUp."""
    return _received(lambda: connection.recvmsg_into(parts, 0, socket.MSG_WAITALL)[0])


def _received(receive_into: Callable[[], int]) -> int:
    try:
        got = receive_into()
    except (BlockingIOError, TimeoutError) as error:
        raise Silence from error
    except OSError as error:
        raise HungUp(str(error)) from error
    if not got:
        raise HungUp("it has hung up")
    return got


def receive(connection: socket.socket, size: int) -> bytes:
    """Receives exactly so many bytes. Raises Silence if nothing came, HungUp also if they stop in the middle."""
    found = memoryview(bytearray(size))
    at = 0
    while at < size:
        try:
            at += receive_some(connection, found[at:])
        except Silence as error:
            if not at:
                raise
            raise HungUp("it stopped in the middle of a message") from error
    return bytes(found)


def send(connection: socket.socket, data: bytes | memoryview) -> None:
    """Sends all of it. Raises Silence, HungUp."""
    remaining = memoryview(data)
    while remaining:
        try:
            remaining = remaining[connection.send(remaining) :]
        except (BlockingIOError, TimeoutError) as error:
            raise Silence from error
        except OSError as error:
            raise HungUp(str(error)) from error


def unsent(connection: socket.socket) -> int:
    """Bytes in the kernel that the other side does not have yet."""
    return _queue_bytes(connection, termios.TIOCOUTQ)


def unread(connection: socket.socket) -> int:
    """Bytes that have come and were not received yet."""
    return _queue_bytes(connection, termios.FIONREAD)


def _queue_bytes(connection: socket.socket, what: int) -> int:
    found = array.array("i", [0])
    with contextlib.suppress(OSError, ValueError):  # it is closed
        fcntl.ioctl(connection.fileno(), what, found)
    return found[0]


def tells_the_rate(body: int, size: int) -> bool:
    """Whether the seconds that a delta of `body` bytes took say how fast a connection is: one that is much shorter than
    its chunk of `size` bytes may lie in the kernel's memory as a whole."""
    return 2 * body >= size


def shut(connection: socket.socket) -> None:
    """Shuts a connection: its thread wakes up, and nothing comes or goes any more. Any thread; its user closes it."""
    with contextlib.suppress(OSError):
        # Not SSLSocket's own, after which its other methods would go past the encryption.
        socket.socket.shutdown(connection, socket.SHUT_RDWR)


def has_hung_up(connection: socket.socket) -> bool:
    """Whether the other side has hung up, as far as is known without waiting."""
    poll = select.poll()
    try:
        poll.register(connection.fileno(), select.POLLRDHUP)
        return bool(poll.poll(0))
    except (OSError, ValueError):  # closed already
        return True
