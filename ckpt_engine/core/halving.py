"""Which of some versions is the first bad one, with as few questions as there can be. Pure; it asks nothing itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def first_bad(candidates: Sequence[int], is_bad: Callable[[int], bool]) -> int | None:
    """The first bad version of ascending candidates, after which all are bad; None: all are good.

    is_bad: asked about one version at a time, at most the logarithm of (their number + 1) to base 2, rounded up.
    """
    low, high = 0, len(candidates)  # those before `low` are good, those from `high` on bad
    while low < high:
        middle = (low + high) // 2
        if is_bad(candidates[middle]):
            high = middle
        else:
            low = middle + 1
    return candidates[low] if low < len(candidates) else None
