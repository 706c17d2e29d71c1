"""How the members of a collective agree to begin, and how all of them stop when one fails. Pure.

A collective (transport/collective) moves weights from GPU to GPU in one schedule that all members run together: trainer
ranks and workers. So either all of them begin or none does, and a member that stops has to stop the others.

A member *votes* once it has paused its engine, checked its plan and synchronised its device; nothing of it is DIRTY
yet. Each install epoch has one *ballot*, in the process of the lead, which is the first trainer rank. The ballot takes
the votes and writes *go* or *no*, once. The lead decides, and not the manager, since it takes part itself: whatever
kills the decider ends the collective too, and no member needs the manager or a disk between its vote and its outcome.

A vote expires at a moment of the lead's clock, which the member knows from an answer of the ballot. So a vote that
travels slowly does not expire later. *Go* is written only while the votes of all members hold and all are heard. A
member waits by its own clock for longer than its vote holds. Then it asks to be let out, which writes *no* unless *go*
is written already. If no answer comes, *go* cannot reach it any more either, and it goes back while its part has time
left. After *go* a member that fails, loses its connection or is not heard aborts the ballot. All members poll the
ballot, and stop their work when it is aborted or not heard.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from enum import Enum

DRIFT = 1.1
"""How much longer by its own clock a member waits than its vote holds; clocks of hosts differ by far less."""

KEPT_BALLOTS = 4
"""Ballots that are kept to answer late members; for an older epoch the answer is *no*."""


class Word(Enum):
    """What a ballot has decided."""

    UNDECIDED = "undecided"
    GO = "go"
    NO = "no"


@dataclass(frozen=True)
class BallotAnswer:
    """What a ballot tells a member."""

    word: Word
    clock: float | None = None  # the lead's, seconds; None: the ballot is not open
    voted: bool = False  # whether it has this member's vote
    aborted: bool = False  # after *go*: stop, and leave dirty what is not verified
    why: str = ""  # of *no*, or of the abort


NOT_OPEN = BallotAnswer(Word.UNDECIDED)


@dataclass
class Ballot:
    """The vote of one install epoch, as the lead keeps it. Times are the lead's monotonic seconds.

    Not safe for threads: its owner holds a lock.
    """

    epoch: int
    members: frozenset[str]  # names for people: "rank 0", "replica a, worker 1"
    silence: float  # seconds without a word from a member after which it counts as gone
    word: Word = Word.UNDECIDED
    aborted: bool = False
    why: str = ""  # of *no*, or of the abort
    blamed: tuple[str, ...] = ()  # members that caused *no* or the abort
    _until: dict[str, float] = field(default_factory=dict)  # when each member's vote expires
    _heard: dict[str, float] = field(default_factory=dict)  # when each member was last heard
    _done: set[str] = field(default_factory=set)
    _looked: float | None = None  # the time of the last `look`

    @property
    def missing(self) -> tuple[str, ...]:
        """Members that have not voted."""
        return tuple(sorted(self.members - self._until.keys()))

    @property
    def unfinished(self) -> tuple[str, ...]:
        """Members that are not done."""
        return tuple(sorted(self.members - self._done))

    @property
    def finished(self) -> bool:
        """Whether no member has anything left to do."""
        return self.word is Word.NO or self.aborted or (self.word is Word.GO and self._done >= self.members)

    def vote(self, member: str, until: float, now: float) -> BallotAnswer:
        """Takes a member's vote: it is ready, and stays so until then. A repeated vote does not hold longer."""
        if self.word is Word.UNDECIDED and member in self.members:
            self._until.setdefault(member, until)
        return self.ask(member, now)

    def ask(self, member: str, now: float) -> BallotAnswer:
        """Answers a member's poll, which also shows that the member is alive."""
        if member not in self.members:
            return BallotAnswer(Word.NO, now, why=f"{member} is not a member of the collective of epoch {self.epoch}")
        self.look(now, member)
        return BallotAnswer(self.word, now, member in self._until, self.aborted, self.why)

    def done(self, member: str, now: float) -> BallotAnswer:
        """Notes that a member has received and sent all bytes. It may still be verifying them."""
        if self.word is Word.GO:
            self._done.add(member)
        return self.ask(member, now)

    def leave(self, member: str, why: str, now: float, blamed: Collection[str] = ()) -> BallotAnswer:
        """Lets a member out that cannot go on. An undecided ballot becomes *no*; after *go* it is aborted, unless the
        member is done. blamed: the members that are the cause; none: the member itself."""
        self._end(member, why, blamed)
        return self.ask(member, now)

    def give_up(self, member: str, now: float) -> BallotAnswer:
        """Lets a member out that has waited for longer than its vote holds: *no*, unless the ballot is decided."""
        if self.word is Word.UNDECIDED:
            late_members = self.missing or (member,)
            self._write(f"{_and(late_members)} had not voted when {member} stopped waiting", late_members)
        return self.ask(member, now)

    def lost(self, member: str) -> None:
        """Ends the ballot since a member lost its connection: its vote means nothing any more."""
        if member in self._heard:
            self._end(member, "lost its connection")

    def overtaken(self, epoch: int) -> None:
        """Ends the ballot since another install began."""
        if not self.finished:
            self._write(f"it was overtaken by epoch {epoch}", ())

    def look(self, now: float, asks: str = "") -> None:
        """Decides what can be decided now. Call it at least twice in `silence`, also when no member asks.
        asks: the member that asks now; empty: none."""
        if self._looked is not None and now - self._looked > self.silence / 2:
            # The lead itself was stalled, and messages wait to be read. Votes expire all the same.
            self._heard = dict.fromkeys(self._heard, now)
        self._looked = now
        if asks:
            self._heard[asks] = now
        if self.finished:
            return
        for member in sorted(self._heard.keys() - self._done):
            if now - self._heard[member] > self.silence:
                self._end(member, f"was not heard for {self.silence:g} s")
                return
        if self.word is Word.GO:
            return
        if any(now >= until for until in self._until.values()):
            late_members = self.missing or tuple(sorted(self._until))
            self._write(f"{_and(late_members)} had not voted in time", late_members)
        elif not self.missing:
            self.word = Word.GO

    def _end(self, member: str, why: str, blamed: Collection[str] = ()) -> None:
        if not self.finished and member in self.members - self._done:
            self._write(f"{member} {why}", tuple(sorted(blamed)) or (member,))

    def _write(self, why: str, blamed: tuple[str, ...]) -> None:
        """Writes *no* or an abort; nothing else does."""
        if self.word is Word.UNDECIDED:
            self.word = Word.NO
        else:
            self.aborted = True
        self.why, self.blamed = why, blamed


