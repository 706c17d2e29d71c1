"""What every way of copying gives: moves that are ready to be run. Reader's side, one thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable


class PreparedCopy(Protocol):
    """Moves that were checked and made ready, to be run any number of times. Keeps its regions open."""

    @property
    def bytes(self) -> int:
        """What one run writes, in bytes."""
        ...

    @property
    def notes(self) -> tuple[str, ...]:
        """What is slower in this process than it could be, each with why; for the report."""
        ...

    def run(self, on_bytes: Callable[[int], None] | None = None) -> int:
        """Writes every destination and returns the bytes written. They have arrived when it returns.

        `on_bytes` is called in this thread with the bytes written since its last call (0 is possible), every few
        milliseconds of work.
        What it raises stops the copy there and comes out of `run`: that is how a deadline is kept.
        """
        ...


class Queued(Protocol):
    """Moves that a GPU was given, and that nobody waits for yet. One thread."""

    def finished(self) -> bool:
        """Whether every destination has been written. Raises what CUDA raises."""
        ...

    def drain(self) -> None:
        """Waits until nothing is on its way, also where the GPU is broken. Raises INTERNAL if that does not end."""
        ...


@runtime_checkable
class QueueableCopy(PreparedCopy, Protocol):
    """A prepared copy that may be given to a GPU as a whole, so that the next one is there when it ends."""

    def queue(self) -> Queued | None:
        """Queues every move, after those that were queued before, and waits for nothing. None, with nothing done, if a
        GPU cannot do all of it: then `run` does."""
        ...
