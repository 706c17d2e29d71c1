"""Where the members of a collective meet: they find each other here, and all hear of it when one of them fails.

The lead, one of the members, keeps the meeting in its process; every member attends it over one connection. The meeting
holds words (what Gloo and NCCL need to find their peers), the ballots in which members agree to begin, and the reason
why the collective was ended. That reason is written once: by a member that fails, or by the meeting for a member whose
connection ends or that falls silent while it runs. Members poll. No weights pass through here. Any thread; each call
has a limit of its own.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TypeVar

from ckpt_engine.core.arming import Ballot, BallotAnswer, Ballots, Word
from ckpt_engine.core.json_text import load_json
from ckpt_engine.core.problems import CkptEngineError, deadline, unavailable
from ckpt_engine.transport.collective.asking import BallotMessage, answer_of, read_ballot_message
from ckpt_engine.transport.collective.frames import (
    ATTENDEES,
    BALLOT,
    BYE,
    CALL_SECONDS,
    END,
    GET,
    HEAR,
    HELLO,
    IN,
    LATE,
    REACHED,
    REST,
    SET,
    WHOLE,
    frame,
    message,
    read,
    tune,
    write,
)

SILENCE_SECONDS = 5.0
"""A running member that is silent for so long counts as gone."""

_HOLDS_IN_SILENCE = 20
"""A member whose answer is held back is still heard this often, at least, before it would count as gone."""

_MOST_WORDS = 1 << 14
"""Far more than Gloo and NCCL write, which is one or two a member."""

Shape = TypeVar("Shape")

_POLL_SECONDS = 0.005
_KNOCK_SECONDS = 0.05


class Meeting:
    """The lead's side: what the members of one communicator share. Any thread."""

    def __init__(self, silence: float = SILENCE_SECONDS) -> None:
        self._silence = silence
        self._lock = threading.Lock()
        self._decided = threading.Condition(self._lock)  # a ballot was opened or decided: answers wait for it
        self._words: dict[str, bytes] = {}
        self._heard_at = 0.0  # when any running member was last heard
        self._why = ""
        self._blamed: tuple[str, ...] = ()
        self._spoilt = ""  # why no further epoch can begin, although the current one may still end well
        self._reached: dict[str, str] = {}  # by member: the address of this host that it connected to
        self._attendees: set[str] = set()
        self._running: dict[str, float] = {}  # by member that runs: when it was last heard
        self._run_counts: Counter[str] = Counter()  # by member: runs that it has begun
        self._ballots = Ballots(silence)
        self._connections: set[socket.socket] = set()
        self._closed = False

    def open_ballot(self, epoch: int, members: Sequence[str]) -> None:
        """Opens the ballot: from now on all members may vote on beginning this epoch (core/arming.py)."""
        with self._lock:
            self._ballots.open(epoch, members)
            if why := self._why or self._spoilt:
                self._ballots.failed(self._blamed, why)
            self._decided.notify_all()

    def blamed(self, epoch: int) -> tuple[str, ...]:
        """The members because of which an epoch did not begin, or ended badly."""
        with self._lock:
            found = self._ballots.find(epoch)
        return found.blamed if isinstance(found, Ballot) else ()

    def is_finished(self, epoch: int, now: float) -> bool:
        """Whether every member has finished an epoch, or there is no ballot of it. Notices silent members, so the
        caller that waits for this has to poll. now: monotonic seconds."""
        with self._lock:
            found = self._ballots.find(epoch)
            if isinstance(found, Ballot):
                found.look(now)
            return not isinstance(found, Ballot) or found.finished

    def behind(self, epoch: int) -> tuple[str, ...]:
        """The members of an epoch that are not done."""
        with self._lock:
            found = self._ballots.find(epoch)
        return found.unfinished if isinstance(found, Ballot) else ()

    def failed(self, epoch: int) -> str:
        """Why an epoch that began was aborted; empty: it was not."""
        with self._lock:
            found = self._ballots.find(epoch)
        return found.why if isinstance(found, Ballot) and found.aborted else ""

    def close(self) -> None:
        """Ends the collective for all members. May be repeated."""
        with self._lock:
            self._closed = True
            self._end("the lead has ended the meeting")
            connections = list(self._connections)
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def serve(self, connection: socket.socket, name: str) -> None:
        """Answers one member until its connection ends, in a thread of its own. Raises OSError and ValueError."""
        address = str(connection.getsockname()[0])
        with self._lock:
            if self._closed:
                return
            self._connections.add(connection)
            self._attendees.add(name)
            self._reached[name] = address
        goodbye = False
        try:
            write(connection, IN)
            while not goodbye:
                kind, key, value = read(connection)
                with self._lock:
                    found = self._answer(name, kind, key, value)
                goodbye = kind == BYE
                write(connection, found)
        finally:
            with self._lock:
                self._connections.discard(connection)
                if not goodbye and not self._closed:
                    self._lose(name)

    def _answer(self, name: str, kind: bytes, key: str, value: bytes) -> bytes:
        if kind == SET:
            if len(self._words) >= _MOST_WORDS:
                raise ValueError(f"{name} writes more words than a communicator needs")
            self._words[key] = value
        elif kind == GET:
            return b"1" + self._words[key] if key in self._words else b"0"
        elif kind == END:
            self._end(value.decode(errors="replace"), name)
        elif kind == LATE:
            behind = [
                other
                for other in sorted(self._attendees)
                if self._run_counts[other] < max(self._run_counts.values(), default=0)
            ]
            none = f"; {', '.join(behind)} had not begun" if behind else ""
            self._end(value.decode(errors="replace") + none, *(behind or [name]))
        elif kind == BALLOT:
            return self._answer_ballot(name, read_ballot_message(value))
        elif kind == REST:
            self._running.pop(name, None)
        elif kind == HEAR:
            self._run_counts[name] += name not in self._running
            now = time.monotonic()
            if now - self._heard_at > self._silence / 2:
                # No member was heard: the lead itself was stopped, and messages of the members wait to be read.
                self._running = dict.fromkeys(self._running, now)
            self._running[name] = self._heard_at = now
            self._ballots.heard(name, now)
            if why := self._ballots.aborted():  # also because of one that has not run yet, and is not heard
                self._end(why)
            for other, when in self._running.items():
                if now - when > self._silence:
                    self._end(f"{other} was not heard for {self._silence:g} s", other)
        elif kind == ATTENDEES:
            return json.dumps(sorted(self._attendees)).encode()
        elif kind == REACHED:
            return json.dumps(self._reached).encode()
        elif kind == BYE:
            self._attendees.discard(name)
            self._running.pop(name, None)
            self._ballots.lost(name)
            self._decided.notify_all()
            self._spoil(f"{name} has left", name)
            return b""
        elif kind == WHOLE:
            return (self._why or self._spoilt).encode()
        return self._why.encode()

    def _answer_ballot(self, name: str, message: BallotMessage) -> bytes:
        """The answer to a member; held back for as long as the member allows while nothing is decided."""
        answer = self._ballot_answer(name, message)
        if answer.word is not Word.UNDECIDED:
            self._decided.notify_all()
        until = time.monotonic() + min(message.hold, self._silence / _HOLDS_IN_SILENCE)
        while answer.word is Word.UNDECIDED and (answer.voted or answer.clock is None):
            if (remaining := until - time.monotonic()) <= 0:
                break
            self._decided.wait(remaining)
            answer = self._ballot_answer(name, message._replace(verb="ask"))
        return json.dumps({**asdict(answer), "word": answer.word.value}).encode()

    def _ballot_answer(self, name: str, message: BallotMessage) -> BallotAnswer:
        verb, now = message.verb, time.monotonic()
        ballot = self._ballots.find(message.epoch)
        if verb == "leave":
            return self._ballots.leave(message.epoch, name, message.why, now, message.blamed)
        if isinstance(ballot, BallotAnswer):
            return ballot
        if verb == "vote":
            return ballot.vote(name, message.until, now)
        if verb == "give up":
            return ballot.give_up(name, now)
        return ballot.done(name, now) if verb == "done" else ballot.ask(name, now)

    def _lose(self, name: str) -> None:
        why = f"{name} lost its connection"
        if self._ballots.is_done(name):  # no other member needs it any more in this epoch
            self._spoil(why, name)
        else:
            self._end(why, name)

    def _end(self, why: str, *blamed: str) -> None:
        if not self._why:
            self._why, self._blamed = why, blamed
        self._ballots.failed(blamed, why)
        self._decided.notify_all()

    def _spoil(self, why: str, *blamed: str) -> None:
        if not (self._why or self._spoilt):
            self._spoilt, self._blamed = why, blamed


