"""How long names may be, and how many of them a message shows. Pure."""

from __future__ import annotations

from collections.abc import Sequence

LINEAGE_BYTES = 120
"""Of a lineage's name in UTF-8: what a worker's state word has room for (words/state.py)."""

NAMES_SHOWN = 4
"""In one sentence; a problem lists more of them beside it."""


def some(names: Sequence[str], most: int = NAMES_SHOWN) -> str:
    """Such as "a, b, c, d and 21 more"."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
