"""Reports of installs that are on their way. Workers send them before their engine answers, but another way; an install
is over when both have come."""

from __future__ import annotations

import asyncio


class Reports:
    """On the agent's loop. A worker owes one from when it is given its order."""

    def __init__(self) -> None:
        self._due: set[tuple[int, bytes]] = set()  # rank and boot id
        self._none_due = asyncio.Event()

    def due(self, rank: int, boot_id: bytes) -> None:
        """A worker was given its order."""
        self._due.add((rank, boot_id))
        self._none_due.clear()

    def came(self, rank: int, boot_id: bytes) -> None:
        """The machine has a worker's report."""
        self._due.discard((rank, boot_id))
        if not self._due:
            self._none_due.set()

    async def all_came(self, seconds: float) -> None:
        """Returns when none is due any more, or after so many seconds: then what is missing stays missing."""
        if self._due:
            try:
                await asyncio.wait_for(self._none_due.wait(), seconds)
            except TimeoutError:
                self._due.clear()
