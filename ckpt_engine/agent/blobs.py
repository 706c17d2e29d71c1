"""Blobs that an agent has fetched: manifests, plans and expected digests come again with every update.

Kept by digest, up to a number of bytes; what was used least recently goes first. What is in use is held by whoever
uses it, so dropping it here costs a fetch and nothing else.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable

from ckpt_engine.v1 import manager_pb2

CACHE_BYTES = 256 << 20
"""Several updates' worth for a model of 50,000 tensors on eight workers."""

Fetch = Callable[[manager_pb2.BlobRef], Awaitable[bytes]]


class BlobCache:
    """Used on one event loop. fetch: gets a blob and verifies its digest; it has a deadline of its own."""

    def __init__(self, fetch: Fetch, limit_bytes: int = CACHE_BYTES) -> None:
        self._fetch = fetch
        self._limit = limit_bytes
        self._held: OrderedDict[bytes, bytes] = OrderedDict()
        self._coming: dict[bytes, asyncio.Task[bytes]] = {}
        self.bytes = 0

    def keep(self, ref: manager_pb2.BlobRef, data: bytes) -> None:
        """Keeps what we made ourselves and have put with the manager."""
        if ref.digest in self._held or ref.size > self._limit:
            return
        self._held[ref.digest] = data
        self.bytes += len(data)
        while self.bytes > self._limit:
            _, dropped = self._held.popitem(last=False)
            self.bytes -= len(dropped)

    async def get(self, ref: manager_pb2.BlobRef) -> bytes:
        """The blob's bytes. Many may ask for one blob at once; it is fetched once. Raises what `fetch` raises."""
        digest = ref.digest
        if digest in self._held:
            self._held.move_to_end(digest)
            return self._held[digest]
        if digest not in self._coming:
            coming = asyncio.ensure_future(self._fetch(ref))
            self._coming[digest] = coming
            coming.add_done_callback(lambda done: self._arrived(ref, done))
        # Shielded: one that gives up must not take the blob away from the others.
        return await asyncio.shield(self._coming[digest])

    def _arrived(self, ref: manager_pb2.BlobRef, done: asyncio.Task[bytes]) -> None:
        del self._coming[ref.digest]
        if not done.cancelled() and done.exception() is None:
            self.keep(ref, done.result())
