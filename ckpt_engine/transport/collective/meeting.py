"""Where the members of a collective meet: they find each other here, and all hear of it when one of them fails.

The lead, one of the members, keeps the meeting in its process; every member attends it over one connection. It holds
words (what Gloo and NCCL need to find their peers), the ballots in which they agree to begin, and one word that ends
everything: why the collective was ended. It is written once: by a member that fails, or by the meeting for one whose
connection ends or that is not heard while it runs. Whoever attends asks again and again. No weights pass through here.
Any thread; each call has a limit of its own.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ckpt_engine.core.arming import Answer, Ballot, Ballots, Word
from ckpt_engine.core.problems import CkptEngineError, deadline, internal, unavailable

KEY_BYTES = 32
"""Of the key that every member has to show; whoever makes the schedule makes it at random."""

SILENCE_SECONDS = 5.0
"""A member that runs and is not heard for so long counts as gone."""

CALL_SECONDS = 5.0
"""What one question to the meeting may take; after it, the lead counts as gone."""

LONGEST_WORD = 64 << 10
"""Bytes of a message; NCCL's id has 128, Gloo's addresses some hundred."""

_POLL_SECONDS = 0.005
_HEADER = struct.Struct(">I")
_KEY = struct.Struct(">cH")
_HELLO, _SET, _GET, _END, _HEAR, _REST, _WHO, _BYE, _LATE = b"h", b"s", b"g", b"e", b"r", b"i", b"w", b"b", b"l"
_BALLOT = b"v"


class Meeting:
    """The lead's side: a thread a member. Words live as long as it does. Any thread."""

    def __init__(self, key: bytes, address: str = "127.0.0.1", silence: float = SILENCE_SECONDS) -> None:
        """address: of the interface to listen on. Raises OSError if nobody can listen there."""
        self._key = key
        self._silence = silence
        self._lock = threading.Lock()
        self._words: dict[str, bytes] = {}
        self._looked = 0.0  # when a member that runs was last heard
        self._why = ""
        self._there: set[str] = set()
        self._heard: dict[str, float] = {}  # of those that run
        self._begun: Counter[str] = Counter()  # runs
        self._ballots = Ballots(silence)
        self._connections: set[socket.socket] = set()
        self._closed = False
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family)
        self.address: tuple[str, int] = address, self._listener.getsockname()[1]
        threading.Thread(target=self._accept, name="ckpt-engine meeting", daemon=True).start()

    def open_ballot(self, epoch: int, members: Sequence[str]) -> None:
        """From now on all members may vote on beginning this epoch (core/arming.py)."""
        with self._lock:
            self._ballots.open(epoch, members)
            if self._why:
                self._ballots.failed((), self._why)

    def blamed(self, epoch: int) -> tuple[str, ...]:
        """The members because of which an epoch did not begin, or ended badly."""
        with self._lock:
            found = self._ballots.find(epoch)
        return found.blamed if isinstance(found, Ballot) else ()

    def close(self) -> None:
        """Ends it for all. May be repeated."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._connections.add(connection)
            threading.Thread(target=self._serve, args=(connection,), name="ckpt-engine member", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        name = ""
        try:
            connection.settimeout(CALL_SECONDS)
            kind, member, shown = _read(connection)
            if kind != _HELLO or not hmac.compare_digest(shown, self._key):
                return
            connection.settimeout(None)
            name = member
            with self._lock:
                self._there.add(name)
            _write(connection, b"")
            while True:
                kind, key, value = _read(connection)
                with self._lock:
                    found = self._answer(name, kind, key, value)
                _write(connection, found)
                if kind == _BYE:
                    name = ""
                    return
        except (OSError, ValueError):
            return  # it is told below
        finally:
            connection.close()
            with self._lock:
                self._connections.discard(connection)
                if name and not self._closed:
                    self._end(f"{name} lost its connection", name)

    def _answer(self, name: str, kind: bytes, key: str, value: bytes) -> bytes:
        if kind == _SET:
            self._words[key] = value
        elif kind == _GET:
            return b"1" + self._words[key] if key in self._words else b"0"
        elif kind == _END:
            self._end(value.decode(errors="replace"), name)
        elif kind == _LATE:
            behind = [other for other in sorted(self._there) if self._begun[other] < max(self._begun.values())]
            none = f"; {', '.join(behind)} had not begun" if behind else ""
            self._end(value.decode(errors="replace") + none, *(behind or [name]))
        elif kind == _BALLOT:
            return self._voted(name, json.loads(value))
        elif kind == _REST:
            self._heard.pop(name, None)
        elif kind == _HEAR:
            self._begun[name] += name not in self._heard
            now = time.monotonic()
            if now - self._looked > self._silence / 2:
                # Nobody was heard: it is the lead that was away, and what others said waits to be read.
                self._heard = dict.fromkeys(self._heard, now)
            self._heard[name] = self._looked = now
            self._ballots.heard(name, now)
            for other, when in self._heard.items():
                if now - when > self._silence:
                    self._end(f"{other} was not heard for {self._silence:g} s", other)
        elif kind == _WHO:
            return json.dumps(sorted(self._there)).encode()
        elif kind == _BYE:
            self._there.discard(name)
            self._heard.pop(name, None)
            self._ballots.lost(name)
            return b""
        return self._why.encode()

    def _voted(self, name: str, asked: Mapping[str, Any]) -> bytes:
        epoch, verb, now = int(asked["epoch"]), asked["verb"], time.monotonic()
        ballot = self._ballots.find(epoch)
        if verb == "leave":
            answer = self._ballots.leave(epoch, name, str(asked["why"]), now, asked.get("blamed", ()))
        elif isinstance(ballot, Answer):
            answer = ballot
        elif verb == "vote":
            answer = ballot.vote(name, float(asked["until"]), now)
        elif verb == "give up":
            answer = ballot.give_up(name, now)
        else:
            answer = ballot.done(name, now) if verb == "done" else ballot.ask(name, now)
        return json.dumps({**asdict(answer), "word": answer.word.value}).encode()

    def _end(self, why: str, *blamed: str) -> None:
        self._why = self._why or why
        self._ballots.failed(blamed, why)


class Attendance:
    """A member's side. Any thread; raises UNAVAILABLE, naming the lead, once the meeting cannot be reached."""

    def __init__(self, address: tuple[str, int], key: bytes, name: str, lead: str, seconds: float) -> None:
        """name: this member's. lead: who keeps the meeting, as messages name it. seconds: to reach it."""
        self.name = name
        self._lead = lead
        self._lock = threading.Lock()
        self._lost = ""
        self._socket = self._connected(address, seconds)
        self._call(_HELLO, name, key)

    def set(self, key: str, value: bytes) -> None:
        """Writes a word for all."""
        self._call(_SET, key, value)

    def get(self, key: str) -> bytes | None:
        """A word; None if nobody has written it."""
        found = self._call(_GET, key)
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
        found: list[str] = json.loads(self._call(_WHO, ""))
        return found

    def hear(self, running: bool) -> str:
        """Why the collective was ended; empty: it was not. running: this member has to be heard from now on."""
        return self._call(_HEAR if running else _REST, "").decode()

    def end(self, why: str, late: bool = False) -> str:
        """Ends the collective for all, unless it was ended; returns the reason that stands. late: this member's time
        is over, which is the fault of those who have not begun, if there are any."""
        return self._call(_LATE if late else _END, "", why.encode()).decode()

    def ballot(self, epoch: int, verb: str, **given: float | str | Sequence[str]) -> Answer:
        """Says "ask", "vote" (until), "give up", "leave" (why, blamed) or "done" to the ballot of an epoch."""
        told = json.loads(self._call(_BALLOT, "", json.dumps({"epoch": epoch, "verb": verb, **given}).encode()))
        return Answer(**{**told, "word": Word(told["word"])})

    def close(self) -> None:
        """Leaves in good order: that ends nothing. Never raises. May be repeated."""
        with contextlib.suppress(CkptEngineError):
            self._call(_BYE, "")
        self._socket.close()

    def _connected(self, address: tuple[str, int], seconds: float) -> socket.socket:
        try:
            made = socket.create_connection(address, timeout=max(0.001, seconds))
        except OSError as error:
            raise unavailable(
                f"{self._lead}, which keeps the collective's meeting, cannot be reached: {error}"
            ) from error
        made.settimeout(CALL_SECONDS)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return made

    def _call(self, kind: bytes, key: str, value: bytes = b"") -> bytes:
        keeper = f"{self._lead}, which keeps the collective's meeting,"
        with self._lock:
            try:
                if not self._lost:
                    _write(self._socket, _KEY.pack(kind, len(key.encode())) + key.encode() + value)
                    return _frame(self._socket)
            except TimeoutError:
                self._lost = f"{keeper} did not answer for {CALL_SECONDS:g} s"
            except OSError as error:
                self._lost = f"{keeper} is gone ({error})"
            raise unavailable(self._lost)  # also from now on: a late answer would be taken for that of another question


def _write(connection: socket.socket, data: bytes) -> None:
    if len(data) > LONGEST_WORD:
        raise internal(f"a word of {len(data)} bytes is longer than {LONGEST_WORD}")
    connection.sendall(_HEADER.pack(len(data)) + data)


def _read(connection: socket.socket) -> tuple[bytes, str, bytes]:
    """Kind, key and value. Raises ValueError for what is no message."""
    data = _frame(connection)
    if len(data) < _KEY.size:
        raise ValueError("a message without a head")
    kind, length = _KEY.unpack_from(data)
    end = _KEY.size + length
    return kind, data[_KEY.size : end].decode(), data[end:]


def _frame(connection: socket.socket) -> bytes:
    """What one message holds. Raises ConnectionError if the other side has ended the connection."""
    (length,) = _HEADER.unpack(_exactly(connection, _HEADER.size))
    if length > LONGEST_WORD:
        raise ConnectionError(f"a message of {length} bytes")
    return _exactly(connection, length)


def _exactly(connection: socket.socket, length: int) -> bytes:
    data = bytearray()
    while len(data) < length:
        part = connection.recv(length - len(data))
        if not part:
            raise ConnectionError("the connection was ended")
        data += part
    return bytes(data)
