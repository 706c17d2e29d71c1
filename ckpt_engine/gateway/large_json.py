"""Reads and writes large JSON in small steps, for another thread, so that the event loop keeps running. Pure.

Python's own reader and writer hold the interpreter until they are done, on any thread.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from json.decoder import JSONArray  # type: ignore[attr-defined]  # the stubs lack it
from json.scanner import py_make_scanner  # type: ignore[attr-defined]  # nor this
from typing import Any

from ckpt_engine.core.json_text import TOO_DEEP

LARGE_BYTES = 1 << 16
"""Bodies of at least so many bytes are read and written in steps."""

STEP = 1 << 14
"""Characters of a list of numbers that are read in one step."""

_NUMBERS = re.compile(r"[\d\s,]*")


def values_of(data: bytes) -> int:
    """An upper bound of the number of values in a JSON text, without parsing it."""
    return data.count(b",") + data.count(b"[") + data.count(b"{") + 1


def load_in_steps(data: bytes, number: Callable[[str], float]) -> Any:
    """Parses like json.loads. number: parses floats, NaN and infinities. Raises ValueError."""
    decoder: Any = json.JSONDecoder(parse_constant=number, parse_float=number)
    decoder.parse_array = _array
    decoder.scan_once = py_make_scanner(decoder)
    text = data.decode(json.detect_encoding(data))
    try:
        return decoder.decode(text)
    except RecursionError:
        raise ValueError(TOO_DEEP) from None


def dump_in_steps(content: Any) -> bytes:
    """Encodes like json.dumps. Raises ValueError for numbers that are not finite."""
    return "".join(json.JSONEncoder(separators=(",", ":"), allow_nan=False).iterencode(content)).encode()


def _array(text_and_end: tuple[str, int], scan_once: Any) -> tuple[list[Any], int]:
    """Parses a list after its `[`: leading integers in steps, the rest value by value."""
    text, end = text_and_end
    integers: list[Any] = []
    while True:
        step = text[end : end + STEP]
        numbers = _NUMBERS.match(step)
        last = step.rfind(",", 0, numbers.end() if numbers else 0)
        some = json.loads(f"[{step[:last]}]") if last > 0 else []
        if not some:
            break
        integers += some
        end += last + 1
    rest, end = JSONArray((text, end), scan_once)
    if integers and not rest:
        raise json.JSONDecodeError("Illegal trailing comma before end of array", text, end - 1)
    return integers + rest if integers else rest, end
