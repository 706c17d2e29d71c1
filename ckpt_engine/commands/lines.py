"""Text, tables and their width, for all commands. A process that dialled the manager chose some of the text."""

from __future__ import annotations

from typing import Any

from rich import text
from rich.console import Console

from ckpt_engine.core.names import printable

PIPE_COLUMNS = 300
"""Width of a table that goes into a pipe or a file, which have none: rows stay whole for `grep`."""


def table_console() -> Console:
    """A console for tables on the standard output, which breaks no row in a pipe or a file."""
    return Console() if Console().is_terminal else Console(width=PIPE_COLUMNS)


class Text(text.Text):
    """rich's, in which control characters are escaped. A terminal would obey them."""

    def __init__(self, plain: str = "", *arguments: Any, **options: Any) -> None:
        super().__init__(printable(plain), *arguments, **options)
