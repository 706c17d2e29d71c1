"""Rules of managers that share a ledger, taken out one by one: some seed must notice each."""

from __future__ import annotations

import pytest

from ckpt_engine.core.problems import precondition
from ckpt_engine.machines.manager.goal import Goal, HeldVersion
from ckpt_engine.machines.manager.versions import Versions
from tests.simulation import terms
from tests.simulation.manager import Ledger, ManagerShell
from tests.simulation.mistakes import Mistake, Patch, must_be_noticed, name_of
from tests.simulation.scenario import Slant, run_seed

STANDBY = Slant(standby=True, often=frozenset({"leader_stops", "leader_is_killed", "leader_loses_its_ledger"}))
RELAYED = Slant(standby=True, relays=True)
STAGED = Slant(standby=True, relays=True, staged=0.7, often=frozenset({"somebody_decides", "leader_is_killed"}))


def every_write_requires_the_term(patch: Patch) -> None:
    """What reaches the ledger is written, whoever leads by then."""

    def check(self: Ledger, generation: int, now: float) -> None:
        if self.refuses or generation in self.unreachable:
            raise precondition("the ledger cannot be written")

    patch.setattr(Ledger, "check", check)


def a_leader_stops_by_its_own_clock(patch: Patch) -> None:
    """It leads until the ledger tells it otherwise."""
    patch.setattr(ManagerShell, "leads", property(lambda self: True))


def a_term_is_counted_from_before_it_was_asked_for(patch: Patch) -> None:
    """It is counted from the ledger's answer."""
    patch.setattr(terms, "counted_from", lambda asked, answered: answered)


def a_call_joins_what_its_ranks_have_sealed(patch: Patch) -> None:
    """A call joins whatever was committed last in its lineage."""

    def resumed(self: Versions, goal: Goal) -> HeldVersion | None:
        content = self.last_of(goal.lineage)
        if content is None or content.record is None or not content.fill:
            return None
        return HeldVersion(content.identity, content.record, content.fill)

    patch.setattr(Versions, "resumed", resumed)


MISTAKES = [
    every_write_requires_the_term,
    a_leader_stops_by_its_own_clock,
    a_term_is_counted_from_before_it_was_asked_for,
    a_call_joins_what_its_ranks_have_sealed,
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=name_of)
def test_the_simulation_notices_without(mistake: Mistake, monkeypatch: pytest.MonkeyPatch) -> None:
    must_be_noticed(mistake, monkeypatch, STANDBY)


@pytest.mark.parametrize("slant", [STANDBY, RELAYED, STAGED], ids=["plain", "relays", "staged"])
@pytest.mark.parametrize("seed", range(2))
def test_leaders_are_lost_and_promises_hold(slant: Slant, seed: int) -> None:
    run_seed(seed, crashes=True, slant=slant)


@pytest.mark.slow
@pytest.mark.parametrize("slant", [STANDBY, RELAYED, STAGED], ids=["plain", "relays", "staged"])
def test_leaders_are_lost_in_many_stories(slant: Slant) -> None:
    for seed in range(2, 14):
        run_seed(seed, crashes=True, slant=slant)
