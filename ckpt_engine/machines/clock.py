"""How far a member's clock is ahead of its manager's, estimated from its session's round trips. For people only."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from ckpt_engine.v1 import manager_pb2

ROUND_TRIPS = 8
"""How many are remembered; the one with the least error counts."""

DRIFT = 1e-4
"""Seconds in each second by which two clocks may drift apart: twice the tolerance of a quartz."""


class _Trip(NamedTuple):
    ahead: float  # seconds
    error: float  # of `ahead`, seconds
    at: float  # when it ended


class ManagersClock:
    """The manager's clock as one session knows it. All moments but `manager_time` are seconds of the member's clock."""

    def __init__(self) -> None:
        self._trips: deque[_Trip] = deque(maxlen=ROUND_TRIPS)

    def forget(self) -> None:
        """Forgets all round trips: another process may answer from now on."""
        self._trips.clear()

    def answered(self, sent_at: float, manager_time: float, now: float) -> None:
        """Notes a round trip that ends now. manager_time: what the manager's clock showed when it answered; 0: it
        did not say."""
        if manager_time and now >= sent_at:
            self._trips.append(_Trip((sent_at + now) / 2 - manager_time, (now - sent_at) / 2, now))

    def span(self, begin: float, now: float) -> manager_pb2.Span:
        """The span from `begin` until now, with the estimate of the clocks if there is one."""
        span = manager_pb2.Span(begin=begin, seconds=now - begin)
        if self._trips:
            error, ahead = min((trip.error + DRIFT * (now - trip.at), trip.ahead) for trip in self._trips)
            span.ahead, span.error = ahead, error
        return span
