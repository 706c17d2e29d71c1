"""Which chunk may be sent now, and to which asker: the one place that decides it. Any thread; it touches no socket.

A chunk is sent once it is verified. An origin grants each of its chunks to one asker, and names that asker to the
others, so that each byte leaves it about once. Askers that are being sent some of a slot are waited for before it is
filled again, but no longer than `slot_grace`; then nothing of it is sent any more.
"""

from __future__ import annotations

import hmac
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from ckpt_engine.core.problems import invalid, unavailable
from ckpt_engine.core.rates import Flow, Rate, rate_of
from ckpt_engine.transport.base import ChunkAsk, ChunkRuns, LentChunks
from ckpt_engine.transport.tcp.wire import TOKEN_BYTES, Hello

REPLACED = "another version is brought into its place"


@dataclass(frozen=True, eq=False)
class Asker:
    """A connection that has shown the token."""

    name: str  # of its relay, as other relays know it


@dataclass
class _ChunkGrant:
    """The asker that brings a chunk to the others."""

    asker: Asker
    served: bool = False  # whether all of it was sent


class TcpLending:
    """One version in one slot. See ChunkLending. changed: of all slots."""

    def __init__(self, lent: LentChunks, changed: threading.Condition) -> None:
        self.lent = lent
        self.pulse = 1  # grows with each sign of progress
        self.is_lent = True  # whether chunks that are being sent may still be
        self.end_reason = ""  # why no more questions are answered
        self.held: dict[Asker, list[float]] = {}  # askers that are sent something, or read it: since when, each
        self._chunks = frozenset(lent.chunks)
        self._verified: set[int] = set()
        self._never: set[int] = set()
        self._filled = False
        self._grants: dict[int, _ChunkGrant] = {}
        self._named: dict[tuple[str, int], str] = {}  # by asker's name and chunk: the relay that it was sent to
        self._changed = changed
        self._askers: set[Asker] = set()
        self._flows: dict[str, list[Flow]] = {}  # by asker's name

    # -- the filling

    def verified(self, chunk: int) -> None:
        """Notes that a chunk may be sent."""
        with self._changed:
            self._verified.add(chunk)
            self.pulse += 1
            self._changed.notify_all()

    def never(self, chunk: int) -> None:
        """Notes that a chunk will not come from here, so its askers ask another relay at once."""
        with self._changed:
            self._never.add(chunk)
            self._changed.notify_all()

    def moved(self) -> None:
        """Notes that bytes have come. Does not wait."""
        self.pulse += 1

    def finish(self) -> None:
        """Ends the filling: chunks that are missing now will not come."""
        with self._changed:
            self._filled = True
            self._changed.notify_all()

    def resume(self) -> None:
        """Notes that a finished filling goes on: chunks that are missing may still come. Those that are there are
        noted as verified again, since a filling that has failed leaves some that are to be written again."""
        with self._changed:
            self._filled = False
            self._never.clear()
            self._verified.clear()

    def end(self, why: str) -> None:
        """Ends the lending: nothing more of it is sent, except frames in flight. The first reason stays."""
        with self._changed:
            self.is_lent = False
            self.refuse(why)

    @property
    def sent(self) -> Rate | None:
        """How fast its chunks were sent by now; None if that is unknown."""
        with self._changed:
            return rate_of([list(each) for each in self._flows.values()])

    # -- its askers; under the lock

    def why_not(self, chunk: int) -> str:
        """Why a chunk is not sent, now or later; empty: it may be."""
        if self.end_reason:
            return self.end_reason
        if chunk in self._verified:
            return ""
        if chunk not in self._chunks:
            return f"chunk {chunk} is not among those that it holds of this version"
        return "no source has it as it was sealed" if self._filled or chunk in self._never else ""

    def refuse(self, why: str) -> None:
        """Answers no more questions; what is being sent goes on. The first reason stays."""
        self.end_reason = self.end_reason or why
        self._changed.notify_all()

    def has(self, chunk: int) -> bool:
        """Whether a chunk is verified, and may be sent."""
        return chunk in self._verified and not self.end_reason

    def grant(self, chunk: int, asker: Asker, another: bool) -> str:
        """Grants a chunk. Returns the name of the relay that has the grant; empty: this asker has it.

        another: the relay that this asker was sent to does not bring it, so the grant goes to this asker, unless it has
        gone to yet another one since.
        """
        grant = self._grants.get(chunk)
        if grant is None or grant.asker.name == asker.name:
            self._grants[chunk] = _ChunkGrant(asker, grant is not None and grant.served)
            return ""
        if another and self._named.get((asker.name, chunk)) == grant.asker.name:
            self._grants[chunk] = _ChunkGrant(asker)
            return ""
        self._named[asker.name, chunk] = grant.asker.name
        return grant.asker.name

    def void(self, asker: Asker, chunk: int | None = None) -> None:
        """Voids the grants of an asker, or its grant of one chunk, that were not served."""
        self._grants = {
            number: grant
            for number, grant in self._grants.items()
            if grant.served or grant.asker is not asker or chunk not in (None, number)
        }

    def hold(self, asker: Asker) -> None:
        """Begins to send a chunk."""
        self._askers.add(asker)
        self.held.setdefault(asker, []).append(time.monotonic())

    def release(self, asker: Asker, chunk: int, served: bool, flow: Flow | None) -> None:
        """Ends what `hold` began. See Lendings.release."""
        if since := self.held.get(asker):
            del since[0]
            if not since:
                del self.held[asker]
        if flow is not None:
            self._flows.setdefault(asker.name, []).append(flow)
        grant = self._grants.get(chunk)
        if served and grant is not None and grant.asker is asker:
            grant.served = True
        self._changed.notify_all()

    def leave(self, asker: Asker) -> Callable[[], None] | None:
        """Forgets an asker, and voids its grants that were not served. Returns what to call without the lock."""
        self.held.pop(asker, None)
        self.void(asker)
        self._changed.notify_all()
        if asker not in self._askers:
            return None
        self._askers.remove(asker)
        return None if self._askers else self._report

    def _report(self) -> None:
        if (rate := self.sent) is not None:
            self.lent.passed(rate)


