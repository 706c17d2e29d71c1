"""Counts the engines that died under one request. On the gateway's loop.

A prompt that kills engines must not walk through the fleet. An engine may live on for a while after it broke a request
off, and be restarted long before the next one breaks. So each stays a suspect until the request has run elsewhere for
long enough: one that kills does not run long in the next engine either.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from ckpt_engine.gateway.fleet import FleetReplica
from ckpt_engine.gateway.upstream import Upstream

LOOK_SECONDS = 0.1
"""Time between two probes of engines that may still die."""

CLEARED_TOKENS, CLEARED_SECONDS = 512, 60.0
"""Tokens that a request must get elsewhere, and seconds that it must last, to be cleared of an engine's death."""


@dataclass(frozen=True)
class Broken:
    """An engine broke a request off."""

    member: FleetReplica
    url: str  # as it was then
    seconds: float  # when, monotonic
    tokens: int  # of the answer by then

    def cleared(self, seconds: float, tokens: int) -> bool:
        """Whether the request has run for long enough since. Pure."""
        return tokens - self.tokens >= CLEARED_TOKENS and seconds - self.seconds >= CLEARED_SECONDS


class Suspects:
    """Engines that died under one sample."""

    def __init__(self, upstream: Upstream, most: int, seconds: float) -> None:
        """most: deaths that are too many. seconds: how long to watch engines that may be dying, where that decides."""
        self._upstream, self._most, self._seconds = upstream, most, seconds
        self._broke: dict[tuple[str, int], Broken] = {}
        self._dead: set[tuple[str, int]] = set()

    def add(self, member: FleetReplica, url: str, life: int, silent: bool, seconds: float, tokens: int) -> None:
        """Notes that an engine broke the request off.

        url, life: when it let the request in. silent: it sent nothing for as long as an engine may, which counts as a
        death. seconds: now, monotonic. tokens: of the answer by now.
        """
        for key in [key for key, broken in self._broke.items() if broken.cleared(seconds, tokens)]:
            del self._broke[key]
            self._dead.discard(key)
        self._broke[member.name, life] = Broken(member, url, seconds, tokens)
        if silent:
            self._dead.add((member.name, life))

    async def dead(self) -> int:
        """Counts those that have died. Waits a moment for engines that may be dying if they would make it too many."""
        end = time.monotonic() + self._seconds
        while True:
            await asyncio.gather(*(self._look(key) for key in self._broke.keys() - self._dead))
            count = len(self._dead)
            if count >= self._most or len(self._broke) < self._most or time.monotonic() >= end:
                return count
            await asyncio.sleep(LOOK_SECONDS)

    async def _look(self, key: tuple[str, int]) -> None:
        member, url = self._broke[key].member, self._broke[key].url
        if member.life == key[1] and not await self._upstream.lives(url) and member.life == key[1]:
            member.died()  # unless another request has noted that meanwhile
        if member.life != key[1]:
            self._dead.add(key)
