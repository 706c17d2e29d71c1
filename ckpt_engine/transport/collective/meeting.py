"""Where the members of a collective meet: they find each other here, and all hear of it when one of them fails.

The lead, one of the members, keeps the meeting in its process; every member attends it over one connection. It holds
words (what Gloo and NCCL need to find their peers), the ballots in which they agree to begin, and one word that ends
everything: why the collective was ended. It is written once: by a member that fails, or by the meeting for one whose
connection ends or that is not heard while it runs. Whoever attends asks again and again. No weights pass through here.
Any thread; each call has a limit of its own.
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
from ckpt_engine.transport.collective.asking import Voted, answer_of, voted
from ckpt_engine.transport.collective.frames import (
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
    WHO,
    WHOLE,
    frame,
    message,
    read,
    tune,
    write,
)

SILENCE_SECONDS = 5.0
"""A member that runs and is not heard for so long counts as gone."""

_HOLDS_IN_SILENCE = 20
"""A member whose answer is kept back is heard so often, at least, before it would count as gone."""

_MOST_WORDS = 1 << 14
"""Far more than Gloo and NCCL write, which is one a member or two."""

Told = TypeVar("Told")

_POLL_SECONDS = 0.005
_KNOCK_SECONDS = 0.05


class Meeting:
    """What the members of one communicator tell each other, in the lead's process. Any thread."""

    def __init__(self, silence: float = SILENCE_SECONDS) -> None:
        self._silence = silence
        self._lock = threading.Lock()
        self._decided = threading.Condition(self._lock)  # a ballot was opened or decided: answers wait for it
        self._words: dict[str, bytes] = {}
        self._looked = 0.0  # when a member that runs was last heard
        self._why = ""
        self._blamed: tuple[str, ...] = ()
        self._spoilt = ""  # why nobody can begin another epoch, although what goes on may come to its end
        self._reached: dict[str, str] = {}  # members: the address of this host that they came to
        self._there: set[str] = set()
        self._heard: dict[str, float] = {}  # of those that run
        self._begun: Counter[str] = Counter()  # runs
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

    def over(self, epoch: int, now: float) -> bool:
        """Whether nobody has anything to do any more in an epoch, or there is no ballot of it. To be asked often by who
        waits for that: members that are silent are noticed here. now: monotonic seconds."""
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
        """Ends it for all. May be repeated."""
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
            self._there.add(name)
            self._reached[name] = address
        left = False
        try:
            write(connection, IN)
            while not left:
                kind, key, value = read(connection)
                with self._lock:
                    found = self._answer(name, kind, key, value)
                left = kind == BYE
                write(connection, found)
        finally:
            with self._lock:
                self._connections.discard(connection)
                if not left and not self._closed:
                    self._lost(name)

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
                other for other in sorted(self._there) if self._begun[other] < max(self._begun.values(), default=0)
            ]
            none = f"; {', '.join(behind)} had not begun" if behind else ""
            self._end(value.decode(errors="replace") + none, *(behind or [name]))
        elif kind == BALLOT:
            return self._voted(name, voted(value))
        elif kind == REST:
            self._heard.pop(name, None)
        elif kind == HEAR:
            self._begun[name] += name not in self._heard
            now = time.monotonic()
            if now - self._looked > self._silence / 2:
                # Nobody was heard: it is the lead that was away, and what others said waits to be read.
                self._heard = dict.fromkeys(self._heard, now)
            self._heard[name] = self._looked = now
            self._ballots.heard(name, now)
            if why := self._ballots.aborted():  # also because of one that has not run yet, and is not heard
                self._end(why)
            for other, when in self._heard.items():
                if now - when > self._silence:
                    self._end(f"{other} was not heard for {self._silence:g} s", other)
        elif kind == WHO:
            return json.dumps(sorted(self._there)).encode()
        elif kind == REACHED:
            return json.dumps(self._reached).encode()
        elif kind == BYE:
            self._there.discard(name)
            self._heard.pop(name, None)
            self._ballots.lost(name)
            self._decided.notify_all()
            self._spoil(f"{name} has left", name)
            return b""
        elif kind == WHOLE:
            return (self._why or self._spoilt).encode()
        return self._why.encode()

    def _voted(self, name: str, asked: Voted) -> bytes:
        """The answer to a member; kept back for as long as it allows if it would only say that nothing is decided."""
        answer = self._said(name, asked)
        if answer.word is not Word.UNDECIDED:
            self._decided.notify_all()
        until = time.monotonic() + min(asked.hold, self._silence / _HOLDS_IN_SILENCE)
        while answer.word is Word.UNDECIDED and (answer.voted or answer.clock is None):
            if (left := until - time.monotonic()) <= 0:
                break
            self._decided.wait(left)
            answer = self._said(name, asked._replace(verb="ask"))
        return json.dumps({**asdict(answer), "word": answer.word.value}).encode()

    def _said(self, name: str, asked: Voted) -> BallotAnswer:
        verb, now = asked.verb, time.monotonic()
        ballot = self._ballots.find(asked.epoch)
        if verb == "leave":
            return self._ballots.leave(asked.epoch, name, asked.why, now, asked.blamed)
        if isinstance(ballot, BallotAnswer):
            return ballot
        if verb == "vote":
            return ballot.vote(name, asked.until, now)
        if verb == "give up":
            return ballot.give_up(name, now)
        return ballot.done(name, now) if verb == "done" else ballot.ask(name, now)

    def _lost(self, name: str) -> None:
        why = f"{name} lost its connection"
        if self._ballots.is_done(name):  # nobody needs it any more in this epoch
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
        """name: this member's. lead: who keeps the meeting, as messages name it. seconds: to reach it, and until it
        has opened the meeting of this communicator: else DEADLINE_EXCEEDED."""
        self.name = name
        self._lead = lead
        self._lock = threading.Lock()
        self._lost = ""
        stop_at = time.monotonic() + seconds
        while True:
            self._socket = self._connected(address, stop_at - time.monotonic())
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
        """Writes a word for all."""
        self._call(SET, key, value)

    def get(self, key: str) -> bytes | None:
        """A word; None if nobody has written it."""
        found = self._call(GET, key)
        return found[1:] if found[:1] == b"1" else None

    def wait(self, key: str, stop_at: float, members: Mapping[str, object]) -> bytes:
        """A word, once somebody has written it. stop_at: monotonic seconds. members: names of all, for the message.

        Raises DEADLINE_EXCEEDED, naming who did not come, and UNAVAILABLE if the collective was ended.
        """
        while True:
            found = self.get(key)
            if found is not None:
                return found
            if why := self.hear(running=False):
                raise unavailable(f"the collective was ended: {why}")
            if time.monotonic() > stop_at:
                raise self.late(members)
            time.sleep(_POLL_SECONDS)

    def late(self, members: Mapping[str, object]) -> CkptEngineError:
        """DEADLINE_EXCEEDED: a collective was not made in time; names the members that have not come."""
        missing = [name for name in members if name not in self.there()]
        who = f"{', '.join(missing)} did not come" if missing else "all had come, and one did not answer"
        return deadline(f"the collective was not made in time: {who}")

    def there(self) -> list[str]:
        """Names of the members that attend."""
        return [str(name) for name in self._told(WHO, "", list)]

    def reached(self) -> dict[str, str]:
        """The address of the lead's host to which each member came, by member."""
        return {str(name): str(address) for name, address in self._told(REACHED, "", dict).items()}

    def hear(self, running: bool) -> str:
        """Why the collective was ended; empty: it was not. running: this member has to be heard from now on."""
        return self._call(HEAR if running else REST, "").decode(errors="replace")

    def broken(self) -> str:
        """Why these members can begin nothing more together; empty: they can."""
        return self._call(WHOLE, "").decode(errors="replace")

    def end(self, why: str, late: bool = False) -> str:
        """Ends the collective for all, unless it was ended; returns the reason that stands. late: this member's time
        is over, which is the fault of those who have not begun, if there are any."""
        return self._call(LATE if late else END, "", why.encode()).decode(errors="replace")

    def ballot(self, epoch: int, verb: str, **given: float | str | Sequence[str]) -> BallotAnswer:
        """Says "ask", "vote" (until), "give up", "leave" (why, blamed) or "done" to the ballot of an epoch.

        hold, of the first two: seconds for which the lead may keep an answer back that would only say that the ballot
        is not open, or that this member has voted and nothing is decided."""
        told = self._told(BALLOT, json.dumps({"epoch": epoch, "verb": verb, **given}), dict)
        try:
            return answer_of(told)
        except ValueError as error:
            raise self._nonsense(error) from error

    def close(self) -> None:
        """Leaves in good order: that ends nothing. Never raises. May be repeated."""
        with contextlib.suppress(CkptEngineError):
            self._call(BYE, "")
        self._socket.close()

    def _connected(self, address: tuple[str, int], seconds: float) -> socket.socket:
        try:
            made = socket.create_connection(address, timeout=max(0.001, seconds))
        except OSError as error:
            raise unavailable(
                f"{self._lead}, which keeps the collective's meeting, cannot be reached: {error}"
            ) from error
        made.settimeout(CALL_SECONDS)
        tune(made)
        return made

    def _told(self, kind: bytes, asked: str, shape: type[Told]) -> Told:
        """What is answered to a question, which has to be JSON of one shape."""
        try:
            found = load_json(self._call(kind, "", asked.encode()))
        except ValueError as error:
            raise self._nonsense(error) from error
        if not isinstance(found, shape):
            raise self._nonsense(f"no {shape.__name__}")
        return found

    def _nonsense(self, why: object) -> CkptEngineError:
        return unavailable(f"{self._lead}, which keeps the collective's meeting, answers nonsense ({why})")

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
