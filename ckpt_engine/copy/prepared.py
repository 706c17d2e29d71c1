"""The interface of every way of copying: prepared moves. Reader's side, one thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable


class PreparedCopy(Protocol):
    """Moves that were checked and prepared, to be run any number of times. Keeps its regions open."""

    @property
    def bytes(self) -> int:
        """What one run writes, in bytes."""
        ...

    @property
    def notes(self) -> tuple[str, ...]:
        """What is slower in this process than it could be, and why; for the report."""
        ...

    def run(self, on_bytes: Callable[[int], None] | None = None) -> int:
        """Writes every destination and returns the bytes written. They have arrived when it returns.

        on_bytes: called on this thread with the bytes written since its last call (0 is possible), every few
        milliseconds of work. Its exceptions stop the copy and leave `run`: so a deadline is kept.
        """
        ...


class Queued(Protocol):
    """Moves that are queued on a GPU. One thread."""

    def finished(self) -> bool:
        """Whether every destination has been written. Raises what CUDA raises."""
        ...

    def drain(self) -> None:
        """Waits until no move is in flight, also if the GPU is broken. Raises INTERNAL if that does not end."""
        ...


@runtime_checkable
class QueueableCopy(PreparedCopy, Protocol):
    """A prepared copy that may be queued on a GPU as a whole, so that the next one begins when it ends."""

    def queue(self) -> Queued | None:
        """Queues every move, after those that were queued before, and does not wait. Returns None, with nothing queued,
        if a GPU cannot do all of them: then use `run`."""
        ...
