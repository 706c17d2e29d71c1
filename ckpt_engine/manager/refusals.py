"""The recently refused updates: the ledger does not have them, and their callers will ask why."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from ckpt_engine.v1 import weights_pb2

KEPT = 100


@dataclass(frozen=True)
class Refusal:
    """One update that ended before it had anything to install."""

    lineage: str
    version: int | None  # None: the next one
    problem: weights_pb2.Problem
    time: float = field(default_factory=time.time)  # Unix seconds


class Refusals:
    """The last refusals since the manager started."""

    def __init__(self) -> None:
        self.count = 0  # of all refusals, also of those that were dropped
        self._refusals: deque[Refusal] = deque(maxlen=KEPT)

    def add(self, refusal: Refusal) -> None:
        """Adds a refusal, and drops the oldest one if there are too many."""
        self._refusals.append(refusal)
        self.count += 1

    def newest_first(self, limit: int) -> Sequence[Refusal]:
        """The latest refusals, at most `limit`."""
        return [*reversed(self._refusals)][:limit]
