"""Writes into an answer which version it began and ended under, where clients of slime and Miles look for it. Pure.

It does not decide which versions these are: gates know them by the state words, the gateway by its spans. Only callers
whose bodies have the field `weight_version` (version_bounds.py) get the stamps.
"""

from __future__ import annotations

import re
from typing import Any

START, END = "weight_version_start", "weight_version_end"
"""In `meta_info` of SGLang's form, at the top level of others."""

_END = re.compile(rb'"finish_reason":\s*(?!null|\s)')


def may_end(data: bytes) -> bool:
    """Whether an event of a stream can be the end of a sample; quick, since most events are not."""
    return _END.search(data) is not None


def stamp(content: Any, start: int | None, end: int | None) -> None:
    """Stamps an answer's object, or each of a list of them. None: not known.

    SGLang's `weight_version` becomes the number alone, as these clients compare it; it is the start, the oldest that
    can have made a token.
    """
    if isinstance(content, list):
        for each in content:
            stamp(each, start, end)
        return
    if not isinstance(content, dict):
        return
    meta = content.get("meta_info")
    if isinstance(meta, dict):
        meta |= {"weight_version": "default" if start is None else str(start), START: start, END: end}
    else:
        content |= {START: start, END: end}
