"""The updates that were refused lately: they reach no ledger, and somebody will ask why."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from ckpt_engine.v1 import weights_pb2

KEPT = 100


@dataclass(frozen=True)
class Refusal:
    """One update that ended before it had anything to install. time: Unix seconds. version: None: the next one."""

    lineage: str
    version: int | None
    problem: weights_pb2.Problem
    time: float = field(default_factory=time.time)


class Refusals:
    """The last ones since the manager started. count: of all of them."""

    def __init__(self) -> None:
        self.count = 0
        self._refusals: deque[Refusal] = deque(maxlen=KEPT)

    def add(self, refusal: Refusal) -> None:
        """Forgets the oldest one where there are too many."""
        self._refusals.append(refusal)
        self.count += 1

    def newest_first(self, limit: int) -> Sequence[Refusal]:
        """The latest refusals, at most so many."""
        return [*reversed(self._refusals)][:limit]