class Ballots:
    """All ballots of one lead, by epoch. Only the highest epoch's ballot can be undecided or under way."""

    def __init__(self, silence: float) -> None:
        self._silence = silence
        self._ballots: dict[int, Ballot] = {}
        # By epoch: members that left before the ballot was open, each with the reason and the members it blamed.
        self._departures: dict[int, dict[str, tuple[str, Collection[str]]]] = {}

    def open(self, epoch: int, members: Collection[str]) -> Ballot:
        """The ballot of an epoch, made if there is none, which ends the ballots of lower epochs."""
        if epoch in self._ballots:
            return self._ballots[epoch]
        ballot = Ballot(epoch, frozenset(members), self._silence)
        highest = max(self._ballots, default=0)
        if epoch < highest:
            ballot.overtaken(highest)
            return ballot
        for before in self._ballots.values():
            before.overtaken(epoch)
        for member, (why, blamed) in self._departures.pop(epoch, {}).items():
            ballot._end(member, why, blamed)
        self._departures = {number: departures for number, departures in self._departures.items() if number > epoch}
        self._ballots[epoch] = ballot
        for number in sorted(self._ballots)[:-KEPT_BALLOTS]:
            del self._ballots[number]
        return ballot

    def find(self, epoch: int) -> Ballot | BallotAnswer:
        """The ballot of an epoch; without one, the answer for its members: not open yet, or overtaken."""
        highest = max(self._ballots, default=0)
        if epoch not in self._ballots and epoch < highest:
            return BallotAnswer(Word.NO, why=f"epoch {epoch} was overtaken by {highest}")
        return self._ballots.get(epoch, NOT_OPEN)

    def leave(self, epoch: int, member: str, why: str, now: float, blamed: Collection[str] = ()) -> BallotAnswer:
        """Lets a member out, as `Ballot.leave`; remembered if the ballot is not open yet."""
        ballot = self.find(epoch)
        if isinstance(ballot, Ballot):
            return ballot.leave(member, why, now, blamed)
        if ballot is NOT_OPEN:
            self._departures.setdefault(epoch, {})[member] = why, tuple(blamed)
            for number in sorted(self._departures)[:-KEPT_BALLOTS]:
                del self._departures[number]
        return ballot

    def heard(self, member: str, now: float) -> None:
        """Notes that a member is alive."""
        for ballot in self._ballots.values():
            if not ballot.finished and member in ballot.members:
                ballot.ask(member, now)

    def aborted(self) -> str:
        """Why the highest epoch was aborted after *go*; empty: it was not."""
        last = self._ballots[max(self._ballots)] if self._ballots else None
        return last.why if last is not None and last.aborted else ""

    def failed(self, blamed: Collection[str], why: str) -> None:
        """Ends what is under way. blamed: the members that are the cause."""
        for ballot in self._ballots.values():
            if not ballot.finished:
                ballot._write(why, tuple(sorted(blamed)))

    def is_done(self, member: str) -> bool:
        """Whether no other member needs this one any more in the highest epoch."""
        last = self._ballots[max(self._ballots)] if self._ballots else None
        return last is not None and last.word is Word.GO and member in last._done

    def lost(self, member: str) -> None:
        """Ends the ballots of a member that lost its connection."""
        for ballot in self._ballots.values():
            ballot.lost(member)

    def look(self, now: float) -> None:
        """Decides what can be decided now."""
        for ballot in self._ballots.values():
            ballot.look(now)


