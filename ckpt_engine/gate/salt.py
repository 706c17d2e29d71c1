"""Salts the key under which an engine caches a request's beginning, so that no request finds caches of older weights.

It decides the salt from the engine's page and the caller's own salt. It does not decide which updates keep caches
(the agent counts those on the page), nor where an engine takes a salt: an adapter puts it on the request that goes to
the engine's core, in the API server.

An update in place lets running requests go on over caches of the old weights, and what they add is a mixture of both.
So each such update begins another salt: requests from before it share theirs with one another, and with none that comes
later. It is made of a count and not of a version: after going back to a version, what was cached across an update would
be found again. Other updates empty the caches and leave the salt alone, so that what running requests compute again is
found by later ones. All API servers of an engine read one page, so they agree.
"""

from __future__ import annotations

import hashlib
from typing import Any

from ckpt_engine.gate.page import EnginePage


class CacheSalt:
    """The salt of an engine's requests. May be used on any thread."""

    def __init__(self, page: EnginePage) -> None:
        self._page = page
        self._hash: tuple[int, Any] = (0, None)  # of the page: a count, and the hash of it and of the boot ids

    def of(self, caller_salt: str | None) -> str | None:
        """What a request is to have as its salt.

        caller_salt: what its caller gave, which goes on separating; None or empty: nothing.
        Until the first update over kept caches it is what the caller gave. Then it is 64 characters (vLLM takes 128): a
        hash over the boot ids of the workers, the count of such updates, and what the caller gave.
        """
        count = self._page.caches_kept()
        if count == 0:
            return caller_salt
        hash_count, start = self._hash
        if hash_count != count:
            # Caches can outlive an engine, in a store beside it; boot ids are new with each start.
            boots = b"".join(word.boot_id for word in self._page.read())
            start = hashlib.sha256(boots + count.to_bytes(8, "little"))
            self._hash = count, start
        salt = start.copy()
        salt.update((caller_salt or "").encode(errors="surrogatepass"))
        return str(salt.hexdigest())
