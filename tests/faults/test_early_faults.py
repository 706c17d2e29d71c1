"""Faults while workers bring a version into stage memory, before any pause: what was served goes on, unless its own
engine has gone, and the next update reaches everybody."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.faults.cells import NEW, OLD, QUARANTINED, Cell
from tests.faults.conductor import play
from tests.faults.prober import Expected
from tests.faults.world import World

pytestmark = pytest.mark.timeout(900)

GONE, KEPT, DONE = frozenset({QUARANTINED}), frozenset({OLD}), frozenset({NEW})


@dataclass(frozen=True)
class Early(Cell):
    """A cell before the pause. of_victim, of_bystander: what may become of them."""

    of_victim: frozenset[str] = DONE
    of_bystander: frozenset[str] = DONE

    def allowed(self) -> tuple[frozenset[str], frozenset[str]]:
        return self.of_victim, self.of_bystander


CELLS = tuple(
    Early(victim, fault, stage, of_victim, of_bystander)
    for stage in ("bring", "brought")
    for victim, fault, of_victim, of_bystander in (
        ("worker", "kill", GONE, DONE),
        # It stands still until the update's deadline. If all of it was there, its pause has begun without it.
        ("worker", "stop", KEPT | GONE | DONE, DONE),
        ("agent", "kill", GONE, DONE),
        ("agent", "stop", DONE | KEPT, DONE),
        ("agent", "cut", DONE, DONE),
        ("trainer", "kill", DONE | KEPT, DONE | KEPT),
        ("trainer", "stop", DONE | KEPT, DONE | KEPT),
        ("manager", "kill", DONE | KEPT, DONE | KEPT),
    )
)

SAMPLE = ("worker-kill-bring", "agent-kill-brought", "trainer-kill-bring")
"""Of each run of the slow tests; all others take some minutes."""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, models: tuple[Path, Path, Expected]) -> Iterator[World]:
    with World(tmp_path_factory.mktemp("early"), *models, {"one": 1, "two": 1}, early=True) as world:
        yield world


@pytest.mark.slow
@pytest.mark.parametrize(
    "cell", [each if str(each) in SAMPLE else pytest.param(each, marks=pytest.mark.hours) for each in CELLS], ids=str
)
def test_a_fault_before_the_pause(world: World, cell: Early) -> None:
    result = play(world, cell)
    assert not result.wrong, result
