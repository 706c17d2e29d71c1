"""Rules of DESIGN.md about fences, records and numbers: each is taken out, and some seed must notice.

A test's id is the rule, as in test_design_rules.py.
"""

from __future__ import annotations

from typing import Any

import pytest

from ckpt_engine.core.version import Fence, Version
from ckpt_engine.machines.agent.machine import AgentMachine
from ckpt_engine.machines.manager import update
from ckpt_engine.machines.manager.goal import Goal
from ckpt_engine.machines.manager.state import ManagerState
from ckpt_engine.machines.manager.versions import Versions
from tests.simulation.holders import HolderShell
from tests.simulation.manager import ManagerShell
from tests.simulation.mistakes import Mistake, Patch, must_be_noticed, name_of
from tests.simulation.scenario import Slant, run_seed


def an_install_fence_is_spent_at_the_intent(patch: Patch) -> None:
    """It is given out when the update begins."""
    made, next_install = update.Update.__init__, ManagerState.next_install
    early: dict[int, Fence] = {}

    def make(self: update.Update, state: ManagerState, *others: Any) -> None:
        made(self, state, *others)
        early[id(state)] = next_install(state)
        state.spend_ahead()

    patch.setattr(update.Update, "__init__", make)
    patch.setattr(ManagerState, "next_install", lambda self: early[id(self)])


def preparing_carries_no_install_fence(patch: Patch) -> None:
    """An agent compares the fence of a Prepare with those of installs."""
    patch.setattr(AgentMachine, "_fills", lambda self, fence: self._installs(fence, 0.0))


def a_record_must_hash_to_the_root(patch: Patch) -> None:
    """Whoever holds a version is believed what it hashes to; and all holders lie here."""
    patch.setattr(HolderShell, "lies", property(lambda self: True, lambda self, value: None), raising=False)
    patch.setattr(ManagerShell, "_record", lambda self, ref, root: self.blobs.get_json(ref))


def a_record_tells_nothing_of_what_was_sealed_since(patch: Patch) -> None:
    """Ranks are believed to keep a version although they were told to seal another one."""
    patch.setattr(Versions, "sealed_anew", lambda self, lineage: None)


def numbers_never_go_down(patch: Patch) -> None:
    """A lineage may ask for any number, and counts down."""
    original = Versions.next_number

    def next_number(self: Versions, lineage: str) -> int:
        number = original(self, lineage)
        return number if number < 2 else number - 2

    patch.setattr(Versions, "next_number", next_number)
    patch.setattr(Versions, "check_rises", lambda self, lineage, version: None)


def a_number_never_gets_another_root(patch: Patch) -> None:
    """A number that was used names whatever is sealed under it."""
    patch.setattr(Versions, "check_number", lambda self, identity, late: None)


def the_highest_number_outlives_the_manager(patch: Patch) -> None:
    """A restarted manager begins to count again."""
    original = Versions.from_ledger.__func__  # type: ignore[attr-defined]

    def from_ledger(cls: type[Versions], *arguments: Any) -> Versions:
        versions: Versions = original(cls, *arguments)
        versions.highest.clear()
        return versions

    patch.setattr(Versions, "from_ledger", classmethod(from_ledger))


def numbers_go_on_above_the_highest_after_a_rollback(patch: Patch) -> None:
    """The next update counts on from the version that was gone back to."""
    original = Versions.begin

    def begin(self: Versions, identity: Version, epoch: int, order: Goal, record: Any) -> None:
        original(self, identity, epoch, order, record)
        if order.is_rollback:
            self.highest[identity.lineage] = identity

    patch.setattr(Versions, "begin", begin)


def late_replicas_follow_a_rollback(patch: Patch) -> None:
    """They are brought to what was the latest version before it."""
    original = Versions.begin

    def begin(self: Versions, identity: Version, epoch: int, order: Goal, record: Any) -> None:
        if not order.is_rollback:
            original(self, identity, epoch, order, record)

    patch.setattr(Versions, "begin", begin)


RULES: list[Mistake] = [
    an_install_fence_is_spent_at_the_intent,
    preparing_carries_no_install_fence,
    a_record_must_hash_to_the_root,
    a_record_tells_nothing_of_what_was_sealed_since,
    numbers_never_go_down,
    a_number_never_gets_another_root,
    the_highest_number_outlives_the_manager,
    numbers_go_on_above_the_highest_after_a_rollback,
    late_replicas_follow_a_rollback,
]


SLANTS: dict[Mistake, Slant] = {
    an_install_fence_is_spent_at_the_intent: Slant(often=frozenset({"somebody_prepares"})),
    a_record_must_hash_to_the_root: Slant(often=frozenset({"holder_copies", "engine_is_swapped"})),
    a_record_tells_nothing_of_what_was_sealed_since: Slant(often=frozenset({"engine_is_swapped"}), worse={"task": 0.1}),
    a_number_never_gets_another_root: Slant(often=frozenset({"group_ends", "group_begins"})),
    the_highest_number_outlives_the_manager: Slant(often=frozenset({"manager_restarts", "engine_is_swapped"})),
    numbers_go_on_above_the_highest_after_a_rollback: Slant(often=frozenset({"somebody_goes_back"})),
    late_replicas_follow_a_rollback: Slant(often=frozenset({"somebody_goes_back", "engine_is_swapped"})),
}
"""What makes it likely that a rule is needed."""


@pytest.mark.parametrize("rule", RULES, ids=name_of)
def test_some_seed_notices_without(rule: Mistake, monkeypatch: pytest.MonkeyPatch) -> None:
    must_be_noticed(rule, monkeypatch, SLANTS.get(rule))


@pytest.mark.parametrize("seeds", [range(1), pytest.param(range(1, 4), marks=pytest.mark.slow)], ids=["one", "more"])
@pytest.mark.parametrize("rule", SLANTS, ids=name_of)
def test_no_seed_complains_with(rule: Mistake, seeds: range) -> None:
    """What is made more likely is not what breaks the promise."""
    for seed in seeds:
        run_seed(seed, crashes=True, slant=SLANTS[rule])
