"""How long names may be, and how many of them a message shows. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from ckpt_engine.core.problems import invalid

LINEAGE_BYTES = 120
"""Of a lineage's name in UTF-8: what a worker's state word has room for (words/state.py)."""

POOL_BYTES = 63
"""Of a pool's name."""

NAMES_SHOWN = 4
"""In one sentence; a problem lists more of them beside it."""


def check_pool(pool: str) -> None:
    """Raises INVALID_ARGUMENT for what cannot be a pool's name. The empty one is that of the pool without a name."""
    if (
        not isinstance(pool, str)
        or len(pool.encode()) > POOL_BYTES
        or any(letter.isspace() or not letter.isprintable() for letter in pool)
    ):
        raise invalid(f"a pool's name has at most {POOL_BYTES} bytes and no spaces: {pool!r}")


def in_pool(pool: str) -> str:
    """Words for a message: "in pool 'actor'", or "in the pool without a name"."""
    return f"in pool {pool!r}" if pool else "in the pool without a name"


def full_name(module: str, name: str) -> str:
    """A tensor's name in a model: its module's, and its own there. Empty: the model itself is the module."""
    return f"{module}.{name}" if module else name


def some(names: Sequence[str], most: int = NAMES_SHOWN) -> str:
    """The names for a message, such as "a, b, c, d and 21 more"."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