class Attendance:
    """A member's side. Any thread; raises UNAVAILABLE, naming the lead, once the meeting cannot be reached."""

    def __init__(
        self,
        address: tuple[str, int],
        key: bytes,
        name: str,
        lead: str,
        seconds: float,
        communicator: bytes = b"",
    ) -> None:
        """name: this member's. lead: the member that keeps the meeting, as messages name it. seconds: to reach the
        lead, and for it to open the meeting of this communicator: else DEADLINE_EXCEEDED."""
        self.name = name
        self._lead = lead
        self._lock = threading.Lock()
        self._lost = ""
        stop_at = time.monotonic() + seconds
        while True:
            self._socket = self._connect(address, stop_at - time.monotonic())
            try:
                answer = self._call(HELLO, name, key + communicator)
            except BaseException:
                self._socket.close()
                raise
            if answer == IN:
                return
            self._socket.close()
            if time.monotonic() > stop_at:
                raise deadline(f"{lead} has not opened the collective's meeting within {seconds:.3g} s")
            time.sleep(_KNOCK_SECONDS)

    @property
    def address(self) -> str:
        """The address of the interface of this host at which the lead sees this member."""
        return str(self._socket.getsockname()[0])

    def set(self, key: str, value: bytes) -> None:
        """Writes a word for all members."""
        self._call(SET, key, value)

    def get(self, key: str) -> bytes | None:
        """A word; None if no member has written it."""
        found = self._call(GET, key)
        return found[1:] if found[:1] == b"1" else None

    def wait(self, key: str, stop_at: float, members: Mapping[str, object]) -> bytes:
        """Waits for a word. stop_at: monotonic seconds. members: names of all, for the message.

        Raises DEADLINE_EXCEEDED, naming absent members, and UNAVAILABLE if the collective was ended.
        """
        while True:
            found = self.get(key)
            if found is not None:
                return found
            if why := self.hear(running=False):
                raise unavailable(f"the collective was ended: {why}")
            if time.monotonic() > stop_at:
                raise self.absence(members)
            time.sleep(_POLL_SECONDS)

    def absence(self, members: Mapping[str, object]) -> CkptEngineError:
        """DEADLINE_EXCEEDED: the collective was not made in time; names absent members."""
        missing = [name for name in members if name not in self.attendees()]
        reason = f"{', '.join(missing)} did not come" if missing else "all had come, and one did not answer"
        return deadline(f"the collective was not made in time: {reason}")

    def attendees(self) -> list[str]:
        """Names of the members that attend."""
        return [str(name) for name in self._ask(ATTENDEES, "", list)]

    def reached(self) -> dict[str, str]:
        """By member, the address of the lead's host to which it connected."""
        return {str(name): str(address) for name, address in self._ask(REACHED, "", dict).items()}

    def hear(self, running: bool) -> str:
        """Asks the lead why the collective was ended; empty: it goes on.

        running: the lead is to expect further polls from this member; False: it expects none."""
        return self._call(HEAR if running else REST, "").decode(errors="replace")

    def broken(self) -> str:
        """Asks the lead why these members cannot run another collective together; empty: they can."""
        return self._call(WHOLE, "").decode(errors="replace")

    def end(self, why: str, overdue: bool = False) -> str:
        """Ends the collective for all members; returns the reason that counts, which is the first one given.

        overdue: this member's deadline has passed; then members that have not begun are blamed, if there are any."""
        return self._call(LATE if overdue else END, "", why.encode()).decode(errors="replace")

    def ballot(self, epoch: int, verb: str, **fields: float | str | Sequence[str]) -> BallotAnswer:
        """Sends "ask", "vote" (until), "give up", "leave" (why, blamed) or "done" to the ballot of an epoch.

        "ask" and "vote" also take `hold`: the seconds for which the lead may delay its answer, while the ballot is not
        open yet ("ask") or nothing is decided ("vote")."""
        answer = self._ask(BALLOT, json.dumps({"epoch": epoch, "verb": verb, **fields}), dict)
        try:
            return answer_of(answer)
        except ValueError as error:
            raise self._nonsense(error) from error

    def close(self) -> None:
        """Leaves the meeting without ending the collective. Never raises. May be repeated."""
        with contextlib.suppress(CkptEngineError):
            self._call(BYE, "")
        self._socket.close()

    def _connect(self, address: tuple[str, int], seconds: float) -> socket.socket:
        try:
            connection = socket.create_connection(address, timeout=max(0.001, seconds))
        except OSError as error:
            raise unavailable(
                f"{self._lead}, which keeps the collective's meeting, cannot be reached: {error}"
            ) from error
        connection.settimeout(CALL_SECONDS)
        tune(connection)
        return connection

    def _ask(self, kind: bytes, question: str, shape: type[Shape]) -> Shape:
        """Asks a question; the answer must be JSON of this shape."""
        try:
            found = load_json(self._call(kind, "", question.encode()))
        except ValueError as error:
            raise self._nonsense(error) from error
        if not isinstance(found, shape):
            raise self._nonsense(f"no {shape.__name__}")
        return found

    def _nonsense(self, why: object) -> CkptEngineError:
        return unavailable(f"{self._lead}, which keeps the collective's meeting, sent an invalid answer ({why})")

    def _call(self, kind: bytes, key: str, value: bytes = b"") -> bytes:
        keeper = f"{self._lead}, which keeps the collective's meeting,"
        with self._lock:
            try:
                if not self._lost:
                    write(self._socket, message(kind, key, value))
                    return frame(self._socket)
            except TimeoutError:
                self._lost = f"{keeper} did not answer for {CALL_SECONDS:g} s"
            except OSError as error:
                self._lost = f"{keeper} is gone ({error})"
            self._socket.close()
            raise unavailable(self._lost)  # also from now on: a late answer would be taken for that of another question
