"""Which replica gets a request: the same one for the same session, unless it has more than its share. Pure.

Rendezvous hashing with bounded load: every replica has a rank for every key, made from both names alone, so that any
number of gateways that share nothing agree. The first in rank with a load below the bound is taken.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence

BOUND = 1.25
"""A replica takes at most this times the mean load, plus one."""

PREFIX_TOKENS = 64
"""First ids of a prompt that choose its replica if it has no session: equal beginnings meet their cache."""


def key_of(session: str, prompt: Sequence[int]) -> bytes:
    """The key of a request, which is hashed."""
    if session:
        return b"session:" + session.encode(errors="surrogatepass")  # JSON may hold halves of characters
    return b"prompt:" + ",".join(map(str, prompt[:PREFIX_TOKENS])).encode()


def ranked(key: bytes, names: Sequence[str]) -> list[str]:
    """The names, the best for this key first."""
    return sorted(names, key=lambda name: hashlib.blake2b(key, digest_size=8, key=_name_key(name)).digest())


def choose(key: bytes, loads: Mapping[str, int]) -> str:
    """Chooses one of the names. loads: requests that run and wait there. Raises ValueError if there are none."""
    if not loads:
        raise ValueError("there is no replica to choose")
    bound = math.ceil(BOUND * (sum(loads.values()) + 1) / len(loads)) + 1
    order = ranked(key, list(loads))
    return next((name for name in order if loads[name] < bound), min(order, key=lambda name: loads[name]))


def _name_key(name: str) -> bytes:
    """BLAKE2's keys have 64 bytes at most."""
    encoded = name.encode()
    return encoded if 0 < len(encoded) <= 64 else hashlib.sha256(encoded).digest()
