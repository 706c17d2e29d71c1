"""Members of a collective on CPUs: bytes that arrive as they were sealed, and an end for all when one fails."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from ckpt_engine.core.collective_plan import KEY_BYTES
from ckpt_engine.core.problems import CkptEngineError, internal
from ckpt_engine.transport.collective import meeting
from ckpt_engine.transport.collective.door import MeetingDoor
from ckpt_engine.transport.collective.meeting import Attendance
from ckpt_engine.transport.collective.on_host import HostMember
from tests.collective.collective_case import DTYPES, Memory, make_case
from tests.collective.collective_processes import LIMIT, processes
from tests.waiting import eventually

KEY = bytes(KEY_BYTES)


class Threads:
    """All members of a case, each in a thread of this process."""

    def __init__(self, name: str) -> None:
        self.case = make_case(name)
        self.door = MeetingDoor()
        self.door.meeting(b"", KEY, silence=LIMIT)
        self.numbers = range(len(self.case.members))
        names = [each.name for each in self.case.members]
        self.attending = [Attendance(self.door.address, KEY, name, names[0], LIMIT) for name in names]
        self.memory = [Memory(self.case, number) for number in self.numbers]
        self.members: list[HostMember] = []
        made: dict[int, HostMember] = {}

        def make(number: int) -> None:
            places = self.memory[number].places
            made[number] = HostMember(
                self.case.schedule, number, self.attending[number], places, DTYPES, "127.0.0.1", LIMIT
            )

        self.each(make)
        self.members = [made[number] for number in self.numbers]

    def each(self, work: Any) -> dict[int, BaseException]:
        """Does this for each member at once; returns who failed."""
        failed: dict[int, BaseException] = {}

        def run(number: int) -> None:
            try:
                work(number)
            except BaseException as error:
                failed[number] = error

        threads = [threading.Thread(target=run, args=(number,)) for number in self.numbers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT)
        return failed

    def close(self) -> None:
        for member in self.members:
            member.close()
        for each in self.attending:
            each.close()
        self.door.close()


@contextmanager
def threads(name: str) -> Iterator[Threads]:
    made = Threads(name)
    try:
        yield made
    finally:
        made.close()


@pytest.mark.parametrize("name", ["one", "split"])
def test_bytes_arrive_as_they_were_sealed_update_after_update(name: str) -> None:
    with threads(name) as all_of_it:
        case = all_of_it.case
        sources = [number for number in all_of_it.numbers if case.members[number].is_source]
        for version in (1, 2):
            for number in sources:
                all_of_it.memory[number].renew(version)
            assert not all_of_it.each(lambda number: all_of_it.members[number].run(LIMIT))
            for number in all_of_it.numbers:
                assert number in sources or all_of_it.memory[number].wrong(version) == []


def test_a_member_that_fails_ends_it_for_all_and_they_make_a_new_one() -> None:
    with threads("one") as all_of_it:

        def told(size: int) -> None:
            raise internal("its memory went away")

        def run(number: int) -> None:
            all_of_it.members[number].run(LIMIT, told if number == 2 else None)

        failed = all_of_it.each(run)
        assert failed.keys() == set(all_of_it.numbers)
        for error in failed.values():
            assert "worker 1 failed: its memory went away" in str(error)
        with pytest.raises(CkptEngineError, match="its members have to make a new one"):
            all_of_it.members[0].run(LIMIT)


def test_a_member_that_does_not_begin_is_named_when_the_time_of_others_is_over() -> None:
    with threads("one") as all_of_it:

        def run(number: int) -> None:
            if number != 2:
                all_of_it.members[number].run(0.3)

        failed = all_of_it.each(run)
        assert failed.keys() == {0, 1, 3}
        for error in failed.values():
            assert "worker 1" in str(error), error
            assert "had not begun" in str(error), error


def test_who_did_not_come_is_named() -> None:
    case = make_case("one")
    door = MeetingDoor()
    door.meeting(b"", KEY)
    names = [each.name for each in case.members]
    attending = [Attendance(door.address, KEY, name, names[0], LIMIT) for name in names[:2]]
    try:
        with pytest.raises(CkptEngineError, match="not made in time: worker 1, worker 2 did not come"):
            HostMember(case.schedule, 0, attending[0], Memory(case, 0).places, DTYPES, "127.0.0.1", 0.2)
    finally:
        for each in attending:
            each.close()
        door.close()


def test_who_is_silent_while_others_are_heard_ends_it_and_a_lead_that_was_away_blames_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By a clock of the test's own: the words of a busy machine's members come seldom."""
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now, sleep=time.sleep)
    monkeypatch.setattr(meeting, "time", clock)
    door = MeetingDoor()
    door.meeting(b"", KEY, silence=40.0)
    one, other = (Attendance(door.address, KEY, name, "rank 0", LIMIT) for name in ("worker 1", "worker 2"))
    try:
        for each in (one, other):
            assert each.hear(running=True) == ""
        clock.now += 60.0  # what it is like for a meeting whose process was stopped
        for _ in range(3):
            assert one.hear(running=True) == ""
            clock.now += 15.0
        assert one.hear(running=True) == "worker 2 was not heard for 40 s"
        assert other.hear(running=True) == "worker 2 was not heard for 40 s"
    finally:
        for each in (one, other):
            each.close()
        door.close()


