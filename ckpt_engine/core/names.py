"""How long names may be, how many of them a message shows, and what a line shows of a text. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from ckpt_engine.core.problems import invalid

LINEAGE_BYTES = 120
"""Most bytes of a lineage's name in UTF-8: what a worker's state word has room for (gate/page.py)."""

MEMBER_BYTES = 255
"""Most bytes of the name of a replica or a holder in UTF-8."""

POOL_BYTES = 63
"""Most bytes of a pool's name."""

NAMES_SHOWN = 4
"""Most names in one sentence; the problem itself lists more."""

CUT = " …"
"""The end of a text that was shortened."""


def check_line(what: str, name: str, most: int) -> None:
    """Raises INVALID_ARGUMENT for a name that is empty, longer than `most` bytes, or unfit for a line of a log or a
    terminal: a stranger chooses it, and an operator reads it. what: such as "a replica's name"."""
    size = len(name.encode())
    if not 1 <= size <= most or not name.isprintable():
        raise invalid(f"{what} has from 1 to {most} bytes, all printable, not {size}: {name[:64]!r}")


def printable(text: str) -> str:
    """Escapes a text for a terminal, which would obey control characters."""
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() or letter == "\n" else ascii(letter)[1:-1] for letter in text)


def shortened(text: str, characters: int) -> str:
    """The text, or as many characters of its beginning and CUT."""
    return text if len(text) <= characters else text[:characters] + CUT


def check_pool(pool: str) -> None:
    """Raises INVALID_ARGUMENT unless it is a pool's name. The empty string is the pool without a name."""
    if (
        not isinstance(pool, str)
        or len(pool.encode()) > POOL_BYTES
        or any(letter.isspace() or not letter.isprintable() for letter in pool)
    ):
        raise invalid(f"a pool's name has at most {POOL_BYTES} bytes and no spaces: {pool!r}")


def in_pool(pool: str) -> str:
    """The pool for a message: "in pool 'actor'", or "in the pool without a name"."""
    return f"in pool {pool!r}" if pool else "in the pool without a name"


def full_name(module: str, name: str) -> str:
    """A tensor's name in a model: its module's name, then its own. module: empty: the model itself."""
    return f"{module}.{name}" if module else name


def some(names: Sequence[str], most: int = NAMES_SHOWN) -> str:
    """The names for a message, such as "a, b, c, d and 21 more"."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
