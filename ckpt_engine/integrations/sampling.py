"""Sampling parameters that change nothing, which requests leave out, since not all servers know each of them.

Decides nothing about what a framework samples: each builds its own requests, by the names of OpenAI's API and vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

NEUTRAL: Mapping[str, Sequence[Any]] = {
    "top_p": (None, 1.0),
    "top_k": (None, 0, -1),
    "min_p": (None, 0.0),
    "repetition_penalty": (None, 1.0),
    "frequency_penalty": (None, 0.0),
    "presence_penalty": (None, 0.0),
}
"""The values with which each parameter changes nothing."""


def without_neutral(options: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters that change something, and those of which this is not known."""
    return {name: value for name, value in options.items() if value not in NEUTRAL.get(name, ())}
