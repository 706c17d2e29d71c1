"""Converts moments of a member's clock to the time of an update: seconds since it began, by the manager. Pure.

Two facts bound the difference of the clocks: what the member's session has measured, and that a member does nothing
before it is asked nor after its answer has come. Both are combined; what they leave open is the error.
"""

from __future__ import annotations

from typing import NamedTuple

from ckpt_engine.v1 import manager_pb2

MEASURED = "its session's round trips"
ANSWERED = "when it was asked and had answered: its session has measured nothing"
CONTRADICTED = "when it was asked and had answered: its session has measured something else"
GUESSED = "durations alone: it tells no times"
"""How a member's clock was aligned: the texts of `Alignment.by`."""


class Window(NamedTuple):
    """The time of the update in which a member did what it was asked to, seconds."""

    begin: float
    end: float

    @property
    def middle(self) -> float:
        """The moment halfway, seconds."""
        return (self.begin + self.end) / 2


class Alignment(NamedTuple):
    """How a member's clock maps onto the time of an update."""

    offset: float  # seconds to subtract from the member's clock
    error: float  # by how much that may be wrong, seconds
    by: str  # how it is known

    def at(self, moment: float) -> float:
        """The time of the update at a moment of the member's clock, seconds."""
        return moment - self.offset

    def window(self, span: manager_pb2.Span) -> Window:
        """The time of the update of a span of the member's clock."""
        return Window(self.at(span.begin), self.at(span.begin + span.seconds))


def align(span: manager_pb2.Span, within: Window, began: float) -> Alignment:
    """Aligns one member's clock. within: from its command to its answer, by the manager. began: begin of the update on
    the manager's clock, seconds."""
    least, most = span.begin + span.seconds - within.end, span.begin - within.begin
    if least > most:  # the span is longer than the window: rounded, or the work had been done before
        least = most = (least + most) / 2
    if not span.HasField("ahead"):
        return _between(least, most, ANSWERED)
    ahead = span.ahead + began
    low, high = max(least, ahead - span.error), min(most, ahead + span.error)
    return _between(low, high, MEASURED) if low <= high else _between(least, most, CONTRADICTED)


def guess(seconds: float, within: Window) -> tuple[manager_pb2.Span, Alignment]:
    """Makes a span for a member that reports only a duration: in the middle of the window."""
    span = manager_pb2.Span(begin=0.0, seconds=seconds)
    return span, align(span, within, 0.0)._replace(by=GUESSED)


def _between(low: float, high: float, by: str) -> Alignment:
    return Alignment((low + high) / 2, (high - low) / 2, by)
