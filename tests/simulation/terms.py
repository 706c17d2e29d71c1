"""Managers that share a ledger: which of them has the term, how it keeps it, and what parts it from the ledger.

The ledger's clock is the world's, and so is a leader's own one: clocks that are compared here do not drift. Another
manager always stands by, and takes the term once it has ended.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tests.simulation.world import Steps, World

if TYPE_CHECKING:
    from tests.simulation.manager import ManagerShell
    from tests.simulation.scenario import Scenario

TERM = 3.0
"""Seconds that a term lasts without a renewal."""

RENEWALS = 3
"""Attempts to renew it in that time."""


def way(world: World, slow: float) -> float:
    """Seconds of one way between a manager and the ledger."""
    return world.between(0.0, TERM) if world.chance(slow) else world.between(0.001, 0.02)


def counted_from(asked: float, answered: float) -> float:
    """The moment from which a leader counts its term: before it asked for it."""
    return asked


def keep(manager: ManagerShell) -> Steps:
    """Renews a leader's term, and has it stand down once that has ended by its own clock."""
    world, ledger = manager.world, manager.ledger
    while manager.leads:
        yield ledger.term / RENEWALS
        yield from _unless_stopped(manager)
        asked = world.now
        yield way(world, ledger.slow)
        renewed = ledger.renew(manager.generation, world.now)
        yield way(world, ledger.slow)
        yield from _unless_stopped(manager)
        if renewed and manager.leads:
            manager.term_end = counted_from(asked, world.now) + ledger.term
    manager.stand_down()


def stand_by(scenario: Scenario) -> Steps:
    """Takes the term whenever no manager has it."""
    world = scenario.world
    while True:
        if world.now >= scenario.ledger.until and not scenario.ledger.refuses:
            scenario.lead()
        yield world.between(0.01, TERM / RENEWALS / 2)


def _unless_stopped(manager: ManagerShell) -> Steps:
    while manager.is_stopped:
        yield 0.02


class TermFaults:
    """What befalls leaders."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario, self.world = scenario, scenario.world

    def actions(self) -> list[Callable[[], None]]:
        """For the chaos."""
        return [self.leader_stops, self.leader_stops, self.leader_is_killed, self.leader_loses_its_ledger]

    def leader_stops(self) -> None:
        """SIGSTOP, and SIGCONT before or after another one leads."""
        manager, seconds = self.scenario.cluster.manager, self.world.random.choice((TERM / 2, TERM, 2 * TERM))
        if manager is not None and manager.alive:
            self.world.note(f"leader {manager.generation} is stopped for {seconds} s")
            manager.stop_for(seconds)

    def leader_is_killed(self) -> None:
        """Another one leads once its term has ended."""
        manager = self.scenario.cluster.manager
        if manager is not None and manager.alive:
            self.world.note(f"leader {manager.generation} is killed")
            manager.crash()

    def leader_loses_its_ledger(self) -> None:
        """It reaches its members, and not the ledger."""
        manager, ledger = self.scenario.cluster.manager, self.scenario.ledger
        if manager is None or not manager.alive:
            return
        self.world.note(f"leader {manager.generation} does not reach the ledger")
        ledger.unreachable.add(manager.generation)
        mend = self.world.random.choice((TERM / 2, 2 * TERM, 4 * TERM))
        self.world.after(mend, lambda: ledger.unreachable.discard(manager.generation))
