"""What the workers of a replica could not open although it was offered, so they are planned to read it another way.

It is known of a process and of memory: a worker that was started anew, and what is published anew, are tried again. So
is what leaves a replica without any way, in the same update; where a relay was to bring it and did not, in the next.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ckpt_engine.core.offers import Shut
from ckpt_engine.v1 import manager_pb2, weights_pb2

KEPT = 256
"""Of one replica, the newest: far more than it has sources, since one is told for each."""


@dataclass
class ShutWays:
    """What the workers of one replica could not open, by worker process, transport and region."""

    _told: dict[tuple[bytes, str, bytes], weights_pb2.Unopened] = field(default_factory=dict)

    def note(self, workers: Sequence[manager_pb2.WorkerStatus], told: Iterable[weights_pb2.Unopened]) -> None:
        """Takes in what workers tell. workers: those that there are now; what others could not open is forgotten,
        unless it is told now: these may be known here a little later than what they tell."""
        new = {(each.boot_id, each.transport, each.locator): each for each in told if each.boot_id}
        boots = {worker.boot_id for worker in workers} | {key[0] for key in new}
        here = [(key, each) for key, each in (self._told | new).items() if key[0] in boots]
        self._told = dict(here[-KEPT:])

    def of(self, boot_id: bytes) -> tuple[Shut, ...]:
        """What one worker process could not open, in one order."""
        return tuple(sorted(Shut(*key[1:], each.reason) for key, each in self._told.items() if key[0] == boot_id))

    def told(self, boots: Iterable[bytes]) -> list[weights_pb2.Unopened]:
        """What these worker processes could not open."""
        present = set(boots)
        return [each for key, each in self._told.items() if key[0] in present]

    def forget(self) -> bool:
        """Forgets all, so that they try again; returns whether there was anything that they could not open."""
        known = bool(self._told)
        self._told.clear()
        return known
