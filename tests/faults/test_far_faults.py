"""Two hosts: each cell of the faults between them, and many updates while the network is cut at random."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.far_cells import CABLE, LINK, UPSTREAM, FarCell, far_cells
from tests.faults.far_conductor import play_far
from tests.faults.far_endurance import endure_cuts
from tests.faults.far_world import FarWorld
from tests.faults.prober import Expected
from tests.faults.world import QUICK

pytestmark = pytest.mark.slow

SAMPLE = (
    FarCell(UPSTREAM, "kill", "fill"),
    FarCell(UPSTREAM, "restart", "count"),
    FarCell(UPSTREAM, "stop", "fill"),
    FarCell(LINK, "reset", "fill"),
    FarCell(LINK, "cut", "fill"),
    FarCell(LINK, "slow", "fill"),
    FarCell(CABLE, "cut", "transfer"),
)
"""The quick ones; all of them take five minutes."""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, models: tuple[Path, Path, Expected]) -> Iterator[FarWorld]:
    with FarWorld(tmp_path_factory.mktemp("far"), *models) as world:
        yield world


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "cell",
    [cell if cell in SAMPLE else pytest.param(cell, marks=pytest.mark.hours) for cell in far_cells()],
    ids=str,
)
def test_a_fault_between_hosts(world: FarWorld, cell: FarCell) -> None:
    result = play_far(world, cell)
    assert not result.wrong, result


def cut_at_random(path: Path, models: tuple[Path, Path, Expected], updates: int, seed: int, every: int) -> None:
    with FarWorld(path, *models, bystander=False, deadlines=QUICK) as world:
        story = endure_cuts(world, updates, seed, every)
        assert not world.end_relays()
    assert not story.wrong
    assert sum(story.kills.values()) > updates / 20
    assert story.ends.get("ok", 0) > (updates / 4 if updates > 100 else 0), "a slow machine meets more cuts an update"


@pytest.mark.timeout(900)
def test_fifteen_updates_while_links_are_cut_at_random(tmp_path: Path, models: tuple[Path, Path, Expected]) -> None:
    cut_at_random(tmp_path, models, 15, seed=1, every=8)


@pytest.mark.hours
@pytest.mark.timeout(7200)
def test_five_hundred_updates_while_links_are_cut_at_random(
    tmp_path: Path, models: tuple[Path, Path, Expected]
) -> None:
    cut_at_random(tmp_path, models, 500, seed=1, every=50)
