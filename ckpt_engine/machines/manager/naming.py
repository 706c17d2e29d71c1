"""How many ranks at once are named to people: as runs, and no more of them than somebody reads."""

from __future__ import annotations

from collections.abc import Sequence

MOST_RUNS = 8
"""Of numbers that follow each other; what is beyond is counted."""


def ranks_named(ranks: Sequence[int]) -> str:
    """Such as "rank 3", "ranks 0-2, 7" or "ranks 0, 2, 4, 6, 8, 10, 12, 14 and 32760 more"."""
    runs: list[tuple[int, int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][1] == rank - 1:
            runs[-1] = runs[-1][0], rank
        else:
            runs.append((rank, rank))
    named = runs[:MOST_RUNS]
    said = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in named)
    more = len(ranks) - sum(last - first + 1 for first, last in named)
    return f"rank{'' if len(ranks) == 1 else 's'} {said}" + (f" and {more} more" if more else "")
