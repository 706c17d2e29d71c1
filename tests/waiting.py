"""How tests wait for other threads and processes: until it is so, for a minute at least, and never for a set time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

PATIENCE = 60.0
"""Seconds."""


def eventually(what: str, seconds: float, look: Callable[[], T | None]) -> T:
    """What `look` finds, as soon as it finds something; AssertionError naming `what` after `seconds`."""
    end = time.monotonic() + seconds
    while True:
        found = look()
        if found:
            return found
        assert time.monotonic() < end, f"not within {seconds:g} s: {what}"
        time.sleep(0.02)


async def until(look: Callable[[], object], what: str = "it is so") -> None:
    """Returns once `look` finds something; AssertionError naming `what` after a minute. For what tells nothing when it
    changes."""
    end = time.monotonic() + PATIENCE
    while not look():
        assert time.monotonic() < end, f"not within {PATIENCE:g} s: {what}"
        await asyncio.sleep(0.02)


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def assert_gone(*pids: int) -> None:
    """Waits until none of these processes runs."""
    eventually(f"{pids} have ended", PATIENCE, lambda: not any(map(alive, pids)))
