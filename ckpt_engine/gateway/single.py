"""One sample of one prompt, independent of the dialect of its request. Pure.

A request with several prompts or samples is split into these, and each is resumed by itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

SEED_BITS = 62


@dataclass(frozen=True, slots=True)
class Single:
    """One sample to generate."""

    prompt: tuple[int, ...]  # token ids, as the engine is to see them
    max_tokens: int | None  # None: as many as the model has room for
    min_tokens: int = 0
    seed: int | None = None  # None: the engine draws one
    stop_token_ids: frozenset[int] = frozenset()
    echo: bool = False  # the answer begins with the prompt
    fields: Mapping[str, Any] = field(default_factory=dict)  # the request's other fields, in the caller's dialect
    sampling: Mapping[str, Any] = field(default_factory=dict)  # its other sampling parameters, likewise


def leg_seed(seed: int | None, offset: int) -> int | None:
    """The seed of a leg that begins after `offset` tokens. The first leg has the caller's. Later legs have their own,
    or an engine would draw the same random numbers again for other tokens."""
    if seed is None or offset == 0:
        return seed
    digest = hashlib.sha256(f"{seed}:{offset}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> (64 - SEED_BITS)
