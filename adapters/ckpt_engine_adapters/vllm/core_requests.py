"""Puts our salt on each request that vLLM's API server sends to its core.

It decides where: at the one call by which vLLM's client of the core (AsyncMPClient and its kinds for data parallelism)
sends a request, whichever route it came by, with each of its samples and prompts. It does not decide the salt
(ckpt_engine/gate/salt.py).

vLLM hashes a request's first block with its `cache_salt` and each further block with the hash before it, when the
request comes to the core; so blocks that a request fills later, over an update, are found by its own salt alone. What
an encoder made of a picture is kept by the picture's identifier, which is salted likewise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ckpt_engine.gate.salt import CacheSalt

ELSEWHERE = (
    "this vLLM sends requests to its core in a way that is not known, so that later requests could be answered from "
    "caches of old weights; use a version that ckpt-engine supports"
)


def salt_requests(engine: Any, salt: CacheSalt) -> str:
    """Has all requests of `engine` (vLLM's AsyncLLM) salted from now on. Returns why that cannot be; empty: it is done.
    To be called once for an engine."""
    core: Any = getattr(engine, "engine_core", None)
    send = getattr(core, "add_request_async", None)
    if send is None:
        return ELSEWHERE

    async def send_with_salt(request: Any) -> None:
        salt_request(request, salt)
        await send(request)

    core.add_request_async = send_with_salt
    return ""


def salt_request(request: Any, salt: CacheSalt) -> None:
    """Salts an EngineCoreRequest. To be called once for each, when it is sent."""
    caller_salt = request.cache_salt
    request.cache_salt = salt.of(caller_salt)
    if request.cache_salt != caller_salt and request.mm_features:
        request.mm_features = _with_salt(request.mm_features, request.cache_salt)


def _with_salt(features: Sequence[Any], salt: str) -> list[Any]:
    """Copies a request's pictures and the like (MultiModalFeatureSpec) under identifiers of this salt; its samples
    share the originals. One without `mm_hash` keeps its identifier, by which API server and core find it."""
    return [
        replace(each, identifier=f"{salt}:{each.identifier}") if getattr(each, "mm_hash", None) else each
        for each in features
    ]