def test_a_meeting_wants_its_key_and_hears_of_lost_connections() -> None:
    door = MeetingDoor()
    door.meeting(b"", KEY)
    try:
        with pytest.raises(CkptEngineError, match="rank 0, which keeps the collective's meeting, is gone"):
            Attendance(door.address, b"another key", "worker 9", "rank 0", LIMIT)
        one, other = (Attendance(door.address, KEY, name, "rank 0", LIMIT) for name in ("worker 1", "worker 2"))
        one.set("word", b"said")
        assert (other.get("word"), other.get("other"), other.attendees()) == (b"said", None, ["worker 1", "worker 2"])
        one._socket.close()
        eventually("it is told", LIMIT, lambda: other.hear(running=False) == "worker 1 lost its connection")
        assert other.end("something else") == "worker 1 lost its connection"
    finally:
        door.close()
    with pytest.raises(CkptEngineError, match="rank 0, which keeps the collective's meeting, is gone"):
        other.hear(running=False)


@pytest.mark.slow
def test_processes_bring_versions_to_each_other() -> None:
    with processes("split", 3, {}) as all_of_it:
        said = all_of_it.said()
        for number, member in enumerate(all_of_it.case.members):
            told = [each for each in said[number] if "version" in each]
            assert [each["version"] for each in told] == [1, 2, 3], said[number]
            assert not any(each["wrong"] for each in told)
            assert member.is_source or all(each["moved"] > 0 for each in told)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("victim", "fault"), [(2, "kill"), pytest.param(2, "stop", marks=pytest.mark.hours), (2, "fail"), (3, "stop")]
)
def test_a_worker_that_ends_in_the_middle_is_named_by_all_others(victim: int, fault: str) -> None:
    """By the deadline: a member that did not end would not end at all, since nothing else limits it here."""
    with processes("one", 2, {victim: fault}) as all_of_it:
        said = all_of_it.said(but=[] if fault == "fail" else [victim])
        name = all_of_it.case.members[victim].name
        for number in said:
            last = said[number][-1]
            assert last.get("code") in ("UNAVAILABLE", "DEADLINE_EXCEEDED"), (number, said)
            assert name in last["message"], (number, said)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["kill", pytest.param("stop", marks=pytest.mark.hours)])
def test_the_lead_that_ends_in_the_middle_is_named_by_all_others(fault: str) -> None:
    """By all that were not done: the lead may be, and what it had sent passes on without it."""
    with processes("split", 2, {0: fault}) as all_of_it:
        said = all_of_it.said(but=[0])
        ended = [lines[-1] for lines in said.values() if "code" in lines[-1]]
        assert ended, said
        for number, lines in said.items():
            last = lines[-1]
            assert ("code" in last and "rank 0" in last["message"]) or last.get("version") == 2, (number, said)
            assert not last.get("wrong"), (number, said)
