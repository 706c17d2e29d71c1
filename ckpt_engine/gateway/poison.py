"""Whether a request kills engines: those that broke it off, and what has become of them since. On the gateway's loop.

A prompt that kills engines must not walk through the fleet. An engine may live on for a while after it broke a request
off, and be back long before the next one breaks; so each stays a suspect until the request has shown that it does no
harm: a request that kills stands in the next engine where it stood in the last one, and does not go on there for long.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from ckpt_engine.gateway.fleet import FleetReplica
from ckpt_engine.gateway.upstream import Upstream

LOOK_SECONDS = 0.1
"""Between two looks at engines that may still die."""

CLEARED_TOKENS, CLEARED_SECONDS = 512, 60.0
"""So many tokens elsewhere, and so long, clear a request of what became of an engine."""


@dataclass(frozen=True)
class Broken:
    """An engine broke a request off. url: as it was then. seconds: when, monotonic; tokens: of the answer by then."""

    member: FleetReplica
    url: str
    seconds: float
    tokens: int

    def cleared(self, seconds: float, tokens: int) -> bool:
        """Whether the request has gone on for long enough since. Pure."""
        return tokens - self.tokens >= CLEARED_TOKENS and seconds - self.seconds >= CLEARED_SECONDS


class Suspects:
    """Engines that died under one sample. seconds: how long engines that may still die are watched, once that would
    decide."""

    def __init__(self, upstream: Upstream, most: int, seconds: float) -> None:
        self._upstream, self._most, self._seconds = upstream, most, seconds
        self._broke: dict[tuple[str, int], Broken] = {}
        self._dead: set[tuple[str, int]] = set()

    def add(self, member: FleetReplica, url: str, life: int, silent: bool, seconds: float, tokens: int) -> None:
        """Notes that an engine broke the request off, now (seconds, monotonic), when the answer had so many tokens.
        url, life: as they were when it let the request in. silent: it brought nothing for as long as an engine may,
        which is a death to whoever waits."""
        for key in [key for key, broken in self._broke.items() if broken.cleared(seconds, tokens)]:
            del self._broke[key]
            self._dead.discard(key)
        self._broke[member.name, life] = Broken(member, url, seconds, tokens)
        if silent:
            self._dead.add((member.name, life))

    async def dead(self) -> int:
        """How many of them have died. Waits a moment for those that may be dying if they would make it too many."""
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
            member.died()  # unless others have found that out meanwhile
        if member.life != key[1]:
            self._dead.add(key)
