"""What orjson would gain the gateway, and what it reads and writes otherwise than `gateway/json_numbers.py` promises.

`.venv/bin/pip install orjson; .venv/bin/python -m benchmarks.gateway_json [RESULT.json]`. It measures, and decides
nothing: docs/performance.md says what came out.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import orjson

from ckpt_engine.gateway.json_numbers import LEVELS, dump, load_answer, load_request
from ckpt_engine.gateway.large_json import LARGE_BYTES

TEXTS = {
    "NaN": "NaN",
    "-Infinity": "-Infinity",
    "more than a double": "1e999",
    "an integer of 65 bits": "18446744073709551616",
    "half a surrogate pair": '"\\ud800"',
    "a key twice": '{"a": 1, "a": 2}',
    "too deep": "[" * (LEVELS + 1) + "]" * (LEVELS + 1),
}
VALUES: dict[str, Any] = {"NaN": float("nan"), "an integer of 65 bits": 2**64, "half a surrogate pair": "\ud800"}


def contents() -> dict[str, tuple[Any, int]]:
    """What passes a gateway, and how often it is measured."""
    meta = {"id": "x", "prompt_tokens": 3, "completion_tokens": 32, "cached_tokens": 0, "finish_reason": None}
    choice = {
        "index": 0,
        "text": " a",
        "token_ids": [1234],
        "logprobs": {"token_logprobs": [-0.5]},
        "finish_reason": None,
    }
    ids = random.Random(0).choices(range(150_000), k=1 << 20)
    return {
        "an event of /generate, 32 tokens": ({"text": "", "output_ids": list(range(32)), "meta_info": meta}, 5000),
        "an event of /v1/completions": (
            {"id": "x", "object": "text_completion", "created": 1, "choices": [choice]},
            5000,
        ),
        "a body of 4096 ids": ({"prompt": ids[:4096], "max_tokens": 64}, 300),
        "a body of 2^20 ids": ({"prompt": ids, "max_tokens": 64}, 7),
    }


def microseconds(function: Callable[[], Any], times: int) -> float:
    """Of the processor, the median."""
    took = []
    for _ in range(times):
        begun = time.thread_time_ns()
        function()
        took.append((time.thread_time_ns() - begun) / 1e3)
    return round(statistics.median(took), 1)


def outcome(function: Callable[[Any], Any], content: Any) -> str:
    """What comes out, or the error."""
    try:
        return repr(function(content))[:60]
    except (ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"[:90]


def main() -> None:
    """Measures, prints, and writes the result where it is told to."""
    found: dict[str, Any] = {"orjson": orjson.__version__, "microseconds": {}, "read": {}, "written": {}}
    for name, (content, times) in contents().items():
        data = json.dumps(content, separators=(",", ":")).encode()
        large = len(data) >= LARGE_BYTES
        found["microseconds"][name] = {
            "json_numbers.load_request": microseconds(partial(load_request, data), times),
            "json_numbers.load_answer": microseconds(partial(load_answer, data), times),
            "orjson.loads": microseconds(partial(orjson.loads, data), times),
            "json_numbers.dump": microseconds(partial(dump, content, large), times),
            "orjson.dumps": microseconds(partial(orjson.dumps, content), times),
        }
    for name, text in TEXTS.items():
        readers = (load_request, load_answer, orjson.loads)
        found["read"][name] = {
            f"{each.__module__.rpartition('.')[2]}.{each.__name__}": outcome(each, text.encode()) for each in readers
        }
    for name, value in VALUES.items():
        writers = (dump, orjson.dumps)
        found["written"][name] = {
            f"{each.__module__.rpartition('.')[2]}.{each.__name__}": outcome(each, value) for each in writers
        }
    print(json.dumps(found, indent=1))
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
