"""How far a member's clock is from the manager's, and what is left open."""

from __future__ import annotations

import pytest

from ckpt_engine.machines.clock import DRIFT, ROUND_TRIPS, ManagersClock
from ckpt_engine.timeline.clocks import ANSWERED, CONTRADICTED, GUESSED, MEASURED, Window, align, guess
from ckpt_engine.v1 import manager_pb2

AHEAD = 600.0


def test_the_shortest_round_trip_counts() -> None:
    clock = ManagersClock()
    for way, at in ((0.5, 10.0), (0.001, 20.0), (0.2, 30.0)):  # unlike ways there and back: 3 to 1
        clock.answered(at + AHEAD, at + 0.75 * way, at + way + AHEAD)
    span = clock.span(25.0 + AHEAD, 31.0 + AHEAD)
    assert span.ahead == pytest.approx(AHEAD, abs=0.0005)
    assert 0.0005 < span.error < 0.0005 + 11 * DRIFT + 1e-6
    assert abs(span.ahead - AHEAD) <= span.error
    assert (span.begin, span.seconds) == (25.0 + AHEAD, 6.0)


def test_what_was_measured_long_ago_leaves_more_open() -> None:
    clock = ManagersClock()
    clock.answered(0.0, 1.0, 0.002)
    assert clock.span(0.0, 0.002).error == pytest.approx(0.001)
    assert clock.span(0.0, 1000.0).error == pytest.approx(0.001 + 1000 * DRIFT, rel=0.01)
    for at in range(ROUND_TRIPS):
        clock.answered(1000.0 + at, 1001.0 + at, 1000.5 + at)
    assert clock.span(0.0, 1010.0).ahead == pytest.approx(-0.75), "only so many are kept"


def test_a_manager_that_says_nothing_is_not_measured() -> None:
    clock = ManagersClock()
    clock.answered(1.0, 0.0, 2.0)
    assert not clock.span(0.0, 3.0).HasField("ahead")
    clock.answered(1.0, 5.0, 2.0)
    clock.forget()
    assert not clock.span(0.0, 3.0).HasField("ahead"), "of a manager before this one"


def span(begin: float, seconds: float, ahead: float | None = None, error: float = 0.0) -> manager_pb2.Span:
    return manager_pb2.Span(begin=begin, seconds=seconds, ahead=ahead, error=error)


BEGAN = 5000.0
ASKED = Window(1.0, 3.0)
"""Of the update: in which the member was asked and had answered."""


def test_a_clock_that_is_minutes_ahead_is_brought_back() -> None:
    found = align(span(BEGAN + AHEAD + 1.5, 1.0, AHEAD, 0.01), ASKED, BEGAN)
    assert found.by == MEASURED
    assert found.window(span(BEGAN + AHEAD + 1.5, 1.0)) == pytest.approx((1.5, 2.5))
    assert found.error == pytest.approx(0.01)


def test_nothing_is_done_before_it_was_asked_for() -> None:
    """Measured 0.2 s too early: with that error it could be, and the command says how much of it is left."""
    found = align(span(BEGAN + AHEAD + 1.05, 1.0, AHEAD + 0.2, 0.3), ASKED, BEGAN)
    assert found.by == MEASURED
    assert found.at(BEGAN + AHEAD + 1.05) >= ASKED.begin
    true = BEGAN + AHEAD
    assert abs(found.offset - true) <= found.error + 1e-9
    assert found.error < 0.3


def test_a_measurement_that_cannot_be_is_not_believed() -> None:
    """A clock that was set, or a manager that was stopped for a while."""
    told = span(BEGAN + AHEAD + 1.5, 1.0, AHEAD - 60.0, 0.001)
    found = align(told, ASKED, BEGAN)
    assert found.by == CONTRADICTED
    assert found.window(told) == pytest.approx((1.5, 2.5))
    assert found.error == pytest.approx(0.5)


def test_without_a_measurement_the_command_and_the_answer_say_what_there_is_to_say() -> None:
    told = span(77.0, 1.5)
    found = align(told, ASKED, BEGAN)
    assert found.by == ANSWERED
    assert found.window(told) == pytest.approx((1.25, 2.75))
    assert found.error == pytest.approx(0.25)


def test_durations_alone_are_put_into_the_middle() -> None:
    told, found = guess(1.0, ASKED)
    assert found.window(told) == pytest.approx((1.5, 2.5))
    assert (found.error, found.by) == (pytest.approx(0.5), GUESSED)


def test_what_is_longer_than_its_window_stands_around_it() -> None:
    told, found = guess(3.0, ASKED)
    assert found.window(told) == pytest.approx((0.5, 3.5))
    assert found.error == 0.0
