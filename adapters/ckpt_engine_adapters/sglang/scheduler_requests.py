"""Puts our salt on each request that SGLang's API server makes for its schedulers.

It decides where: on the tokenised request, once for each prompt and sample, whichever route it came by. It does not
decide the salt (ckpt_engine/gate/salt.py).

SGLang's radix tree has a tree of its own for each `extra_key`, and a request keeps its key from its first match to its
last insertion; so what it adds over an update is found by its own salt alone.
"""

from __future__ import annotations

from typing import Any

from ckpt_engine.gate.salt import CacheSalt

_MAKER = "sglang.srt.managers.tokenizer_manager.TokenizerManager._create_tokenized_object"

ELSEWHERE = (
    f"this SGLang has no {_MAKER}, so that later requests could be answered from caches of old weights; use a version "
    "that ckpt-engine supports"
)
EMBEDS = (
    "it serves embeddings, whose requests SGLang caches under no key, so that later ones could be answered from caches "
    "of old weights; start it with --disable-radix-cache"
)


def salt_requests(settings: Any, salt: CacheSalt) -> str:
    """Has all requests of this process salted from now on. settings: SGLang's ServerArgs. Returns why the server cannot
    be updated in place; empty: it can."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def salt_request(request: Any, *_: Any, **__: Any) -> None:
        if hasattr(request, "extra_key"):
            request.extra_key = salt.of(request.extra_key)

    HookRegistry.register(_MAKER, salt_request, HookType.AFTER)
    HookRegistry.apply_hooks()
    if _MAKER not in HookRegistry._patched:
        return ELSEWHERE
    if getattr(settings, "is_embedding", False) and not getattr(settings, "disable_radix_cache", False):
        return EMBEDS
    return ""
