"""When a late replica is brought up: only when nothing else can be done in its pool, and what it gives way to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from ckpt_engine.machines.manager.catch_up import CatchUp
from ckpt_engine.machines.manager.goal import Goal
from ckpt_engine.machines.manager.state import State
from ckpt_engine.machines.manager.turns import Turns


@dataclass
class GivingWay:
    """How late replicas give way; one of each pool is brought up at a time."""

    state: State
    catch_up: CatchUp
    turns: Turns

    def begin(self, may: Callable[[Goal], bool], now: float) -> Goal | None:
        """The next one whose turn has come. may: whether one may begin, for all that this does not know of."""
        updates, coming = self.turns.updates, [each.goal for each in self.turns.coming()]
        busy = {update.goal.pool for update in updates.all()}
        if self.state.ledger_problem is not None or set(self.state.versions.pools.values()) <= busy:
            return None

        def free(goal: Goal) -> bool:
            return updates.lets(goal) and may(goal) and not any(map(goal.meets, coming))

        return self.catch_up.goal(busy, free, now)

    def give_way(self, now: float) -> None:
        """Gives way to updates whose turn has come, and to those that wait for a relay which it reads; then ends one of
        those that still wait for one another."""
        self._give_way(now)
        while (update := self.turns.updates.in_a_circle()) is not None:
            if update.goal.late is not None:
                self.catch_up.cut_short(update.goal.replicas[0])
            update.cut_short(
                "it and another update wait for relays that the other one reads: try again when that is over", now
            )

    def _give_way(self, now: float) -> None:
        if not self.turns.updates.late():
            return
        for coming in self.turns.coming():
            self.cut_short(partial(_in_the_way, coming.goal), f"{coming.said} came", now)
        wanted = self.turns.updates.in_the_way()
        for update in self.turns.updates.late():
            if update.number in wanted:
                self.cut_short(update.goal.meets, "an update waits for a relay that it uses", now)

    def cut_short(self, meets: Callable[[Goal], bool], reason: str, now: float) -> None:
        """Ends those that this meets."""
        for update in self.turns.updates.late():
            if meets(update.goal) and not update.cut:
                self.catch_up.cut_short(update.goal.replicas[0])
                update.cut_short(reason, now)


def _in_the_way(coming: Goal, late: Goal) -> bool:
    """Whether an update cannot begin because of a late replica's: they meet, or it reads a holder that this reads."""
    return coming.meets(late) or not coming.holders.isdisjoint(late.holders)
