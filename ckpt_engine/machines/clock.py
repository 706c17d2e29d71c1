"""How far a member's clock is ahead of its manager's, as the round trips of its session tell. For people only."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from ckpt_engine.v1 import manager_pb2

KEPT = 8
"""Round trips; the one counts that leaves the least open."""

DRIFT = 1e-4
"""Seconds in each second by which two clocks may grow apart: twice what a quartz may be wrong."""


class _Trip(NamedTuple):
    ahead: float
    error: float
    at: float


class ManagersClock:
    """The manager's clock as one session knows it. All moments but `there` are of the member's own clock, seconds."""

    def __init__(self) -> None:
        self._trips: deque[_Trip] = deque(maxlen=KEPT)

    def forget(self) -> None:
        """Another process may answer from now on."""
        self._trips.clear()

    def answered(self, asked: float, there: float, now: float) -> None:
        """What was asked then has been answered now. there: the manager's clock when it answered; 0: it did not say."""
        if there and now >= asked:
            self._trips.append(_Trip((asked + now) / 2 - there, (now - asked) / 2, now))

    def span(self, begin: float, now: float) -> manager_pb2.Span:
        """The span from then until now, with what is known of the clocks."""
        span = manager_pb2.Span(begin=begin, seconds=now - begin)
        if self._trips:
            error, ahead = min((trip.error + DRIFT * (now - trip.at), trip.ahead) for trip in self._trips)
            span.ahead, span.error = ahead, error
        return span
