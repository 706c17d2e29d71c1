"""The rules of updates that go on side by side, taken out one by one: some seed must notice each."""

from __future__ import annotations

import pytest

from ckpt_engine.machines.manager.claims import Claim, Claims
from ckpt_engine.machines.manager.goal import Goal
from ckpt_engine.machines.manager.state import ManagerState
from ckpt_engine.machines.manager.turns import Updates
from ckpt_engine.v1 import weights_pb2
from tests.simulation.mistakes import Mistake, Patch, must_be_noticed, name_of
from tests.simulation.scenario import Slant, run_seed


def a_relay_serves_one_update_at_a_time(patch: Patch) -> None:
    """It is filled for one pool while replicas of another one read it."""

    patch.setattr(Claim, "meets", lambda self, other: False)


def a_relay_is_told_a_fence_above_all_that_it_obeys(patch: Patch) -> None:
    """An update that waited for it goes on under the fence that it began with."""
    patch.setattr(Claims, "obeyed", lambda self, names: 0)


def a_welcome_does_not_outrun_what_is_on_its_way(patch: Patch) -> None:
    """A replica that comes back is told the highest fence of any pool."""
    patch.setattr(Updates, "installs", lambda self, name: self.state.installs)


def the_highest_install_fence_never_goes_down(patch: Patch) -> None:
    """It is that of the intent that was on the disk last."""

    def intent_ended(self: ManagerState, fence: weights_pb2.Fence) -> None:
        self.spent, self.installs = max(self.spent, fence.epoch), fence.epoch

    patch.setattr(ManagerState, "intent_ended", intent_ended)


def a_replica_is_in_one_update_at_a_time(patch: Patch) -> None:
    """One that has changed its pool is in those of both."""
    patch.setattr(Goal, "meets", lambda self, other: self.pool == other.pool or self.lineage == other.lineage)


def updates_of_one_pool_take_turns(patch: Patch) -> None:
    """They go on side by side if they are of different lineages."""
    patch.setattr(Goal, "meets", lambda self, other: self.lineage == other.lineage)


RULES: dict[Mistake, Slant] = {
    a_relay_serves_one_update_at_a_time: Slant(pools=True, relays=True),
    a_relay_is_told_a_fence_above_all_that_it_obeys: Slant(pools=True, relays=True),
    a_welcome_does_not_outrun_what_is_on_its_way: Slant(pools=True, often=frozenset({"break_somebody"})),
    the_highest_install_fence_never_goes_down: Slant(pools=True),
    a_replica_is_in_one_update_at_a_time: Slant(pools=True, often=frozenset({"replica_moves"})),
    updates_of_one_pool_take_turns: Slant(pools=True),
}


@pytest.mark.parametrize("rule", RULES, ids=name_of)
def test_the_simulation_notices_without(rule: Mistake, monkeypatch: pytest.MonkeyPatch) -> None:
    must_be_noticed(rule, monkeypatch, RULES[rule])


def test_updates_of_two_pools_go_on_side_by_side_in_seeded_stories() -> None:
    """Without that these stories would show nothing."""
    assert run_seed(7, crashes=True, slant=Slant(pools=True, relays=True)).invariants.side_by_side > 100
