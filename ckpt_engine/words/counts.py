"""Counters of the requests that a gate refused or held, which the agent reads: one small file for each API process.

The process that owns the file is its only writer, so that no lock is needed; the agent adds up what it finds. A file
outlives its process, so that counters never fall while the engine's directory is there.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from ckpt_engine.host.processes import process_start_time
from ckpt_engine.host.reserve import reserve
from ckpt_engine.words.holding import ALONE, ASLEEP, DEAD_WORKER, FULL, NO_WEIGHTS, QUARANTINED, UPDATING

REASONS = (ALONE, ASLEEP, DEAD_WORKER, FULL, NO_WEIGHTS, QUARANTINED, UPDATING)
"""Why a gate refuses, in the order of the file's numbers. New ones go to the end."""

_FILE = struct.Struct("<QQQQd32Q")  # pid, its start time, waiting now, kept so far, their seconds, refusals by reason
_WAITING, _KEPT, _SECONDS, _REFUSED = 2, 3, 4, 5


@dataclass
class Counts:
    """What gates counted: of one API process, or the sum over all of an engine."""

    held: int = 0  # requests that wait now
    held_total: int = 0  # requests that have ever waited
    held_seconds: float = 0.0  # how long those waited, together
    refusals: dict[str, int] = field(default_factory=lambda: dict.fromkeys(REASONS, 0))  # by reason


class GateCounts:
    """The counters of this process, written to its file. Used on the API server's event loop."""

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
        """Counts a request that was refused; a reason without a place in the file is not counted."""
        if reason in REASONS:
            self._values[_REFUSED + REASONS.index(reason)] += 1
            self._write()

    def waits(self) -> None:
        """Counts a request that begins to wait."""
        self._values[_WAITING] += 1
        self._values[_KEPT] += 1
        self._write()

    def waited(self, seconds: float) -> None:
        """Counts a request that waits no longer."""
        self._values[_WAITING] -= 1
        self._values[_SECONDS] += seconds
        self._write()

    def _write(self) -> None:
        _FILE.pack_into(self._map, 0, *self._values)


def counted(directory: Path) -> Counts:
    """The sum over all API processes of this engine. Any thread. A file that is being written may be read half old and
    half new."""
    found = Counts()
    for values in _files(directory):
        if process_start_time(values[0]) == values[1]:
            found.held += values[_WAITING]
        found.held_total += values[_KEPT]
        found.held_seconds += values[_SECONDS]
        for reason, number in zip(REASONS, values[_REFUSED:], strict=False):
            found.refusals[reason] += number
    return found


def _files(directory: Path) -> Iterable[tuple[int, ...]]:
    for path in directory.glob("gate-*.counts"):
        try:
            content = path.read_bytes()
        except OSError:
            continue  # the directory is being removed
        if len(content) >= _FILE.size:
            yield _FILE.unpack_from(content)
