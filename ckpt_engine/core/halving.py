"""Which of some versions is the first bad one, with as few questions as there can be. Pure; it asks nothing itself."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence


def first_bad(candidates: Sequence[int], is_bad: Callable[[int], bool]) -> int | None:
    """The first bad version of ascending candidates, after which all are bad; None: all are good.

    is_bad: asked about one version at a time, at most the logarithm of (their number + 1) to base 2, rounded up.
    """
    place = bisect_left(candidates, True, key=is_bad)
    return candidates[place] if place < len(candidates) else None
