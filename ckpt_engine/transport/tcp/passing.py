"""What is lent of a slot while it is being filled: chunks that are verified, and nothing else."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from ckpt_engine.core.rates import Flow, Rate, rate_of

Runs = Sequence[tuple[int, int]]
"""(offset in the slot, length) of what a chunk consists of, in the order in which it is sent."""


class TcpPassing:
    """One filling, as those see it who wait for its chunks. Any thread. over: why nothing of it is sent any more.
    passed: told what was sent in all, on a reader's thread, whenever the last of its readers has left."""

    def __init__(
        self,
        key: bytes,
        chunks: Sequence[Runs],
        changed: threading.Condition,
        passed: Callable[[Rate], None] = lambda rate: None,
    ) -> None:
        self.key = key
        self.chunks = chunks
        self.end_reason = ""
        self.pulse = 0
        self._verified = bytearray(len(chunks))
        self._never = bytearray(len(chunks))
        self._filled = False
        self._changed = changed
        self._passed = passed
        self._readers: set[object] = set()
        self._flows: dict[object, list[Flow]] = {}

    def verified(self, chunk: int) -> None:
        """A chunk lies in the slot as it was sealed, and is not written to any more."""
        with self._changed:
            self._verified[chunk] = 1
            self.pulse += 1
            self._changed.notify_all()

    def never(self, chunk: int) -> None:
        """A chunk will not come from here: who waits for it asks somebody else at once."""
        with self._changed:
            self._never[chunk] = 1
            self._changed.notify_all()

    def moved(self) -> None:
        """Something has come. Waits for nothing."""
        self.pulse += 1

    def finish(self) -> None:
        """The filling is over: who waits for what is not there waits in vain."""
        with self._changed:
            self._filled = True
            self._changed.notify_all()

    def end(self, why: str) -> None:
        """Ends it: nothing of it is sent any more, but what is on its way. The first reason stays."""
        with self._changed:
            self.end_reason = self.end_reason or why
            self._changed.notify_all()

    @property
    def sent(self) -> Rate | None:
        """What has been sent by now; None if that cannot be told."""
        with self._changed:
            flows = [list(each) for each in self._flows.values()]
        return rate_of(flows)

    def flows(self, reader: object) -> list[Flow]:
        """The flows of one reader, who writes them down. Under the lock."""
        self._readers.add(reader)
        return self._flows.setdefault(reader, [])

    def leave(self, reader: object) -> Callable[[], None] | None:
        """A reader asks for nothing more; what is to be called without the lock. Under the lock."""
        if reader not in self._readers:
            return None
        self._readers.remove(reader)
        return None if self._readers else self._tell

    def _tell(self) -> None:
        if (rate := self.sent) is not None:
            self._passed(rate)

    def why_not(self, chunk: int) -> str:
        """Why a chunk will not be sent, now or later; empty: it may. Under the lock."""
        if self.end_reason:
            return self.end_reason
        if not 0 <= chunk < len(self.chunks):
            return f"there is no chunk {chunk}; it has {len(self.chunks)}"
        given_up = self._filled or self._never[chunk]
        return "nobody has brought that as it was sealed" if given_up and not self._verified[chunk] else ""

    def has(self, chunk: int) -> bool:
        """Whether a chunk is verified. Under the lock."""
        return bool(self._verified[chunk])
