"""Reads and writes JSON without NaN and infinities, and no deeper than can be written again. Pure.

Callers may not send such numbers. Those of engines, such as a log-probability of minus infinity, become null.

Python's json accepts both silently: an engine would take a temperature of NaN, and callers' parsers would refuse an
answer with one. orjson is faster and would replace none of this: it reads larger integers as doubles, refuses engines'
NaN, and holds the interpreter meanwhile (docs/performance.md).
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
"""Most levels of nested lists and objects: what was read must also be written, where less of the stack is free."""


def load_request(data: bytes) -> Any:
    """Parses a caller's JSON. Raises ValueError, also for a number that is not finite, and says where it is."""

    def number(text: str) -> float:
        value = float(text)
        if not math.isfinite(value):
            raise ValueError(f"{_where(data)}{text[:40]} is not a number that JSON and a double can represent")
        return value

    return _shallow(data, _load(data, number))


def load_answer(data: bytes) -> Any:
    """Parses an engine's JSON, with null for numbers that are not finite. Raises ValueError."""
    return _shallow(data, load_json(data, parse_constant=lambda name: None))


def load_object(data: bytes) -> dict[str, Any]:
    """Parses an engine's JSON as `load_answer`; empty: it is not an object."""
    try:
        content = load_answer(data)
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


def dump(content: Any, large: bool = False) -> bytes:
    """Encodes JSON, with null for numbers that are not finite. large: in steps."""
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


def finite_json(data: bytes) -> bytes:
    """Bytes that an engine wrote, changed only if they would be JSON but for numbers that are not finite."""
    if not any(name in data for name in NAMES):
        return data
    constants: list[str] = []
    try:
        content = _shallow(data, load_json(data, parse_constant=constants.append))
    except ValueError:
        return data
    return dump(content) if constants else data  # the names may stand in a text


def _shallow(data: bytes, content: Any) -> Any:
    """Checks the depth of parsed JSON. Raises ValueError if it has more than LEVELS levels."""
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
    """The path to the first number that is not finite; empty if a later key replaced it."""
    way = _way(_load(data, float))
    return f"{''.join(way).removeprefix('.')[:80]}: " if way else ""


def _way(value: Any) -> list[str]:
    """Keys and indices of that path."""
    is_object = isinstance(value, dict)
    for key, each in value.items() if is_object else enumerate(value) if isinstance(value, list) else ():
        rest = _way(each) if isinstance(each, dict | list) else []
        if rest or (isinstance(each, float) and not math.isfinite(each)):
            return [f".{key}" if is_object else f"[{key}]", *rest]
    return []
