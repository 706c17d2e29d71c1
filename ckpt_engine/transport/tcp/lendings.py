"""Which readers may read which slot now: the one place that decides it. Any thread.

A slot is lent under an unguessable number, which ends when the slot is to be filled again. Readers that hold the slot
are waited for, but no longer than `slot_grace`; then nothing of it is sent any more. While it is being filled, readers
that know the filling's key are sent verified chunks, and nothing else.
"""

from __future__ import annotations

import hmac
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ckpt_engine.core.problems import invalid, unavailable
from ckpt_engine.core.rates import Flow, Rate
from ckpt_engine.transport.tcp.passing import Runs, TcpPassing
from ckpt_engine.transport.tcp.wire import LENDING_BYTES, NO_SLOT, TOKEN_BYTES, Hello

NOT_LENT = "another version is brought into it, or none is in it yet; the next plan has another slot"


@dataclass(eq=False)
class _LentSlot:
    """One slot, and the readers that hold it."""

    token: bytes = field(default_factory=lambda: secrets.token_bytes(TOKEN_BYTES))  # readers must show it
    lending: bytes = b""  # the number under which it is lent; empty: it is not
    refused: bool = True  # no further reader may hold it
    size: int = 0  # bytes that were offered of it
    held: dict[object, float] = field(default_factory=dict)  # by reader: since when
    passing: TcpPassing | None = None  # its last filling, or the current one


class Lendings:
    """The slots of one arena. slot_grace: seconds that a reader may keep one that is to be filled."""

    def __init__(self, arena: bytes, slots: int, slot_grace: float) -> None:
        self._arena = arena
        self._grace = slot_grace
        self._slots = [_LentSlot() for _ in range(slots)]
        self._changed = threading.Condition()
        self._open = True
        self.token = secrets.token_bytes(TOKEN_BYTES)  # readers of what is being filled must show it

    def offer(self, slot: int, end: int) -> bytes:
        """The token of a slot, of which bytes up to `end` are offered."""
        with self._changed:
            found = self._slots[slot]
            found.size = max(found.size, end)
            return found.token

    def size(self, slot: int) -> int:
        """Bytes of a slot that can be asked for."""
        return self._slots[slot].size

    def admit(self, hello: Hello) -> None:
        """Raises INVALID_ARGUMENT unless a greeting shows the token of a slot of this arena. Takes the same time for
        any token."""
        token = secrets.token_bytes(TOKEN_BYTES)
        if hello.slot == NO_SLOT:
            token = self.token
        elif hello.slot < len(self._slots):
            token = self._slots[hello.slot].token
        is_known = hmac.compare_digest(token, hello.token)
        if not hmac.compare_digest(self._arena, hello.arena):
            raise invalid("this relay has other memory by now: the one that offered it has ended")
        if not is_known:
            where = "what is being filled" if hello.slot == NO_SLOT else f"slot {hello.slot}"
            raise invalid(f"a reader of {where} has to show the token that its table has")

    def hold(self, slot: int, reader: object) -> bytes:
        """Lets a reader hold the slot until `release`, or until it is overruled; returns the lending's number. Raises
        UNAVAILABLE if the slot is not lent."""
        with self._changed:
            found = self._slots[slot]
            if found.refused or not self._open:
                raise unavailable(NOT_LENT)
            found.held[reader] = time.monotonic()
            return found.lending

    def release(self, slot: int, reader: object) -> None:
        """Ends a reader's hold. May be repeated."""
        with self._changed:
            self._slots[slot].held.pop(reader, None)
            self._changed.notify_all()

    def why_not(self, slot: int, lending: bytes, offset: int, length: int) -> str:
        """Why this run may not be sent now; empty: it may be."""
        with self._changed:
            found = self._slots[slot]
            if not found.lending or not hmac.compare_digest(found.lending, lending):
                return "the version that was read has been given up: another one is brought into its place"
            if offset + length > found.size:
                return f"{length} bytes at {offset} are not in what is lent"
            return ""

    def lend(self, slot: int) -> None:
        """Begins a new lending."""
        with self._changed:
            found = self._slots[slot]
            found.lending, found.refused = secrets.token_bytes(LENDING_BYTES), False

    def pass_on(
        self, slot: int, key: bytes, chunks: Sequence[Runs], passed: Callable[[Rate], None] = lambda rate: None
    ) -> TcpPassing:
        """Passes a slot on while it is filled: its chunks may be read one by one. key: 16 bytes that name the filling.
        passed: see Passing."""
        with self._changed:
            passing = self._slots[slot].passing = TcpPassing(key, chunks, self._changed, passed)
            self._changed.notify_all()
            return passing

    def chunk(self, key: bytes, number: int, reader: object, seconds: float) -> tuple[int, Runs, list[Flow]] | int:
        """Waits for a chunk to be verified: its slot, its runs, and the list to which the reader's connection adds its
        flows. The reader holds the slot then until `release`.

        After `seconds` without the chunk: a number that changes while the filling makes progress (0 before it begins).
        Raises UNAVAILABLE if the chunk will never come.
        """
        until = time.monotonic() + seconds
        with self._changed:
            while True:
                if not self._open:
                    raise unavailable("this relay is being stopped")
                pulse = 0
                for slot, found in enumerate(self._slots):
                    passing = found.passing
                    if passing is None or not hmac.compare_digest(passing.key, key):
                        continue
                    if why := passing.why_not(number):
                        raise unavailable(why)
                    if passing.has(number):
                        found.held[reader] = time.monotonic()
                        return slot, passing.chunks[number], passing.flows(reader)
                    pulse = passing.pulse
                remaining = until - time.monotonic()
                if remaining <= 0:
                    return pulse
                self._changed.wait(remaining)

    def passes(self, slot: int, key: bytes) -> bool:
        """Whether chunks of a filling may still be sent."""
        with self._changed:
            passing = self._slots[slot].passing
            return self._open and passing is not None and hmac.compare_digest(passing.key, key)

    def leave(self, reader: object) -> None:
        """Forgets a reader that asks for no more chunks of fillings."""
        with self._changed:
            found = [slot.passing.leave(reader) for slot in self._slots if slot.passing is not None]
        for tell in filter(None, found):
            tell()

    def refuse(self, slot: int) -> None:
        """Refuses further readers of the slot."""
        with self._changed:
            self._refuse(self._slots[slot])

    def _refuse(self, found: _LentSlot) -> None:
        found.refused = True
        if found.passing is not None:
            found.passing.end("another version is brought into its place")

    def retire(self, slot: int) -> int:
        """Ends the lending once no reader holds it, or all have had it for `slot_grace`. Returns how many were
        overruled."""
        with self._changed:
            found = self._slots[slot]
            self._refuse(found)
            while found.held and self._open:
                remaining = max(found.held.values()) + self._grace - time.monotonic()
                if remaining <= 0:
                    break
                self._changed.wait(remaining)
            overruled = len(found.held)
            found.held.clear()
            found.lending, found.passing = b"", None
            return overruled

    def close(self) -> None:
        """Ends all lendings; `retire` waits no longer."""
        with self._changed:
            self._open = False
            for slot in self._slots:
                slot.lending, slot.refused = b"", True
            self._changed.notify_all()
