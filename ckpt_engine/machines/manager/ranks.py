"""What becomes of an update when a trainer rank dies, leaves its call, or offers other weights before the intent.

Its weights may change from then on. Before relays are filled that refuses the update. Afterwards the sealed record and
the relays suffice: the update goes on with what these hold or are still being filled with, and nobody reads the trainer
any more. Replicas that were to read it keep what they serve, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ckpt_engine.core.problems import unavailable
from ckpt_engine.machines.manager.course import Course
from ckpt_engine.machines.manager.members import Holder, Trainer, speaker
from ckpt_engine.machines.manager.relaying import Relaying
from ckpt_engine.v1 import weights_pb2

LEFT_SECONDS = 0.5
"""After a call was cancelled: a rank that has died has lost its session by then, too."""


@dataclass(frozen=True, slots=True)
class CallerAbsent:
    """The timer of an update after which it is looked whether a rank whose call was cancelled lives."""

    rank: int


class Ranks:
    """The trainer ranks of one update. refuse: ends it with a problem. undecided: ranks whose call was cancelled, when
    nobody knows yet whether they live; no intent is recorded meanwhile."""

    def __init__(self, course: Course, refuse: Callable[[weights_pb2.Problem], None]) -> None:
        self._course = course
        self._goal = course.goal
        self._refuse = refuse
        self.relaying: Relaying | None = None
        self.undecided: set[int] = set()

    def caller_left(self, rank: int) -> None:
        """A rank's call was cancelled. Whether it has died or does not want the update is known a little later. Whoever
        called for a version that was sealed before is no rank: nobody whose weights are read has died."""
        del self._goal.calls[rank]
        if self._goal.sealed is not None:
            if self._course.refusable:
                self._refuse(unavailable("the call was cancelled").problem)
        elif self._without(_cancelled(rank)):
            self.undecided.add(rank)
            self._course.timer(CallerAbsent(rank), LEFT_SECONDS)

    def timer(self, rank: int) -> None:
        """A rank's call was cancelled some time ago. If its process lives, that was meant."""
        self.undecided.discard(rank)
        trainer = self._course.state.members.ranks(self._goal.lineage).get(rank)
        if self._course.refusable and trainer is not None and trainer.peer is not None:
            self._refuse(_cancelled(rank))

    def back(self, trainer: Trainer) -> None:
        """A rank said hello, or published."""
        tables = {source.rank: source.table for source in self._goal.published.sources}
        if self._goal.sealed is None and trainer.table != tables.get(trainer.rank):
            did = "took back what it had published" if trainer.table is None else "published another table"
            self._without(_problem(trainer, f"rank {trainer.rank} {did} while {self._course.phase}"))

    def gone(self, member: Trainer | Holder) -> None:
        """Goes on, or refuses, without somebody whose weights are read and who will not come back."""
        self._without(_problem(member, f"{speaker(member)} is gone while {self._course.phase}"))

    def _without(self, problem: weights_pb2.Problem) -> bool:
        """Whether the update goes on, without the trainer."""
        if not self._course.refusable:
            return False
        alone = self.relaying is not None and self.relaying.alone(problem)
        if not alone:
            self._refuse(problem)
        return alone


def _cancelled(rank: int) -> weights_pb2.Problem:
    return unavailable(f"the call of rank {rank} was cancelled", ranks=(rank,)).problem


def _problem(member: Trainer | Holder, why: str) -> weights_pb2.Problem:
    return unavailable(why, ranks=(member.rank,) if isinstance(member, Trainer) else ()).problem
