"""What the members of a collective read of each other, as functions of bytes. Whoever writes them has shown the key."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

from ckpt_engine.core.problems import CkptEngineError, invalid
from ckpt_engine.transport.collective.door import MeetingDoor
from ckpt_engine.transport.collective.frames import (
    ATTENDEES,
    BALLOT,
    END,
    GET,
    HEAR,
    HELLO,
    IN,
    LATE,
    REST,
    SET,
    message,
)
from ckpt_engine.transport.collective.meeting import Attendance, Meeting

KEY, COMMUNICATOR = b"k" * 32, b"one"
VOTES = (
    b'{"epoch": 4, "verb": "vote", "until": 9.5}',
    b'{"epoch": 4, "verb": "leave", "why": "it failed", "blamed": ["b"]}',
    b'{"epoch": 4, "verb": "done"}',
)
QUESTIONS = [
    message(SET, "a word", b"what it says"),
    message(GET, "a word"),
    message(END, "", b"it failed"),
    message(LATE, "", b"it is late"),
    message(HEAR, ""),
    message(REST, ""),
    message(ATTENDEES, ""),
    *(message(BALLOT, "", vote) for vote in VOTES),
]
ANSWERS = [
    b'["a", "b"]',
    b'{"a": "10.0.0.1"}',
    b'{"word": "go", "clock": 3.5, "voted": true, "aborted": false, "why": ""}',
    b"",
]
HELLOS = [message(HELLO, "a", KEY + COMMUNICATOR), message(HELLO, "a", KEY + b"another")]


def framed(data: bytes) -> bytes:
    return len(data).to_bytes(4, "big") + data


def _pair(listener: socket.socket) -> tuple[socket.socket, socket.socket]:
    """Both ends of a connection."""
    visitor = socket.create_connection(listener.getsockname())
    inside, _ = listener.accept()
    return visitor, inside


@contextlib.contextmanager
def questions() -> Iterator[Callable[[bytes], None]]:
    """What a member asks the meeting, which it attends. The meeting may hang up, and goes on for all others."""

    listener = socket.create_server(("127.0.0.1", 0))

    def take(data: bytes) -> None:
        meeting = Meeting()
        meeting.open_ballot(4, ["a", "b"])
        member, lead = _pair(listener)
        with member, lead:
            member.sendall(framed(data))
            member.shutdown(socket.SHUT_WR)
            try:
                meeting.serve(lead, "a")
            except ConnectionError:
                pass  # it has read all that there is
            except (OSError, ValueError) as refused:  # which a door takes for the end of the member
                raise invalid(str(refused)) from refused
        assert not meeting._connections

    with listener:
        yield take


@contextlib.contextmanager
def hellos() -> Iterator[Callable[[bytes], None]]:
    """What anybody sends to a door."""
    door = MeetingDoor()
    door.meeting(COMMUNICATOR, KEY)
    listener = socket.create_server(("127.0.0.1", 0))

    def take(data: bytes) -> None:
        visitor, inside = _pair(listener)
        with visitor, inside:
            visitor.sendall(framed(data))
            visitor.shutdown(socket.SHUT_WR)
            try:
                admitted = door._admit(inside)
            except (OSError, ValueError) as refused:
                raise invalid(str(refused)) from refused
            assert admitted is None or KEY in data, "who does not show the key is not let in"

    try:
        yield take
    finally:
        listener.close()
        door.close()


@contextlib.contextmanager
def answers() -> Iterator[Callable[[bytes], None]]:
    """What somebody in the lead's place answers a member, whatever that asks. Nothing may come out but a problem."""
    listener = socket.create_server(("127.0.0.1", 0))
    told: list[bytes] = []

    def lead() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection, contextlib.suppress(OSError):
                connection.recv(1 << 16)
                connection.sendall(framed(IN))
                while connection.recv(1 << 16):
                    connection.sendall(framed(told[0]))

    thread = threading.Thread(target=lead, daemon=True)
    thread.start()
    attendance = Attendance(listener.getsockname(), KEY, "a", "rank 0", 5.0)

    def take(data: bytes) -> None:
        told[:] = [data]
        for ask in (
            attendance.attendees,
            attendance.reached,
            attendance.broken,
            lambda: attendance.get("a word"),
            lambda: attendance.hear(True),
            lambda: attendance.ballot(4, "ask"),
        ):
            with contextlib.suppress(CkptEngineError):
                ask()

    try:
        yield take
    finally:
        attendance.close()
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(10)
