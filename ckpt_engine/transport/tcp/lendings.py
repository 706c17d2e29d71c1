"""Who may read which slot now: the one place that says so. Any thread.

A slot is lent under a number that nobody can guess, and that ends when the slot is to be filled anew. Who holds it is
waited for, but not for longer than `slot_grace`; then nothing of it is sent any more, whoever asks.
"""

from __future__ import annotations

import hmac
import secrets
import threading
import time
from dataclasses import dataclass, field

from ckpt_engine.core.problems import invalid, unavailable
from ckpt_engine.transport.tcp.wire import LENDING_BYTES, TOKEN_BYTES, Hello

NOT_LENT = "another version is brought into it, or none is in it yet; the next plan has another slot"


@dataclass(eq=False)
class _Slot:
    """token: who shows it may read. lending: while it is lent. size: bytes that were offered of it."""

    token: bytes = field(default_factory=lambda: secrets.token_bytes(TOKEN_BYTES))
    lending: bytes = b""
    refused: bool = True
    size: int = 0
    held: dict[object, float] = field(default_factory=dict)  # readers to since when


class Lendings:
    """The slots of one arena. slot_grace: seconds that a reader may keep one that is to be filled."""

    def __init__(self, arena: bytes, slots: int, slot_grace: float) -> None:
        self._arena = arena
        self._grace = slot_grace
        self._slots = [_Slot() for _ in range(slots)]
        self._changed = threading.Condition()
        self._open = True

    def offer(self, slot: int, end: int) -> bytes:
        """The token of a slot, of which bytes up to `end` are offered."""
        with self._changed:
            found = self._slots[slot]
            found.size = max(found.size, end)
            return found.token

    def size(self, slot: int) -> int:
        """Bytes of a slot that can be asked for."""
        return self._slots[slot].size

    def admit(self, asked: Hello) -> None:
        """Raises INVALID_ARGUMENT unless it shows the token of a slot of this arena. Takes the same time whatever it
        shows."""
        known = self._slots[asked.slot].token if asked.slot < len(self._slots) else secrets.token_bytes(TOKEN_BYTES)
        is_known = hmac.compare_digest(known, asked.token)
        if not hmac.compare_digest(self._arena, asked.arena):
            raise invalid("this relay has other memory by now: the one that offered it has ended")
        if not is_known:
            raise invalid(f"whoever reads slot {asked.slot} has to show the token that its table has")

    def hold(self, slot: int, reader: object) -> bytes:
        """The lending, which lasts until `release`, or until it is overruled. Raises UNAVAILABLE if there is none."""
        with self._changed:
            found = self._slots[slot]
            if found.refused or not self._open:
                raise unavailable(NOT_LENT)
            found.held[reader] = time.monotonic()
            return found.lending

    def release(self, slot: int, reader: object) -> None:
        """It reads the slot no more. May be repeated."""
        with self._changed:
            self._slots[slot].held.pop(reader, None)
            self._changed.notify_all()

    def why_not(self, slot: int, lending: bytes, offset: int, length: int) -> str:
        """Why this run may not be sent now; empty: it may."""
        with self._changed:
            found = self._slots[slot]
            if not found.lending or not hmac.compare_digest(found.lending, lending):
                return "the version that was read has been given up: another one is brought into its place"
            if offset + length > found.size:
                return f"{length} bytes at {offset} are not in what is lent"
            return ""

    def lend(self, slot: int) -> None:
        """A new lending begins."""
        with self._changed:
            found = self._slots[slot]
            found.lending, found.refused = secrets.token_bytes(LENDING_BYTES), False

    def refuse(self, slot: int) -> None:
        """Nobody who does not hold the slot may from now on."""
        with self._changed:
            self._slots[slot].refused = True

    def retire(self, slot: int) -> int:
        """Ends the lending once nobody holds it, or whoever does has had it for long enough. Returns how many were
        overruled."""
        with self._changed:
            found = self._slots[slot]
            found.refused = True
            while found.held and self._open:
                left = max(found.held.values()) + self._grace - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(left)
            overruled = len(found.held)
            found.held.clear()
            found.lending = b""
            return overruled

    def close(self) -> None:
        """Ends all of them; who waits in `retire` waits no longer."""
        with self._changed:
            self._open = False
            for slot in self._slots:
                slot.lending, slot.refused = b"", True
            self._changed.notify_all()
