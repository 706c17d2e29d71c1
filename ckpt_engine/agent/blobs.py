"""Caches the blobs that an agent has fetched: manifests, plans and expected digests come again with every update.

They are kept by digest, up to a number of bytes; the least recently used goes first. Dropping a blob that is in use
costs another fetch and nothing else.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable

from ckpt_engine.v1 import manager_pb2

CACHE_BYTES = 256 << 20
"""Enough for several updates of a model of 50,000 tensors on eight workers."""

Fetch = Callable[[manager_pb2.BlobRef], Awaitable[bytes]]


class BlobCache:
    """The cache. Used on one event loop. fetch: gets a blob and verifies its digest; it has its own deadline."""

    def __init__(self, fetch: Fetch, limit_bytes: int = CACHE_BYTES) -> None:
        self._fetch = fetch
        self._limit = limit_bytes
        self._blobs: OrderedDict[bytes, bytes] = OrderedDict()
        self._fetches: dict[bytes, asyncio.Task[bytes]] = {}
        self.bytes = 0

    def keep(self, ref: manager_pb2.BlobRef, data: bytes) -> None:
        """Adds a blob that the agent made itself and has uploaded to the manager."""
        if ref.digest in self._blobs or ref.size > self._limit:
            return
        self._blobs[ref.digest] = data
        self.bytes += len(data)
        while self.bytes > self._limit:
            _, dropped = self._blobs.popitem(last=False)
            self.bytes -= len(dropped)

    async def get(self, ref: manager_pb2.BlobRef) -> bytes:
        """Gets a blob. Callers that ask for the same blob at once share one fetch. Raises what `fetch` raises."""
        digest = ref.digest
        if digest in self._blobs:
            self._blobs.move_to_end(digest)
            return self._blobs[digest]
        if digest not in self._fetches:
            coming = asyncio.ensure_future(self._fetch(ref))
            self._fetches[digest] = coming
            coming.add_done_callback(lambda done: self._arrived(ref, done))
        # Shielded: a caller that gives up must not cancel the fetch for the others.
        return await asyncio.shield(self._fetches[digest])

    def _arrived(self, ref: manager_pb2.BlobRef, done: asyncio.Task[bytes]) -> None:
        del self._fetches[ref.digest]
        if not done.cancelled() and done.exception() is None:
            self.keep(ref, done.result())
