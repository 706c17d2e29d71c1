"""Says whether what a thread copies is to give way to what its process computes meanwhile. It copies nothing itself.

A copy in the background has a stream of its own, in pieces so small that a copy of the computation, which shares the
GPU's copy engines with it, waits for a fraction of a millisecond, and its thread seldom takes the interpreter's lock.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

SEGMENT_BYTES = 16 << 20
"""Most bytes of a piece: 0.3 ms of PCIe 5."""

IN_FLIGHT = 6
"""Pieces that are queued at a time, so that the link is busy until the thread has the interpreter's lock again."""

POLL_SECONDS = 0.3e-3
"""Seconds between two looks at what has arrived."""


class _Thread(threading.local):
    background = False


_thread = _Thread()


def is_background() -> bool:
    """Whether copies that this thread prepares or runs now give way."""
    return _thread.background


@contextmanager
def in_background() -> Iterator[None]:
    """Has copies give way that this thread prepares and runs within the block."""
    _thread.background = True
    try:
        yield
    finally:
        _thread.background = False
