"""What clients saw, from made-up times: rates, tokens lost, gaps, and who counts in which window."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.gpu.clients_view import Window, seen, windows_of


def request(stream: int, times: list[float], **given: Any) -> dict[str, Any]:
    about = {"status": 200, "whole": True, "problem": ""}
    return {
        "stream": stream,
        "asked": times[0] - 0.5 if times else 0.0,
        "tokens": [[when, 1] for when in times],
        **about,
        **given,
    }


def every(begin: float, end: float, step: float) -> list[float]:
    return [begin + step * number for number in range(round((end - begin) / step))]


def test_a_steady_stream_loses_nothing() -> None:
    requests = [request(stream, every(0.05, 20.04, 0.1)) for stream in range(4)]
    found = seen(requests, Window(0, 5), windows_of([5, 10], 15), Window(15, 20))
    assert found["rate"]["both"] == pytest.approx(40)
    assert found["lost_tokens"]["each"] == pytest.approx([0, 0])
    assert found["worst_gap_milliseconds"]["each"] == pytest.approx([100, 100])
    assert found["quiet_worst_gap_milliseconds"]["each"] == pytest.approx([100, 100])


def test_a_pause_costs_its_tokens_in_its_window_alone() -> None:
    """Two streams of 10 tokens a second; the update at 10 s stops both for a second, one of them for half a second
    longer."""
    one = [*every(0.05, 10.12, 0.1), *every(11.15, 20.04, 0.1)]
    other = [*every(0.05, 10.12, 0.1), *every(11.65, 20.04, 0.1)]
    found = seen([request(0, one), request(1, other)], Window(0, 5), windows_of([5, 10], 15), Window(15, 20))
    assert found["lost_tokens"]["each"] == pytest.approx([0, 25])
    assert found["lost_milliseconds"]["each"][1] == pytest.approx(1250)
    assert found["worst_gap_milliseconds"]["each"] == pytest.approx([100, 1600], abs=1)
    assert found["near_lost_milliseconds"]["each"][0] == pytest.approx(0, abs=10)


def test_a_rate_that_drifts_is_no_loss_of_updates_nearby() -> None:
    """Streams get slower from window to window; each update also stops them for 0.2 s."""
    times: list[float] = []
    for number, step in enumerate((0.001, 0.001, 0.00125, 0.0015, 0.0015)):
        begin = 2.0 * number
        times += every(begin + (0.2 if 0 < number < 4 else 0.0), begin + 2.0, step)
    found = seen([request(0, times)], Window(0, 2), windows_of([2, 4, 6], 8), Window(8, 10))
    near = found["near_lost_milliseconds"]["each"]
    assert near[0] == pytest.approx(200, abs=2)
    assert near[1] == pytest.approx(200, abs=40), "half of what it is compared with is the window before"
    far = found["lost_milliseconds"]["each"]
    assert far[0] < 0 < near[0], "the quiet rate of both ends is another one"
    assert found["rate"]["between"] == pytest.approx((1.5 / 0.001 + 1.5 / 0.00125 + 1.5 / 0.0015) / 4.5, rel=0.01)


def test_the_wait_between_two_requests_is_no_gap() -> None:
    requests = [request(0, every(0.05, 7, 0.1)), request(0, every(9.05, 20.04, 0.1), asked=7.0)]
    found = seen(requests, Window(0, 5), windows_of([5, 10], 15), Window(15, 20))
    assert max(found["worst_gap_milliseconds"]["each"]) == pytest.approx(100)
    assert found["worst_first_token_milliseconds"]["each"] == pytest.approx([2050, 0])


def test_events_of_several_tokens_count_them_all_and_refusals_are_told() -> None:
    requests = [
        request(0, [], tokens=[[0.5 + number, 3] for number in range(20)], asked=0.0),
        request(1, [], tokens=[], asked=7.0, status=503, whole=False, problem="an update"),
        request(1, [], tokens=[], asked=8.0, status=0, whole=False, problem="ConnectionResetError"),
        request(1, [], tokens=[], asked=19.0, whole=False),
    ]
    found = seen(requests, Window(0, 5), windows_of([5, 10], 15), Window(15, 20))
    assert found["rate"]["both"] == pytest.approx(3)
    assert {key: found["requests"][key] for key in ("asked", "whole", "refused", "failed")} == {
        "asked": 4,
        "whole": 1,
        "refused": 1,
        "failed": 1,
    }


def test_without_quiet_tokens_there_is_nothing_to_compare_with() -> None:
    with pytest.raises(ValueError, match=r"no token came in 10\.0 s without updates"):
        seen([request(0, every(6, 9, 0.1))], Window(0, 5), windows_of([5, 10], 15), Window(15, 20))
