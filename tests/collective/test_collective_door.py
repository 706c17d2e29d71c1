"""The listener at which members knock: it goes on whatever a knock brings with it, until it is closed."""

from __future__ import annotations

import logging
import resource
import socket
import struct
import threading
import time
from collections.abc import Iterator

import pytest

from ckpt_engine.core.collective_plan import KEY_BYTES
from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.transport.collective import door as door_module
from ckpt_engine.transport.collective import seat as seat_module
from ckpt_engine.transport.collective.door import LOOPBACK, MeetingDoor
from ckpt_engine.transport.collective.meeting import Attendance
from ckpt_engine.transport.collective.seat import Seat

KEY = bytes(KEY_BYTES)
LIMIT = 60.0


@pytest.fixture
def door() -> Iterator[MeetingDoor]:
    made = MeetingDoor()
    made.meeting(b"", KEY)
    yield made
    made.close()


def lets_in(door: MeetingDoor) -> bool:
    member = Attendance(door.address, KEY, "worker 1", "rank 0", LIMIT)
    there = member.attendees()
    member.close()
    return there == ["worker 1"]


class Said(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.event = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.event.set()


@pytest.fixture
def said() -> Iterator[threading.Event]:
    """Set when the door has said that it could not let a member in."""
    handler = Said()
    door_module.log.addHandler(handler)
    yield handler.event
    door_module.log.removeHandler(handler)


def test_a_process_without_descriptors_lets_members_in_once_it_has_some(
    door: MeetingDoor, said: threading.Event
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket() as knocks:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        try:
            knocks.connect(door.address)
            assert said.wait(LIMIT)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert lets_in(door)


def test_a_thread_that_cannot_be_started_ends_one_connection_only(
    door: MeetingDoor, said: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process without room for threads is not made here: its error is."""

    def fails(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with socket.socket() as knocks:
        monkeypatch.setattr(threading.Thread, "start", fails)
        knocks.connect(door.address)
        assert said.wait(LIMIT)
        monkeypatch.undo()
        knocks.settimeout(LIMIT)
        assert knocks.recv(1) == b""
    assert lets_in(door)


def test_who_says_hello_byte_by_byte_has_no_more_time_than_others(
    door: MeetingDoor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door_module, "CALL_SECONDS", 0.2)
    with socket.create_connection(door.address) as knocks:
        knocks.sendall(struct.pack(">I", 60000))
        knocks.settimeout(0.02)
        for _ in range(1000):
            try:
                knocks.sendall(b"x")
                assert knocks.recv(1) == b""
            except TimeoutError:
                continue
            except ConnectionError:
                pass  # its bytes came after the end
            break
        else:
            pytest.fail("the door still waits for the rest")


def test_a_lead_behind_an_address_of_another_host_learns_from_members_where_they_reach_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another address of this host stands for that of its network."""
    forwarded = MeetingDoor("192.0.2.1")
    try:
        forwarded.meeting(b"", KEY)
        monkeypatch.setattr(seat_module, "is_loopback", lambda address: address == LOOPBACK)
        seat = Seat()
        seat._host = forwarded.host
        lead = Attendance(forwarded.address, KEY, "rank 0", "rank 0", LIMIT)
        assert lead.address == LOOPBACK
        member = Attendance(("127.0.0.2", forwarded.port), KEY, "worker 1", "rank 0", LIMIT)
        names = ["rank 0", "worker 1"]
        assert seat._interface(lead, names, time.monotonic() + LIMIT) == "127.0.0.2"
        with pytest.raises(CkptEngineError, match="worker 2 did not come"):
            seat._interface(lead, [*names, "worker 2"], time.monotonic())
        seat._host = LOOPBACK
        assert seat._interface(lead, names, time.monotonic()) == LOOPBACK
        member.close()
        lead.close()
    finally:
        forwarded.close()


def test_those_who_show_no_key_are_so_many_and_no_more(door: MeetingDoor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door_module, "_KNOCKING", 2)
    waiting = [socket.create_connection(door.address) for _ in range(3)]
    try:
        waiting[2].settimeout(LIMIT)
        assert waiting[2].recv(1) == b""
    finally:
        for each in waiting:
            each.close()
    while door._connections:
        time.sleep(0.001)
    assert lets_in(door)
