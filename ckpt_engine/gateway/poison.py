"""Finds out whether a request kills engines. On the gateway's loop.

A prompt that kills engines must not be tried on the whole fleet. So each engine that broke the request off is watched.
It may die only a while later, and may be restarted long before the next engine breaks the request off. So it is watched
until the request has run on another engine for long enough: a prompt that kills engines does so soon.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from ckpt_engine.gateway.fleet import FleetReplica
from ckpt_engine.gateway.upstream import Upstream

LOOK_SECONDS = 0.1
"""Seconds between two checks of engines that may still die."""

CLEARED_TOKENS, CLEARED_SECONDS = 512, 60.0
"""After so many tokens and seconds on other engines, the request is not the reason why an engine died."""


@dataclass(frozen=True)
class Broken:
    """An engine broke a request off."""

    member: FleetReplica
    url: str  # the engine's, at that time
    seconds: float  # when, monotonic
    tokens: int  # of the answer until then

    def cleared(self, seconds: float, tokens: int) -> bool:
        """Whether the request has gone on for long enough since. Pure."""
        return tokens - self.tokens >= CLEARED_TOKENS and seconds - self.seconds >= CLEARED_SECONDS


class Suspects:
    """The engines that broke one sample off, and which of them have died."""

    def __init__(self, upstream: Upstream, most: int, seconds: float) -> None:
        """most: how many dead engines make the request count as poison. seconds: how long `dead` waits at most for
        engines that may be dying."""
        self._upstream, self._most, self._seconds = upstream, most, seconds
        self._broke: dict[tuple[str, int], Broken] = {}
        self._dead: set[tuple[str, int]] = set()

    def add(self, member: FleetReplica, url: str, life: int, silent: bool, seconds: float, tokens: int) -> None:
        """Notes that an engine broke the request off.

        url, life: of the engine when it admitted the request. silent: it sent nothing for longer than it may, which
        counts as dead. seconds: now, monotonic. tokens: of the answer so far."""
        for key in [key for key, broken in self._broke.items() if broken.cleared(seconds, tokens)]:
            del self._broke[key]
            self._dead.discard(key)
        self._broke[member.name, life] = Broken(member, url, seconds, tokens)
        if silent:
            self._dead.add((member.name, life))

    async def dead(self) -> int:
        """How many of them have died. If those that may be dying would reach `most`, it waits a moment for them."""
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