class BallotStep(Enum):
    """What a member is to do now."""

    ASK = "ask"  # in a moment, and take the answer
    VOTE = "vote"  # until `Participant.until`, and take the answer
    GIVE_UP = "give up"  # ask the ballot to be let out, and take the answer
    GO = "go"  # mark DIRTY, then run the schedule, and keep asking meanwhile
    BACK = "back"  # nothing was written, and nothing will be
    STOP = "stop"  # abort the communicator; what is not verified stays DIRTY


class Participant:
    """What one member knows of its ballot. `step` says what to do; give `took` each answer of the ballot.

    Times are the member's own monotonic seconds, except `until`.
    """

    def __init__(self, patience: float, silence: float, end: float, now: float) -> None:
        """patience: seconds to wait for a decision, but at most half of the time until `end`, so that time is left to
        go back. silence: seconds without an answer after which the ballot counts as gone. end: when its part must be
        finished."""
        self.until: float | None = None  # of the lead's clock: when its vote expires; None: it cannot vote yet
        self.why = ""  # it went back or stopped
        self._silence = silence
        self._end = end
        self._patience_ends = now + min(patience, max(0.0, end - now) / 2)
        self._waits_until = self._patience_ends
        self._heard = now
        self._word = Word.UNDECIDED
        self._voted = self._stopped = self._gave_up = False

    @property
    def went(self) -> bool:
        """Whether *go* was heard."""
        return self._word is Word.GO

    @property
    def waits_until(self) -> float:
        """When it asks to be let out if the ballot is still undecided."""
        return self._waits_until

    def step(self, now: float) -> BallotStep:
        """What the member must do now."""
        if self._word is Word.NO:
            return BallotStep.BACK
        if self._word is Word.GO:
            return self._step_of_a_run(now)
        if now >= self._waits_until:
            remaining = max(0.0, self._end - self._waits_until)
            if not self._gave_up or now < self._waits_until + min(self._silence, remaining / 2):
                return BallotStep.GIVE_UP
            self.why = "nothing was heard of a decision"
            return BallotStep.BACK
        return BallotStep.ASK if self.until is None or self._voted else BallotStep.VOTE

    def _step_of_a_run(self, now: float) -> BallotStep:
        if not self._stopped and now >= self._end:
            self._stop("its time was over")
        elif not self._stopped and now - self._heard > self._silence:
            self._stop(f"the lead was not heard for {self._silence:g} s")
        return BallotStep.STOP if self._stopped else BallotStep.GO

    def took(self, answer: BallotAnswer | None, now: float, step: BallotStep = BallotStep.ASK) -> None:
        """Takes the ballot's answer to `step`; None: none came in time.

        A member never goes back without having asked to be let out: *go* may have been written since it last asked.
        """
        self._gave_up |= step is BallotStep.GIVE_UP
        if answer is None:
            return
        self._heard = now
        self._voted = answer.voted
        if self._word is Word.UNDECIDED:
            self._word, self.why = answer.word, answer.why
        if self.until is None and answer.clock is not None:
            remaining = max(0.0, self._patience_ends - now)
            self.until = answer.clock + remaining
            self._waits_until = now + remaining * DRIFT
        if answer.aborted and self.went:
            self._stop(answer.why)

    def _stop(self, why: str) -> None:
        self._stopped, self.why = True, why


def _and(names: Collection[str]) -> str:
    *first, last = sorted(names)
    return f"{', '.join(first)} and {last}" if first else last
