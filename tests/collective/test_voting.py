"""The vote over real connections: all members of a meeting begin, or none does."""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from ckpt_engine.core.arming import BallotAnswer, Word
from ckpt_engine.core.collective_plan import KEY_BYTES
from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.transport.collective import meeting
from ckpt_engine.transport.collective.door import MeetingDoor
from ckpt_engine.transport.collective.meeting import Attendance
from ckpt_engine.transport.collective.voting import ASK_SECONDS, HOLD_SECONDS, wait_for_go

KEY = bytes(KEY_BYTES)
LIMIT = 60.0
NAMES = ("rank 0", "worker 1", "worker 2")


class Votes:
    """Members that vote, each in a thread of its own."""

    def __init__(self) -> None:
        self.door = MeetingDoor()
        self.meeting = self.door.meeting(b"", KEY)
        self.attending = {name: Attendance(self.door.address, KEY, name, NAMES[0], LIMIT) for name in NAMES}
        self.said: dict[str, str] = {}
        self._threads: list[threading.Thread] = []

    def vote(self, names: Sequence[str], epoch: int = 7, patience: float = LIMIT) -> None:
        for name in names:
            thread = threading.Thread(target=self._vote, args=(name, epoch, patience))
            thread.start()
            self._threads.append(thread)

    def _vote(self, name: str, epoch: int, patience: float) -> None:
        try:
            wait_for_go(self.attending[name], epoch, patience, LIMIT)
            self.said[name] = "go"
        except CkptEngineError as error:
            self.said[name] = error.problem.message

    def ended(self) -> dict[str, str]:
        for thread in self._threads:
            thread.join(LIMIT)
        self._threads.clear()
        said, self.said = self.said, {}
        return said

    def voted(self, *names: str) -> None:
        """Waits until these have voted."""
        for name in names:
            while not self.attending[name].ballot(7, "ask").voted:
                pass


@pytest.fixture
def votes() -> Iterator[Votes]:
    made = Votes()
    try:
        yield made
    finally:
        made.ended()
        for each in made.attending.values():
            each.close()
        made.door.close()


def test_all_begin_when_all_have_voted_epoch_after_epoch(votes: Votes) -> None:
    for epoch in (7, 8):
        votes.vote(NAMES[1:], epoch)
        votes.meeting.open_ballot(epoch, NAMES)  # also if some are there before it is open
        votes.vote(NAMES[:1], epoch)
        assert votes.ended() == dict.fromkeys(NAMES, "go")
        assert votes.meeting.blamed(epoch) == ()


