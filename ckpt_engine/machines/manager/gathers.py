"""All updates that were called and have not begun: one gather for each lineage, side by side.

Decides which calls wait and for how long, and whose turn it is:
- A lineage of which this manager knows no rank is refused at once. After a restart it waits first for members to dial
  in again. One whose ranks have all lost their sessions has a lease to come back.
- A gather that lacks ranks holds up nobody: no other lineage, no late replica, no sleep or wake.
- Those that lack nothing take turns in the order in which that came true, in each pool. So a lineage that calls again
  at once comes after those that waited.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.machines.events import Call
from ckpt_engine.machines.manager.gather import Gather
from ckpt_engine.machines.manager.goal import Coming, Goal
from ckpt_engine.machines.manager.publications import Publications
from ckpt_engine.machines.manager.state import State
from ckpt_engine.v1 import manager_pb2, weights_pb2

MOST_DESCRIBED = 4
"""Gathers that the status describes; the others are counted."""


@dataclass(frozen=True, slots=True)
class GatherEnd:
    """Key of the timer that ends a lineage's gather."""

    lineage: str


@dataclass(frozen=True, slots=True)
class SessionsAbsent:
    """Key of the timer that ends waiting for any session of a lineage that calls."""

    lineage: str


@dataclass
class Gathers:
    """The calls that wait for their update, one gather a lineage.

    by_lineage: oldest first. turns: lineages that lack nothing, with their goals, in the order of their turns.

    lonely: lineages that call while none of their ranks has a session.
    """

    state: State
    publications: Publications
    by_lineage: dict[str, Gather] = field(default_factory=dict)
    turns: dict[str, Goal] = field(default_factory=dict)
    lonely: set[str] = field(default_factory=set)

    def join(self, call: Call, request: manager_pb2.UpdateWeightsRequest, now: float) -> None:
        """Takes a rank's call in. Raises ABORTED (for this call alone) if it cannot be part of the update."""
        gather = self.by_lineage.get(request.lineage)
        if gather is None:
            gather = Gather(self.state, self.publications, request.lineage, now)
        gather.join(call, request, now)
        self.by_lineage[request.lineage] = gather
        self._wait(gather, now)

    def cancelled(self, call: Call) -> None:
        """Forgets a rank's call whose caller has gone; the other ranks wait on, and it may call again."""
        for gather in list(self.by_lineage.values()):
            for rank in [rank for rank, other in gather.calls.items() if other == call]:
                gather.leave(rank)
            if not gather.calls:
                self._end(gather)

    def look(self, settled: bool, now: float) -> None:
        """After every event: refuses what cannot begin, and lets those queue up that lack nothing any more."""
        for gather in list(self.by_lineage.values()):
            try:
                self.state.check_ledger()
                if not settled:
                    continue
                self._look_for_ranks(gather)
                goal = gather.goal(now)
            except CkptEngineError as error:
                self._refuse(gather, error.problem)
                continue
            if goal is None:
                self.turns.pop(gather.lineage, None)
            else:
                first = gather.lineage not in self.turns
                self.turns[gather.lineage] = goal
                if first:
                    self._wait(gather, now)

    def coming(self) -> list[Coming]:
        """The lineages that lack nothing, in the order of their turns."""
        return [
            Coming(f"update of lineage {lineage!r}", goal, partial(self._end, self.by_lineage[lineage]))
            for lineage, goal in self.turns.items()
        ]

    def timer(self, key: GatherEnd | SessionsAbsent, now: float) -> None:
        """A gather's time is over, or that of a lineage without sessions."""
        gather = self.by_lineage.get(key.lineage)
        if gather is None:
            return
        if isinstance(key, SessionsAbsent):
            if gather.lineage in self.lonely:
                self._refuse(gather, gather.nobody().problem)
        elif gather.seconds(now) > 0:
            self._wait(gather, now)  # it lacked something meanwhile
        else:
            self._refuse(gather, gather.overdue().problem)

    def describe(self) -> str:
        """What is going on, for people; empty if nothing is."""
        gathers = list(self.by_lineage.values())
        said = [gather.describe() for gather in gathers[:MOST_DESCRIBED]]
        if len(gathers) > MOST_DESCRIBED:
            said.append(f"and {len(gathers) - MOST_DESCRIBED} more lineages")
        return " | ".join(said)

    def _look_for_ranks(self, gather: Gather) -> None:
        if not gather.known():
            raise gather.nobody()
        alone, key = not gather.connected(), SessionsAbsent(gather.lineage)
        if alone and gather.lineage not in self.lonely:
            self.lonely.add(gather.lineage)
            self.state.set_timer(key, self.state.deadlines.lease)
        elif not alone and gather.lineage in self.lonely:
            self.lonely.remove(gather.lineage)
            self.state.cancel_timer(key)

    def _wait(self, gather: Gather, now: float) -> None:
        self.state.set_timer(GatherEnd(gather.lineage), gather.seconds(now))

    def _refuse(self, gather: Gather, problem: weights_pb2.Problem) -> None:
        for call in gather.calls.values():
            self.state.finish(call, problem)
        self._end(gather)

    def _end(self, gather: Gather) -> None:
        del self.by_lineage[gather.lineage]
        self.turns.pop(gather.lineage, None)
        self.lonely.discard(gather.lineage)
        self.state.cancel_timer(GatherEnd(gather.lineage))
        self.state.cancel_timer(SessionsAbsent(gather.lineage))