class ChunkSend(NamedTuple):
    """The answer to a question: send the chunk. The asker holds the slot until `Lendings.release`."""

    lending: TcpLending
    runs: ChunkRuns


class To(NamedTuple):
    """The answer to a question: the relay that has the chunk granted."""

    relay: str


class Not(NamedTuple):
    """The answer to a question: the chunk does not come from here."""

    why: str
    may_come: bool = False  # it is not here now, and may come


class Pulse(NamedTuple):
    """The sign that the chunk is not here yet."""

    number: int  # changes while the filling makes progress; 0 before it begins


class Lendings:
    """What one arena lends. arena: its id. slot_grace: seconds that an asker may keep a slot that is to be filled."""

    def __init__(self, arena: bytes, slot_grace: float) -> None:
        self.token = secrets.token_bytes(TOKEN_BYTES)  # askers must show it
        self._arena = arena
        self._grace = slot_grace
        self._slots: dict[int, TcpLending] = {}
        self._lately: dict[str, tuple[float, float]] = {}  # by asker's name: bytes, and the seconds that they took
        self._changed = threading.Condition()
        self._open = True

    def admit(self, hello: Hello) -> None:
        """Raises INVALID_ARGUMENT unless a greeting shows the token of this arena. Takes equally long for any token."""
        is_known = hmac.compare_digest(self.token, hello.token)
        if not hmac.compare_digest(self._arena, hello.arena):
            raise invalid("this relay has other memory by now: the one that offered it has ended")
        if not is_known:
            raise invalid("a relay that asks for chunks has to show the token that the manager handed out with them")

    # -- askers

    def answer(
        self, key: bytes, chunk: int, how: ChunkAsk, asker: Asker, seconds: float
    ) -> ChunkSend | To | Not | Pulse:
        """The answer to a question; waits for it for at most `seconds`. Raises UNAVAILABLE once nothing is lent any
        more.

        A version that is not known here may be on its way, so its askers wait.
        """
        until = time.monotonic() + seconds
        with self._changed:
            while True:
                found = self._answer(key, chunk, how, asker)
                remaining = until - time.monotonic()
                if not isinstance(found, Pulse) or remaining <= 0:
                    return found
                self._changed.wait(remaining)

    def _answer(self, key: bytes, chunk: int, how: ChunkAsk, asker: Asker) -> ChunkSend | To | Not | Pulse:
        if not self._open:
            raise unavailable("this relay is being stopped")
        known = [each for each in self._slots.values() if hmac.compare_digest(each.lent.key, key)]
        known.sort(key=lambda each: (not each.has(chunk), bool(each.why_not(chunk))))
        if not known:
            return Not("it does not have this version now", may_come=True) if how == ChunkAsk.NOW else Pulse(0)
        lending = known[0]
        if why := lending.why_not(chunk):
            lending.void(asker, chunk)
            return Not(why)
        if how in (ChunkAsk.GRANT, ChunkAsk.GRANT_ANOTHER) and (
            relay := lending.grant(chunk, asker, another=how == ChunkAsk.GRANT_ANOTHER)
        ):
            return To(relay)
        if lending.has(chunk):
            lending.hold(asker)
            return ChunkSend(lending, lending.lent.runs(chunk))
        return (
            Not(f"it does not have chunk {chunk} yet", may_come=True) if how == ChunkAsk.NOW else Pulse(lending.pulse)
        )

    def release(self, lending: TcpLending, asker: Asker, chunk: int, served: bool, flow: Flow | None = None) -> None:
        """Ends the hold of a ChunkSend. served: the asker has all of the chunk. flow: how it was sent, if known."""
        with self._changed:
            lending.release(asker, chunk, served, flow)
            if flow is not None and flow.bytes:
                size, seconds = self._lately.get(asker.name, (0.0, 0.0))
                self._lately[asker.name] = size / 2 + flow.bytes, seconds / 2 + flow.stop - flow.start

    def rate(self, asker: Asker) -> float | None:
        """Bytes a second that went to an asker's relay lately, of whatever version; None: unknown."""
        size, seconds = self._lately.get(asker.name, (0.0, 0.0))
        return size / seconds if seconds > 0 else None

    def leave(self, asker: Asker, key: bytes | None = None) -> None:
        """Notes that an asker asks for no more chunks of a version, or of any, as its connection has ended."""
        with self._changed:
            found = [each.leave(asker) for each in self._slots.values() if key is None or each.lent.key == key]
        for report in filter(None, found):
            report()

    # -- the relay

    def lend(self, lent: LentChunks) -> TcpLending:
        """Begins the filling of a slot. See ChunkLender."""
        with self._changed:
            self._end(lent.slot)
            lending = self._slots[lent.slot] = TcpLending(lent, self._changed)
            self._changed.notify_all()
            return lending

    def refuse(self, slot: int) -> None:
        """Refuses further questions about a slot."""
        with self._changed:
            if slot in self._slots:
                self._slots[slot].refuse(REPLACED)

    def retire(self, slot: int) -> int:
        """Ends what is lent of a slot once no asker holds it, or all have had it for `slot_grace`. Returns how many
        were overruled."""
        self.refuse(slot)
        with self._changed:
            lending = self._slots.get(slot)
            while lending is not None and lending.held and self._open:
                remaining = max(since[-1] for since in lending.held.values()) + self._grace - time.monotonic()
                if remaining <= 0:
                    break
                self._changed.wait(remaining)
            overruled = len(lending.held) if lending is not None else 0
            self._end(slot)
            return overruled

    def _end(self, slot: int) -> None:
        if lending := self._slots.pop(slot, None):
            lending.end_reason, lending.is_lent = lending.end_reason or REPLACED, False
            lending.held.clear()

    def close(self) -> None:
        """Ends all lendings; `retire` waits no longer."""
        with self._changed:
            self._open = False
            for slot in list(self._slots):
                self._end(slot)
            self._changed.notify_all()
