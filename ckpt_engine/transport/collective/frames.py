"""The wire format between a member and a meeting: frames with a length; a message is a kind, a key and a value."""

from __future__ import annotations

import socket
import struct
import time

from ckpt_engine.core.problems import internal

CALL_SECONDS = 5.0
"""Seconds for one question to the meeting; after that the lead counts as gone."""

LONGEST_WORD = 64 << 10
"""Bytes of a message; NCCL's id has 128, Gloo's addresses some hundred."""

HELLO, SET, GET, END, HEAR, REST, ATTENDEES, BYE, LATE = b"h", b"s", b"g", b"e", b"r", b"i", b"w", b"b", b"l"
BALLOT, WHOLE, REACHED = b"v", b"o", b"a"

IN, LATER = b"in", b"later"
"""Answers to a hello: the meeting was joined; or there is none of this communicator yet."""

_HEADER = struct.Struct(">I")
_KEY = struct.Struct(">cH")


_SILENT_SECONDS, _BETWEEN_SECONDS, _PROBES = 10, 5, 3


def tune(connection: socket.socket) -> None:
    """Sets a socket to send messages at once, and to notice within 25 s that a silent peer is gone."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _SILENT_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _BETWEEN_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)


def message(kind: bytes, key: str, value: bytes = b"") -> bytes:
    """A message as `read` reads it."""
    return _KEY.pack(kind, len(key.encode())) + key.encode() + value


def write(connection: socket.socket, data: bytes) -> None:
    """Sends one frame."""
    if len(data) > LONGEST_WORD:
        raise internal(f"a word of {len(data)} bytes is longer than {LONGEST_WORD}")
    connection.sendall(_HEADER.pack(len(data)) + data)


def read(connection: socket.socket, stop_at: float | None = None) -> tuple[bytes, str, bytes]:
    """Receives a message: kind, key and value. stop_at: monotonic seconds by which all of it must have come. Raises
    ValueError for a malformed one, and as `frame`."""
    data = frame(connection, stop_at)
    if len(data) < _KEY.size:
        raise ValueError("a message without a head")
    kind, length = _KEY.unpack_from(data)
    end = _KEY.size + length
    return kind, data[_KEY.size : end].decode(), data[end:]


def frame(connection: socket.socket, stop_at: float | None = None) -> bytes:
    """Receives the content of one frame. Raises ConnectionError if the other side has closed the connection, and
    TimeoutError."""
    (length,) = _HEADER.unpack(_exactly(connection, _HEADER.size, stop_at))
    if length > LONGEST_WORD:
        raise ConnectionError(f"a message of {length} bytes")
    return _exactly(connection, length, stop_at)


def _exactly(connection: socket.socket, length: int, stop_at: float | None) -> bytes:
    data = bytearray()
    while len(data) < length:
        if stop_at is not None:
            remaining = stop_at - time.monotonic()
            if remaining <= 0:
                raise TimeoutError("a message was not complete in time")
            connection.settimeout(remaining)
        part = connection.recv(length - len(data))
        if not part:
            raise ConnectionError("the connection was ended")
        data += part
    return bytes(data)
