"""What goes wrong with the ledger: disks that refuse, old copies put back, lost files, and locks that do not hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tests.simulation.manager import Ledger

if TYPE_CHECKING:
    from tests.simulation.scenario import Scenario


class LedgerFaults:
    """Each of them ends with a manager that can work; what it does until then is the machines' affair."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.world = scenario.world
        self._copy = scenario.ledger.copied()

    def actions(self) -> list[Callable[[], None]]:
        """For the chaos."""
        return [
            self.disk_is_full,
            self.disk_is_full,
            self.lock_is_lost,
            self.copy_is_made,
            self.copy_is_put_back,
            self.ledger_is_lost,
        ]

    def disk_is_full(self) -> None:
        """Or read-only: every write fails for a while, and no manager can start."""
        ledger = self.scenario.ledger
        self.world.note("the ledger's disk refuses to write")
        ledger.refuses = "the disk is full"

        def mend() -> None:
            ledger.refuses = ""

        self.world.after(self.world.random.choice((0.5, 3.0, 8.0)), mend)

    def lock_is_lost(self) -> None:
        """A second manager takes the ledger over although the first one lives; it ends some time later."""
        first = self.scenario.cluster.manager
        if first is None or not first.alive or self.scenario.ledger.refuses:
            return
        self.world.note("a second manager takes the ledger over")
        self.scenario.start_manager(although_one_lives=True)
        self.world.after(self.world.between(0.5, 8.0), first.crash)

    def copy_is_made(self) -> None:
        """For later."""
        self._copy = self.scenario.ledger.copied()

    def copy_is_put_back(self) -> None:
        """The manager was stopped for that."""
        self.world.note(f"an old copy of the ledger is put back: epoch {self._copy.epoch}")
        self._replace(self._copy.copied())

    def ledger_is_lost(self) -> None:
        """A manager with a new cluster starts; later somebody gives the old cluster's id to a fresh ledger."""
        self.world.note("the ledger is lost")
        cluster = self.scenario.ledger.cluster
        self._replace(Ledger(f"{cluster} lost at {self.world.now:.0f}"))
        self.world.after(self.world.between(0.5, 6.0), lambda: self._replace(Ledger(cluster)))

    def _replace(self, ledger: Ledger) -> None:
        manager = self.scenario.cluster.manager
        if manager is not None:
            manager.crash()
        ledger.generation = self.scenario.ledger.generation  # only so that invariants can tell managers apart
        self.scenario.ledger = ledger
        self.scenario.ledgers_replaced += 1
        self.scenario.start_manager()
