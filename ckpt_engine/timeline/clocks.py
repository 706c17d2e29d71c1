"""Brings moments from the clock of a member to that of an update, in which 0 is when it began, by the manager. Pure.

Two things bound by how much they differ: what the member's session has measured, and that nothing is done before it was
asked for, nor after its answer was there. Both are taken together, and what they leave open is the error.
"""

from __future__ import annotations

from typing import NamedTuple

from ckpt_engine.v1 import manager_pb2

MEASURED = "its session's round trips"
ANSWERED = "when it was asked and had answered: its session has measured nothing"
CONTRADICTED = "when it was asked and had answered: its session has measured something else"
GUESSED = "durations alone: it tells no times"
"""By what a member is placed."""


class Window(NamedTuple):
    """The time of the update in which a member did what it was asked for, seconds."""

    begin: float
    end: float

    @property
    def middle(self) -> float:
        """Seconds."""
        return (self.begin + self.end) / 2


class Alignment(NamedTuple):
    """How a member's clock maps onto the time of an update.

    offset: to take away from the member's seconds. error: by how much that may be wrong, seconds. by: what it is
    known by.
    """

    offset: float
    error: float
    by: str

    def at(self, moment: float) -> float:
        """When that was in the update."""
        return moment - self.offset

    def window(self, span: manager_pb2.Span) -> Window:
        """When that was in the update."""
        return Window(self.at(span.begin), self.at(span.begin + span.seconds))


def align(span: manager_pb2.Span, within: Window, began: float) -> Alignment:
    """Aligns one member's clock. within: from its command to its answer, by the manager. began: the update, by the
    manager's own clock."""
    least, most = span.begin + span.seconds - within.end, span.begin - within.begin
    if least > most:  # longer than what it lies in: rounded, or what was answered had been done before
        least = most = (least + most) / 2
    if not span.HasField("ahead"):
        return _between(least, most, ANSWERED)
    ahead = span.ahead + began
    low, high = max(least, ahead - span.error), min(most, ahead + span.error)
    return _between(low, high, MEASURED) if low <= high else _between(least, most, CONTRADICTED)


def guess(seconds: float, within: Window) -> tuple[manager_pb2.Span, Alignment]:
    """A span for a member that tells how long it took and not when: in the middle of that window."""
    span = manager_pb2.Span(begin=0.0, seconds=seconds)
    return span, align(span, within, 0.0)._replace(by=GUESSED)


def _between(low: float, high: float, by: str) -> Alignment:
    return Alignment((low + high) / 2, (high - low) / 2, by)
