"""What is lent of a slot while it is being filled: verified chunks, and nothing else."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from ckpt_engine.core.rates import Flow, Rate, rate_of

Runs = Sequence[tuple[int, int]]
"""(offset in the slot, length) of what a chunk consists of, in the order in which it is sent."""


class TcpPassing:
    """One filling, as the readers of its chunks see it. Any thread.

    passed: called with the rate of all that was sent, on a reader's thread, whenever the last reader has left.
    """

    def __init__(
        self,
        key: bytes,
        chunks: Sequence[Runs],
        changed: threading.Condition,
        passed: Callable[[Rate], None] = lambda rate: None,
    ) -> None:
        self.key = key
        self.chunks = chunks
        self.end_reason = ""  # why nothing of it is sent any more
        self.pulse = 0  # grows with each sign of progress
        self._verified = bytearray(len(chunks))
        self._never = bytearray(len(chunks))
        self._filled = False
        self._changed = changed
        self._passed = passed
        self._readers: set[object] = set()
        self._flows: dict[object, list[Flow]] = {}

    def verified(self, chunk: int) -> None:
        """Notes that a chunk lies in the slot as it was sealed, and is not written any more."""
        with self._changed:
            self._verified[chunk] = 1
            self.pulse += 1
            self._changed.notify_all()

    def never(self, chunk: int) -> None:
        """Notes that a chunk will not come from here, so its readers ask another relay at once."""
        with self._changed:
            self._never[chunk] = 1
            self._changed.notify_all()

    def moved(self) -> None:
        """Notes that bytes have come. Does not wait."""
        self.pulse += 1

    def finish(self) -> None:
        """Ends the filling: chunks that are missing now will not come."""
        with self._changed:
            self._filled = True
            self._changed.notify_all()

    def end(self, why: str) -> None:
        """Ends the passing: nothing more of it is sent, except frames in flight. The first reason stays."""
        with self._changed:
            self.end_reason = self.end_reason or why
            self._changed.notify_all()

    @property
    def sent(self) -> Rate | None:
        """How fast it was passed on by now; None if that is unknown."""
        with self._changed:
            flows = [list(each) for each in self._flows.values()]
        return rate_of(flows)

    def flows(self, reader: object) -> list[Flow]:
        """The list to which one reader's connection adds its flows. Under the lock."""
        self._readers.add(reader)
        return self._flows.setdefault(reader, [])

    def leave(self, reader: object) -> Callable[[], None] | None:
        """Forgets a reader; returns a function to be called without the lock, if any. Under the lock."""
        if reader not in self._readers:
            return None
        self._readers.remove(reader)
        return None if self._readers else self._tell

    def _tell(self) -> None:
        if (rate := self.sent) is not None:
            self._passed(rate)

    def why_not(self, chunk: int) -> str:
        """Why a chunk will not be sent, now or later; empty: it may be. Under the lock."""
        if self.end_reason:
            return self.end_reason
        if not 0 <= chunk < len(self.chunks):
            return f"there is no chunk {chunk}; it has {len(self.chunks)}"
        given_up = self._filled or self._never[chunk]
        return "no source has it as it was sealed" if given_up and not self._verified[chunk] else ""

    def has(self, chunk: int) -> bool:
        """Whether a chunk is verified. Under the lock."""
        return bool(self._verified[chunk])
