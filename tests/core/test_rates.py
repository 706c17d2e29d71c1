"""Who is slow: measured in the times in which somebody waited, and twice, before anybody is called so."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_engine.core.rates import TRIED_AGAIN, Flow, Measured, Rate, rate_of, slow

FAST, SLOW = Rate(1000.0, 1.0), Rate(500.0, 1.0)


def measured(*sent: Rate, received: tuple[Rate, ...] = ()) -> Measured:
    """In a filling each, the newest last."""
    found = Measured()
    for number in range(max(len(sent), len(received))):
        found.filled(
            (number + 1, 0),
            sent[number] if number < len(sent) else None,
            received[number] if number < len(received) else None,
        )
    return found


def among(each: Measured, others: int = 3) -> bool:
    """Whether it is slow beside so many that are not."""
    known = {f"relay {number}": measured(FAST, FAST, received=(FAST, FAST)) for number in range(others)}
    found = slow({**known, "relay x": each})
    assert found.keys() <= {"relay x"}
    return bool(found)


def test_times_in_which_nobody_waited_do_not_count() -> None:
    assert rate_of([[Flow(0, 1, 100), Flow(50, 51, 100)]]) == Rate(100, 2)
    assert rate_of([]) is None
    assert rate_of([[], [Flow(3, 3, 100)], [Flow(3, 4, 0)]]) is None


def test_what_several_connections_carry_at_a_time_adds_up() -> None:
    assert rate_of([[Flow(0, 1, 100)], [Flow(0, 1, 100)], [Flow(0.5, 1.5, 100)]]) == Rate(200, 1)
    assert rate_of([[Flow(0, 2, 100)], [Flow(1, 2, 100)]]) == Rate(100, 1)


def test_one_reader_that_is_slow_makes_nobody_slow() -> None:
    assert rate_of([[Flow(0, 1, 100)], [Flow(0, 1, 100)], [Flow(0, 100, 100)]]) == Rate(200, 1)


@st.composite
def carried(draw: st.DrawFn) -> list[list[Flow]]:
    """Connections of a host that carries one byte a tick, each of them for one of its connections."""
    connections: list[list[Flow]] = [[] for _ in range(4)]
    for connection in connections:
        starts = draw(st.lists(st.integers(0, 40), max_size=5, unique=True).map(sorted))
        connection += [Flow(start, start + draw(st.integers(1, 10)), 0) for start in starts]
    for tick in range(60):
        busy = [
            (c, f) for c, flows in enumerate(connections) for f, each in enumerate(flows) if each[0] <= tick < each[1]
        ]
        if busy:
            c, f = draw(st.sampled_from(busy))
            connections[c][f] = connections[c][f]._replace(bytes=connections[c][f].bytes + 1)
    return connections


@settings(max_examples=60, deadline=None)
@given(carried())
def test_nobody_is_found_to_be_faster_than_he_is(connections: list[list[Flow]]) -> None:
    found = rate_of(connections)
    assert found is None or found.per_second <= 1.0 + 1e-9


def test_who_was_slow_twice_is_slow_and_says_how_slow() -> None:
    assert among(measured(SLOW, SLOW))
    assert among(measured(FAST, FAST, received=(SLOW, SLOW)))
    found = slow({"relay a": measured(Rate(3e6, 1), Rate(2e6, 1)), **{n: measured(Rate(1e9, 1)) for n in "bc"}})
    assert list(found) == ["relay a"]
    assert "3 MB/s at most in each of the last 2 fillings" in found["relay a"]
    assert "1000 MB/s" in found["relay a"]


@pytest.mark.parametrize(
    "each",
    [
        measured(),
        measured(SLOW),
        measured(FAST, SLOW),
        measured(SLOW, SLOW, FAST),
        measured(Rate(560.0, 1.0), Rate(560.0, 1.0)),
        measured(Rate(500.0, 0.1), SLOW),
    ],
    ids=["never measured", "once", "once of two", "fast again", "half of the others, nearly", "for a moment only"],
)
def test_one_measurement_or_a_short_one_makes_nobody_slow(each: Measured) -> None:
    assert not among(each)


def test_those_who_were_never_measured_are_as_all_others() -> None:
    found = slow({"relay x": measured(SLOW, SLOW), "relay a": measured(), "relay b": measured(FAST)})
    assert not found, "beside one other nobody knows what is usual: half of it is within what is"
    assert slow({"relay x": measured(SLOW, SLOW)}) == {}


def test_what_is_said_again_of_a_filling_counts_once() -> None:
    found = Measured()
    for _ in range(3):
        found.filled((1, 0), Rate(100.0, 1.0), None)
    found.passed_on((1, 0), SLOW)
    assert found.sent == {(1, 0): SLOW}
    assert not among(found)
    found.passed_on((2, 0), SLOW)
    assert among(found)
    found.filled((2, 0), None, None)
    assert among(found)


def test_a_leaf_is_tried_again_and_one_more_slow_filling_makes_it_a_leaf_again() -> None:
    found = measured(SLOW, SLOW)
    for number in range(TRIED_AGAIN):
        assert among(found), number
        found.filled((10 + number, 0), None, FAST)
    assert not among(found)
    found.filled((100, 0), SLOW, FAST)
    assert among(found)
