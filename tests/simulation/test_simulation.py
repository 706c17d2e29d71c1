"""A million events of the three machines together, checked after every one: a twentieth of them in `make test`, and up
to a half in CI.

A failing story prints its recipe and the shortest one that fails in the same way. Replay either alone with
``CKPT_ENGINE_SEED='437' pytest tests/simulation/test_simulation.py``; run more with ``CKPT_ENGINE_EVENTS=20000000``,
all parts of which ``make test-slow`` tells.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest

from tests.simulation.replay import Recipe, tell
from tests.simulation.scenario import run_seed
from tests.simulation.world import BrokenPromiseError

EVENTS = int(os.environ.get("CKPT_ENGINE_EVENTS", "1000000"))
PARTS = 20
HALF = 10
ONLY = os.environ.get("CKPT_ENGINE_SEED")


@pytest.mark.skipif(ONLY is not None, reason="one story is replayed")
@pytest.mark.timeout(max(600, EVENTS // 10_000))
@pytest.mark.parametrize(
    "part",
    [
        0,
        *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, HALF)),
        *(pytest.param(part, marks=[pytest.mark.slow, pytest.mark.hours]) for part in range(HALF, PARTS)),
    ],
)
def test_promises_hold_whatever_happens(part: int) -> None:
    """Each part has seeds of its own, as many as it takes."""
    outcomes: Counter[str] = Counter()
    events = succeeded = 0
    seed = part * 1_000_000
    while events < EVENTS / PARTS:
        scenario = tell(Recipe.of(seed))
        outcomes.update(scenario.invariants.outcomes)
        succeeded += scenario.succeeded
        events += scenario.world.events
        seed += 1
    # A simulation in which everything is refused would find nothing.
    assert succeeded > events / 10_000
    assert outcomes["new_serving"] > events / 2_000
    assert outcomes["quarantined"] > events / 50_000


@pytest.mark.skipif(ONLY is None, reason="CKPT_ENGINE_SEED names no story")
def test_the_story_that_is_replayed() -> None:
    assert ONLY is not None
    scenario = tell(Recipe.parse(ONLY))
    print("\n".join(scenario.world.log))


@pytest.mark.parametrize("crashes", [False, True])
def test_a_seed_always_tells_the_same_story(crashes: bool) -> None:
    first, second = run_seed(7, crashes=crashes), run_seed(7, crashes=crashes)
    assert first.world.log == second.world.log
    assert first.world.events == second.world.events
    assert run_seed(8, crashes=crashes).world.log != first.world.log


def test_a_recipe_is_its_own_line() -> None:
    for line in ("437 crashes", "438 network seconds=5.0 without=loss,partition"):
        assert str(Recipe.parse(line)) == line
    assert Recipe.parse("9") == Recipe(9, crashes=False)
    with pytest.raises(ValueError, match="recipe"):
        Recipe.parse("9 chaos")


@pytest.mark.slow
def test_a_failure_names_its_recipe_and_a_shorter_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from ckpt_engine.machines.agent.install import Installing

    monkeypatch.setattr(Installing, "_judge", lambda self, now: self._resume(now))
    for seed in range(40):
        try:
            tell(Recipe(seed, crashes=True))
        except BrokenPromiseError as error:
            lines = str(error).splitlines()
            replayed = Recipe.parse(lines[2].partition("CKPT_ENGINE_SEED='")[2].rstrip("'"))
            assert lines[1] == f"replay it: CKPT_ENGINE_SEED='{Recipe(seed, crashes=True)}'"
            assert replayed.without
            with pytest.raises(BrokenPromiseError):
                replayed.tell()
            return
    pytest.fail("nothing failed")
