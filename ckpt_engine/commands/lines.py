"""Text for tables and lines of the commands: a process that dialled the manager chose some of it."""

from __future__ import annotations

from typing import Any

from rich import text

from ckpt_engine.core.names import printable


class Text(text.Text):
    """rich's, in which control characters are escaped. A terminal would obey them."""

    def __init__(self, plain: str = "", *arguments: Any, **options: Any) -> None:
        super().__init__(printable(plain), *arguments, **options)
