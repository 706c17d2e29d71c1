"""One sample of one prompt: what it asks for, apart from the form in which it was asked. Pure.

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
    """One sample that is to be made.

    prompt: token ids, as the engine is to see them. max_tokens None: as many as the model has room for. seed None:
    the engine draws one. fields, sampling: what else was asked for, in the caller's dialect. echo: the answer begins
    with the prompt.
    """

    prompt: tuple[int, ...]
    max_tokens: int | None
    min_tokens: int = 0
    seed: int | None = None
    stop_token_ids: frozenset[int] = frozenset()
    echo: bool = False
    fields: Mapping[str, Any] = field(default_factory=dict)
    sampling: Mapping[str, Any] = field(default_factory=dict)


def leg_seed(seed: int | None, offset: int) -> int | None:
    """The seed of a leg that begins after `offset` tokens. The first leg has the caller's; a later one has a seed of
    its own, since an engine would else draw from the same numbers again for other tokens."""
    if seed is None or offset == 0:
        return seed
    digest = hashlib.sha256(f"{seed}:{offset}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> (64 - SEED_BITS)
