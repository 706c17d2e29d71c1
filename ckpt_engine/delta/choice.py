"""Whether a delta of a chunk is worth what it costs, by what was measured. Pure.

It decides neither what a delta is made of nor how it is coded: coding takes seconds of a processor that a fast network
would not take for the whole chunk.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class DeltaCosts:
    """What deltas of one version cost by now. One thread at a time."""

    bytes: int = 0  # of the chunks that were coded
    coded_bytes: int = 0  # of what came of them; of one that did not become shorter, its own
    seconds: float = 0.0  # that coding took

    def add(self, size: int, coded_size: int, seconds: float) -> None:
        """Counts a chunk."""
        self.bytes += size
        self.coded_bytes += min(size, coded_size)
        self.seconds += seconds

    def pays(self, rate: float | None) -> bool:
        """Whether the next chunk is with its reader sooner as a delta. rate: bytes a second that the way to the reader
        carries, None: unknown. What is unknown is tried."""
        if not self.bytes or not rate:
            return True
        return self.seconds + self.coded_bytes / rate < self.bytes / rate
