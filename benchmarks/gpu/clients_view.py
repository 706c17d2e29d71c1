"""What clients saw of updates, from when their tokens came. Pure: no GPU, no clock.

An update's window is from its begin to the begin of the next one. A gap is the time between two events of one answer,
and belongs to the window in which it ends.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median, quantiles
from typing import Any, NamedTuple

FIELDS = {
    "rate": "tokens a second of all streams in the quiet times: before the updates, after them, both together; "
    "between: between updates, from half a second after each on",
    "lost_tokens": "an update: the quiet rate times the seconds of its window, less the tokens that came in it",
    "lost_milliseconds": "the same, put as the time in which the quiet rate makes so many tokens",
    "near_lost_milliseconds": "an update: the time that its first half second lost against the rate of the rest of its "
    "window and of the one before, which drifts less; what comes later it does not see: compare rate's between",
    "worst_gap_milliseconds": "an update: the longest time between two events of one answer, of all streams",
    "quiet_worst_gap_milliseconds": "the same, of windows as long in the quiet times",
    "worst_first_token_milliseconds": "an update: the longest time from a request to its first token that came then",
    "requests": "asked: all; whole: answered to their end; refused: 503; failed: by anything else",
}
"""For whoever reads the JSON. Numbers of each update: median, quartiles' distance (iqr), and each."""


NEAR_SECONDS = 0.5
"""In which an update is over, and what it did to clients."""


class Window(NamedTuple):
    """Seconds of the clients' clock."""

    begin: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.begin


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Median, interquartile range, and every value."""
    cuts = quantiles(values, n=4) if len(values) > 1 else [*values, *values, *values]
    return {"median": median(values), "iqr": cuts[2] - cuts[0], "each": list(values)}


def windows_of(begins: Sequence[float], end: float) -> list[Window]:
    """Of updates that began then; the last one ends at `end`."""
    return [Window(begin, after) for begin, after in zip(begins, [*begins[1:], end], strict=True)]


def seen(
    requests: Sequence[Mapping[str, Any]], before: Window, updates: Sequence[Window], after: Window
) -> dict[str, Any]:
    """See FIELDS. requests: as streams.py writes them. before, after: the quiet times, in which no update ran.

    Raises ValueError if no token came in the quiet times: then there is nothing to compare with.
    """
    arrivals = sorted((when, count) for request in requests for when, count in request["tokens"])
    times, sums = [when for when, _ in arrivals], [0]
    for _, count in arrivals:
        sums.append(sums[-1] + count)

    def tokens(window: Window) -> int:
        return sums[bisect_right(times, window.end)] - sums[bisect_right(times, window.begin)]

    quiet = tokens(before) + tokens(after)
    if not quiet:
        raise ValueError(f"no token came in {before.seconds + after.seconds:.1f} s without updates")
    rate = quiet / (before.seconds + after.seconds)
    lost = [rate * window.seconds - tokens(window) for window in updates]
    begun = [Window(window.begin, min(window.begin + NEAR_SECONDS, window.end)) for window in updates]
    rests = [Window(near.end, window.end) for near, window in zip(begun, updates, strict=True)]
    between = sum(tokens(rest) for rest in rests) / max(sum(rest.seconds for rest in rests), 1e-9)
    near_lost = []
    for near, earlier, rest in zip(begun, [before, *rests], rests, strict=False):
        local = (tokens(earlier) + tokens(rest)) / max(earlier.seconds + rest.seconds, 1e-9)
        near_lost.append(1e3 * (near.seconds - tokens(near) / local) if local else 1e3 * near.seconds)
    usual = median(window.seconds for window in updates)
    calm = [piece for window in (before, after) for piece in _pieces(window, usual)]
    gaps = [gap for request in requests for gap in _gaps(request)]
    firsts = [
        (request["tokens"][0][0], request["tokens"][0][0] - request["asked"])
        for request in requests
        if request["tokens"]
    ]
    return {
        "rate": {"before": tokens(before) / before.seconds, "after": tokens(after) / after.seconds, "both": rate,
                 "between": between},
        "lost_tokens": spread(lost),
        "lost_milliseconds": spread([1e3 * each / rate for each in lost]),
        "near_lost_milliseconds": spread(near_lost),
        "worst_gap_milliseconds": spread(_worst(gaps, updates)),
        "quiet_worst_gap_milliseconds": spread(_worst(gaps, calm)),
        "worst_first_token_milliseconds": spread(_worst(firsts, updates)),
        "requests": {
            "asked": len(requests),
            "whole": sum(request["whole"] for request in requests),
            "refused": sum(request["status"] == 503 for request in requests),
            "failed": sum(bool(request["problem"]) and request["status"] != 503 for request in requests),
            "problems": sorted({request["problem"][:200] for request in requests if request["problem"]})[:8],
        },
    }  # fmt: skip


def _gaps(request: Mapping[str, Any]) -> list[tuple[float, float]]:
    """When each ended, and its seconds."""
    times = [when for when, _ in request["tokens"]]
    return [(after, after - before) for before, after in pairwise(times)]


def _worst(found: Sequence[tuple[float, float]], windows: Sequence[Window]) -> list[float]:
    """Milliseconds of the longest that ended in each window; 0 if none did."""
    ordered = sorted(found)
    ends = [end for end, _ in ordered]
    return [
        1e3
        * max((seconds for _, seconds in ordered[bisect_right(ends, w.begin) : bisect_right(ends, w.end)]), default=0.0)
        for w in windows
    ]


def _pieces(window: Window, seconds: float) -> list[Window]:
    """As many windows of so many seconds as there is room for; the whole if it is shorter."""
    count = max(1, int(window.seconds / seconds)) if seconds > 0 else 1
    length = min(seconds, window.seconds) if seconds > 0 else window.seconds
    return [Window(window.begin + number * length, window.begin + (number + 1) * length) for number in range(count)]
