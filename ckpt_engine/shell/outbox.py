"""Messages on their way to one peer, bounded: a peer that does not read is detected instead of waited for."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Generic, TypeVar

from ckpt_engine.core.problems import unavailable
from ckpt_engine.v1 import weights_pb2

Outgoing = TypeVar("Outgoing")


class Outbox(Generic[Outgoing]):
    """Messages on their way to one peer. At most ``limit`` wait; with one more the peer counts as stuck."""

    def __init__(self, peer: str, limit: int) -> None:
        self.peer = peer
        self.problem: weights_pb2.Problem | None = None
        self._limit = limit
        self._waiting: deque[Outgoing] = deque()
        self._closed = False
        self._changed = asyncio.Event()

    @property
    def closed(self) -> bool:
        """Whether nothing is taken in any more."""
        return self._closed

    @property
    def has_room(self) -> bool:
        """Whether less than half of the limit waits; else callers leave optional messages out."""
        return len(self._waiting) < self._limit // 2

    def put(self, message: Outgoing) -> None:
        """Queues a message. It is dropped when the outbox is closed, which an overflow does too."""
        if self._closed:
            return
        if len(self._waiting) >= self._limit:
            self._waiting.clear()
            self.close(unavailable(f"{self.peer} does not read: {self._limit} messages wait for it").problem)
            return
        self._waiting.append(message)
        self._changed.set()

    def close(self, problem: weights_pb2.Problem | None = None) -> None:
        """Ends the stream after what is queued; with a problem, it ends with that status. The first call counts."""
        if not self._closed:
            self._closed = True
            self.problem = problem
            self._changed.set()

    async def take(self) -> Outgoing | None:
        """The next message, or None when the outbox is closed and empty."""
        while not self._waiting:
            if self._closed:
                return None
            self._changed.clear()
            await self._changed.wait()
        return self._waiting.popleft()
