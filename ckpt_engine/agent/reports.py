"""Waits for workers' reports of an install. Workers send them before their engine answers, but over another connection;
an install has ended when both have arrived."""

from __future__ import annotations

import asyncio


class Reports:
    """The missing reports. On the agent's loop."""

    def __init__(self) -> None:
        self._missing: set[tuple[int, bytes]] = set()  # rank and boot id
        self._complete = asyncio.Event()

    def expect(self, rank: int, boot_id: bytes) -> None:
        """Notes that a worker was given an order, so that its report will come."""
        self._missing.add((rank, boot_id))
        self._complete.clear()

    def arrived(self, rank: int, boot_id: bytes) -> None:
        """Notes that the machine has a worker's report."""
        self._missing.discard((rank, boot_id))
        if not self._missing:
            self._complete.set()

    async def wait_all(self, seconds: float) -> None:
        """Waits until no report is missing, or `seconds` have passed; then the missing ones are given up."""
        if self._missing:
            try:
                await asyncio.wait_for(self._complete.wait(), seconds)
            except TimeoutError:
                self._missing.clear()
