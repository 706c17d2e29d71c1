"""The vote over real connections: all members of a meeting begin, or none does."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import pytest

from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.transport.collective.meeting import KEY_BYTES, Attendance, Meeting
from ckpt_engine.transport.collective.voting import wait_for_go

KEY = bytes(KEY_BYTES)
LIMIT = 60.0
NAMES = ("rank 0", "worker 1", "worker 2")


class Votes:
    """Members that vote, each in a thread of its own."""

    def __init__(self) -> None:
        self.meeting = Meeting(KEY)
        self.attending = {name: Attendance(self.meeting.address, KEY, name, NAMES[0], LIMIT) for name in NAMES}
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
        made.meeting.close()


def test_all_begin_when_all_have_voted_epoch_after_epoch(votes: Votes) -> None:
    for epoch in (7, 8):
        votes.vote(NAMES[1:], epoch)
        votes.meeting.open_ballot(epoch, NAMES)  # also if some are there before it is open
        votes.vote(NAMES[:1], epoch)
        assert votes.ended() == dict.fromkeys(NAMES, "go")
        assert votes.meeting.blamed(epoch) == ()


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
        assert "rank 0, which keeps the collective's meeting, is gone" in each


def test_a_member_of_an_epoch_that_is_over_is_told_so(votes: Votes) -> None:
    votes.meeting.open_ballot(7, NAMES)
    votes.meeting.open_ballot(8, NAMES)
    votes.vote(NAMES[:1], 6)
    assert votes.ended() == {"rank 0": "the collective does not begin: epoch 6 was overtaken by 8"}
