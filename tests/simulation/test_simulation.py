"""Many seeds of the three machines together, checked after every event.

A failing seed names itself and shows what happened last. Replay it alone with
``CKPT_ENGINE_SEED=437 pytest tests/simulation/test_simulation.py -k network`` (or ``-k killed``); run more with
``CKPT_ENGINE_SEEDS=5000``.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest

from tests.simulation.scenario import run_seed

SEEDS = int(os.environ.get("CKPT_ENGINE_SEEDS", "300"))
PARTS = 10
ONLY = os.environ.get("CKPT_ENGINE_SEED")


def seeds(part: int) -> range:
    """A tenth of the seeds, or the one that is to be replayed."""
    if ONLY is not None:
        return range(int(ONLY), int(ONLY) + 1)
    return range(part * SEEDS // PARTS, (part + 1) * SEEDS // PARTS)


@pytest.mark.parametrize("part", range(1 if ONLY else PARTS))
def test_promises_hold_on_a_bad_network(part: int) -> None:
    outcomes: Counter[str] = Counter()
    succeeded = 0
    for seed in seeds(part):
        scenario = run_seed(seed)
        outcomes.update(scenario.invariants.outcomes)
        succeeded += scenario.succeeded
    if ONLY is None and SEEDS >= 300:
        # A simulation in which everything is refused would find nothing.
        assert succeeded > 100
        assert outcomes["NEW_SERVING"] > 100
        assert outcomes["QUARANTINED"] > 10
        assert outcomes["OLD_SERVING"] > 0


@pytest.mark.parametrize("part", range(1 if ONLY else PARTS))
def test_promises_hold_when_managers_and_agents_are_killed(part: int) -> None:
    """A third as many seeds, of which the network's faults are as bad."""
    for seed in seeds(part)[:: 1 if ONLY else 3]:
        run_seed(seed, crashes=True)


def test_a_seed_always_tells_the_same_story() -> None:
    first, second = run_seed(7), run_seed(7)
    assert first.world.log == second.world.log
    assert first.world.events == second.world.events
    assert run_seed(8).world.log != first.world.log