@pytest.mark.parametrize("ending", ["go", "leave", "lost"])
def test_an_answer_is_kept_back_until_something_is_decided(ending: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All engines are paused meanwhile: a member hears of *go* when it is written, not when it would ask next."""
    monkeypatch.setattr(meeting, "CALL_SECONDS", 4 * LIMIT)
    door = MeetingDoor()
    opened = door.meeting(b"", KEY, 100 * LIMIT)
    first, second = [Attendance(door.address, KEY, name, NAMES[0], LIMIT) for name in NAMES[:2]]
    answers: queue.SimpleQueue[BallotAnswer] = queue.SimpleQueue()

    def ask() -> None:
        answers.put(second.ballot(7, "ask", hold=2 * LIMIT))  # until it is open
        answers.put(second.ballot(7, "vote", until=time.monotonic() + 100 * LIMIT, hold=2 * LIMIT))

    thread = threading.Thread(target=ask)
    thread.start()
    with pytest.raises(queue.Empty):
        answers.get(timeout=0.2)
    opened.open_ballot(7, NAMES[:2])
    assert answers.get(timeout=LIMIT).clock is not None
    while "worker 1" in opened._ballots.open(7, ()).missing:
        time.sleep(0.001)
    with pytest.raises(queue.Empty):
        answers.get(timeout=0.2)
    if ending == "lost":
        first._socket.close()
    elif ending == "leave":
        first.ballot(7, "leave", why="failed: no room")
    else:
        assert first.ballot(7, "vote", until=time.monotonic() + 100 * LIMIT).word is Word.GO
    told = answers.get(timeout=LIMIT)
    assert (told.word, told.voted) == (Word.GO if ending == "go" else Word.NO, True)
    assert told.why == {"go": "", "leave": "rank 0 failed: no room", "lost": "rank 0 lost its connection"}[ending]
    thread.join(LIMIT)
    second.close()
    first.close()
    door.close()


def test_who_waits_asks_seldom(votes: Votes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two members that wait for the third: one question at most for each time that an answer is kept back."""
    asked: Counter[str] = Counter()
    ballot = Attendance.ballot

    def counted(attendance: Attendance, epoch: int, verb: str, **given: Any) -> BallotAnswer:
        asked[attendance.name] += 1
        return ballot(attendance, epoch, verb, **given)

    monkeypatch.setattr(Attendance, "ballot", counted)
    votes.meeting.open_ballot(7, NAMES)
    began = time.monotonic()
    votes.vote(NAMES[1:])
    time.sleep(1.0)
    votes.vote(NAMES[:1])
    assert votes.ended() == dict.fromkeys(NAMES, "go")
    most = 3 + (time.monotonic() - began) / HOLD_SECONDS
    assert max(asked.values()) <= most, f"{asked}, where {most:.0f} are enough"


def test_nobody_begins_when_one_does_not_vote(votes: Votes) -> None:
    votes.meeting.open_ballot(7, NAMES)
    votes.vote(NAMES[1:2], patience=0.05)
    votes.vote(NAMES[:1])
    said = votes.ended()
    assert said.keys() == set(NAMES[:2])
    for each in said.values():
        assert each.startswith("the collective does not begin: ")
        assert "worker 2" in each
    assert "worker 2" in votes.meeting.blamed(7)


def test_who_cannot_begin_says_so_and_nobody_waits(votes: Votes) -> None:
    """Also before the lead has opened the ballot."""
    votes.attending["worker 2"].ballot(7, "leave", why="has another plan", blamed=["rank 0"])
    votes.meeting.open_ballot(7, NAMES)
    votes.vote(NAMES[:2])
    assert set(votes.ended().values()) == {"the collective does not begin: worker 2 has another plan"}
    assert votes.meeting.blamed(7) == ("rank 0",)


def test_a_connection_that_ends_after_its_vote_ends_all(votes: Votes) -> None:
    votes.meeting.open_ballot(7, NAMES)
    votes.vote(NAMES[:2])
    votes.voted(*NAMES[:2])
    votes.attending["worker 2"].ballot(7, "ask")
    votes.attending["worker 2"]._socket.close()
    assert set(votes.ended().values()) == {"the collective does not begin: worker 2 lost its connection"}


def test_a_lead_that_is_gone_lets_all_go_back(votes: Votes) -> None:
    votes.meeting.open_ballot(7, NAMES)
    votes.vote(NAMES[1:])
    votes.voted(*NAMES[1:])
    votes.meeting.close()
    for each in votes.ended().values():
        assert "is gone" in each or "the lead has ended the meeting" in each, (
            "it may hear that before its connection ends"
        )


def test_a_member_of_an_epoch_that_is_over_is_told_so(votes: Votes) -> None:
    votes.meeting.open_ballot(7, NAMES)
    votes.meeting.open_ballot(8, NAMES)
    votes.vote(NAMES[:1], 6)
    assert votes.ended() == {"rank 0": "the collective does not begin: epoch 6 was overtaken by 8"}


def test_who_runs_hears_that_a_member_will_not_which_has_not_begun_to_run(votes: Votes) -> None:
    """It may have failed, or be stopped, between *go* and its first exchange, for which the others wait."""
    votes.meeting.open_ballot(7, NAMES)
    votes.vote(NAMES)
    assert votes.ended() == dict.fromkeys(NAMES, "go")
    assert votes.attending["worker 1"].hear(running=True) == ""
    votes.attending["worker 2"].ballot(7, "leave", why="lost its mind")
    assert votes.attending["worker 1"].hear(running=True) == "worker 2 lost its mind"
    assert votes.meeting.blamed(7) == ("worker 2",)


def go(votes: Votes) -> None:
    votes.meeting.open_ballot(7, NAMES)
    votes.vote(NAMES)
    assert votes.ended() == dict.fromkeys(NAMES, "go")


def dies(votes: Votes, name: str) -> None:
    """Its connection ends, and the meeting has noticed."""
    votes.attending[name]._socket.close()
    while len(votes.meeting._connections) == len(NAMES):
        time.sleep(0.001)


@pytest.mark.parametrize("is_done", [True, False])
def test_who_is_done_and_dies_ends_nothing_but_what_comes_later(is_done: bool, votes: Votes) -> None:
    go(votes)
    for name in NAMES:
        assert votes.attending[name].hear(running=True) == ""
    if is_done:
        votes.attending["worker 2"].hear(running=False)
        votes.attending["worker 2"].ballot(7, "done")
    dies(votes, "worker 2")
    why = "worker 2 lost its connection"
    assert votes.attending["worker 1"].hear(running=True) == ("" if is_done else why)
    assert votes.attending["worker 1"].broken() == why
    assert votes.meeting.blamed(7) == (() if is_done else ("worker 2",))
    for name in NAMES[:2]:
        votes.attending[name].ballot(7, "done")
    assert votes.meeting.failed(7) == ("" if is_done else why)
    votes.meeting.open_ballot(8, NAMES)
    votes.vote(NAMES[:2], 8)
    assert set(votes.ended().values()) == {f"the collective does not begin: {why}"}
    assert votes.meeting.blamed(8) == ("worker 2",)


def test_a_member_that_has_left_in_good_order_begins_nothing_more(votes: Votes) -> None:
    go(votes)
    assert votes.attending["worker 1"].broken() == ""
    votes.attending["worker 2"].close()
    assert votes.attending["worker 1"].broken() == "worker 2 has left"
    votes.meeting.open_ballot(8, NAMES)
    assert votes.meeting.blamed(8) == ("worker 2",)


def test_who_gives_up_asks_no_more_often_than_before(votes: Votes, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ballot is never opened."""
    asked = 0
    ballot = Attendance.ballot

    def counted(*given: Any, **more: Any) -> BallotAnswer:
        nonlocal asked
        asked += 1
        return ballot(*given, **more)

    monkeypatch.setattr(Attendance, "ballot", counted)
    with pytest.raises(CkptEngineError, match="nothing was heard of a decision"):
        wait_for_go(votes.attending["worker 1"], 7, 0.01, 0.4)
    assert asked <= 0.4 / ASK_SECONDS


def test_a_question_that_fails_lets_go_of_the_connection(votes: Votes) -> None:
    votes.meeting.close()
    with pytest.raises(CkptEngineError, match="is gone"):
        votes.attending["worker 1"].hear(running=False)
    assert votes.attending["worker 1"]._socket.fileno() == -1
    votes.attending["worker 1"].close()
