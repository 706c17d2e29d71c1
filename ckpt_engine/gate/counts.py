"""Counters of the requests that a gate refused, held and let in, in a file that the agent reads, one an API process.

The owning process is the file's only writer, so no lock is needed; the agent adds up all files. A file outlives its
process, so that counters never fall as long as the engine's directory exists.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from ckpt_engine.core.version_bounds import (
    LINEAGE_CHANGED,
    ROLLED_BACK,
    VERSION_CHANGED,
    VERSION_GONE,
    VERSION_NOT_YET,
)
from ckpt_engine.gate.holding import ALONE, ASLEEP, DEAD_WORKER, FULL, NO_WEIGHTS, QUARANTINED, UPDATING
from ckpt_engine.host.processes import process_start_time
from ckpt_engine.host.reserve import reserve

REASONS = (
    *(ALONE, ASLEEP, DEAD_WORKER, FULL, NO_WEIGHTS, QUARANTINED, UPDATING),
    *(VERSION_NOT_YET, VERSION_GONE, ROLLED_BACK, VERSION_CHANGED, LINEAGE_CHANGED),
)
"""Reasons of a gate's refusals, in the order of the file's numbers. Append new ones."""

_FILE = struct.Struct("<QQQQd32QQQ")
"""pid, its start time, waiting now, kept so far, their seconds, refusals by reason, answered, failed of these."""
_WAITING, _KEPT, _SECONDS, _REFUSED, _ANSWERED, _FAILED = 2, 3, 4, 5, 37, 38


@dataclass
class Counts:
    """Counters of the requests at an engine's gate."""

    held: int = 0  # requests that wait now
    held_total: int = 0  # requests that have waited
    held_seconds: float = 0.0  # that all of them have waited
    answered: int = 0  # requests that were let in, and have ended
    failed: int = 0  # of these: the engine answered 5xx, or broke off
    refusals: dict[str, int] = field(default_factory=lambda: dict.fromkeys(REASONS, 0))


class GateCounts:
    """The counters of this process, for writing. Used on the API server's event loop."""

    def __init__(self, directory: Path) -> None:
        """Raises CkptEngineError if there is no room for the file."""
        pid = os.getpid()
        path = directory / f"gate-{pid}.counts"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            reserve(descriptor, path, _FILE.size)
            self._map = mmap.mmap(descriptor, _FILE.size)
        finally:
            os.close(descriptor)
        self._values: list[int | float] = list(_FILE.unpack_from(self._map))
        self._values[0], self._values[1], self._values[_WAITING] = pid, process_start_time(pid), 0
        self._write()

    def refused(self, reason: str) -> None:
        """Counts a refused request; a reason without a place in the file is not counted."""
        if reason in REASONS:
            self._values[_REFUSED + REASONS.index(reason)] += 1
            self._write()

    def answered(self, failed: bool) -> None:
        """Counts a request that was let in, and has ended."""
        self._values[_ANSWERED] += 1
        self._values[_FAILED] += failed
        self._write()

    def waits(self) -> None:
        """Counts a request that starts to wait."""
        self._values[_WAITING] += 1
        self._values[_KEPT] += 1
        self._write()

    def waited(self, seconds: float) -> None:
        """Counts a request that has stopped waiting, after `seconds`."""
        self._values[_WAITING] -= 1
        self._values[_SECONDS] += seconds
        self._write()

    def _write(self) -> None:
        _FILE.pack_into(self._map, 0, *self._values)


def total_counts(directory: Path) -> Counts:
    """Adds up the counters of all API processes of this engine. On any thread; a file that is being written may be read
    half old and half new."""
    total = Counts()
    for values in _files(directory):
        if process_start_time(values[0]) == values[1]:
            total.held += values[_WAITING]
        total.held_total += values[_KEPT]
        total.held_seconds += values[_SECONDS]
        total.answered += values[_ANSWERED]
        total.failed += values[_FAILED]
        for reason, number in zip(REASONS, values[_REFUSED:], strict=False):
            total.refusals[reason] += number
    return total


def _files(directory: Path) -> Iterable[tuple[int, ...]]:
    for path in directory.glob("gate-*.counts"):
        try:
            content = path.read_bytes()
        except OSError:
            continue  # the directory is being deleted
        if len(content) >= _FILE.size:
            yield _FILE.unpack_from(content)
