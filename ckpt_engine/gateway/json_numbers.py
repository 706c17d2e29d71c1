"""JSON of callers and engines, without what JSON does not have (NaN, infinities) and no deeper than can be written
again. Callers may not send such numbers; what engines say of them becomes null, since a log-probability of minus
infinity is none that anybody could send. Pure.

Python reads and writes them without a word. An engine would take a temperature of NaN, and other callers' parsers
refuse an answer with one in it, so what cannot be JSON ends here. orjson is faster and would replace none of this: it
reads larger integers as doubles, refuses what engines say, and holds the interpreter meanwhile (docs/performance.md).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

from ckpt_engine.core.json_text import TOO_DEEP, load_json
from ckpt_engine.gateway.large_json import LARGE_BYTES, dump_in_steps, load_in_steps

NAMES = (b"NaN", b"Infinity")

LEVELS = 200
"""Of lists and objects within each other, at most: a writer, which begins with less of the stack left than the reader
did, must not fail where that one did not."""


def load_asked(data: bytes) -> Any:
    """What a caller sent. Raises ValueError, also for a number that is not finite, naming where it stands."""

    def number(text: str) -> float:
        value = float(text)
        if not math.isfinite(value):
            raise ValueError(f"{_where(data)}{text[:40]} is no number that JSON and a double can have")
        return value

    return _shallow(data, _load(data, number))


def load_told(data: bytes) -> Any:
    """What an engine said, with null for what is not finite. Raises ValueError."""
    return _shallow(data, load_json(data, parse_constant=lambda name: None))


def dump(content: Any, large: bool = False) -> bytes:
    """JSON, with null for what is not finite. large: in steps."""
    write = dump_in_steps if large else _dump
    try:
        return write(content)
    except ValueError:
        return write(_finite(content))


def _dump(content: Any) -> bytes:
    return json.dumps(content, separators=(",", ":"), allow_nan=False).encode()


def _load(data: bytes, number: Callable[[str], float]) -> Any:
    if len(data) >= LARGE_BYTES:
        return load_in_steps(data, number)
    return load_json(data, parse_constant=number, parse_float=number)


def passed(data: bytes) -> bytes:
    """Bytes that an engine wrote, changed only if they are JSON but for numbers that are not finite."""
    if not any(name in data for name in NAMES):
        return data
    found: list[str] = []
    try:
        content = _shallow(data, load_json(data, parse_constant=found.append))
    except ValueError:
        return data
    return dump(content) if found else data  # the names may stand in a text


def _shallow(data: bytes, content: Any) -> Any:
    """The content of a text. Raises ValueError if it has more than LEVELS."""
    if data.count(b"[") + data.count(b"{") > LEVELS:
        level = [content]
        for _ in range(LEVELS):
            level = [
                inner
                for each in level
                for inner in (each.values() if isinstance(each, dict) else each)
                if isinstance(inner, dict | list)
            ]
            if not level:
                return content
        raise ValueError(f"{TOO_DEEP}: it has more than {LEVELS} levels")
    return content


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _where(data: bytes) -> str:
    """The way to the first number that is not finite; empty if it was written over."""
    way = _way(_load(data, float))
    return f"{''.join(way).removeprefix('.')[:80]}: " if way else ""


def _way(value: Any) -> list[str]:
    """Keys and places that lead to it."""
    named = isinstance(value, dict)
    for key, each in value.items() if named else enumerate(value) if isinstance(value, list) else ():
        rest = _way(each) if isinstance(each, dict | list) else []
        if rest or (isinstance(each, float) and not math.isfinite(each)):
            return [f".{key}" if named else f"[{key}]", *rest]
    return []
