"""A sample of the fault matrix, half of it in each run of the tests. All of it: `make fault-matrix` (see
docs/reliability.md)."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.cells import FAULTS, LEADER, LEADER_FAULTS, RELAY, RELAY_STAGES, STAGES, Cell, all_cells
from tests.faults.conductor import play
from tests.faults.endurance import DEADLINES, MORE_BYTES, Checkpoint, Holdings, endure, judge
from tests.faults.leader_conductor import play_leader
from tests.faults.leader_world import LeaderWorld
from tests.faults.prober import Expected
from tests.faults.world import World

SAMPLE = (
    Cell("trainer", "kill", "transfer"),
    Cell("manager", "kill", "verify"),
    Cell("agent", "cut", "quiesce"),
    Cell("trainer", "duplicate", "plan"),
    Cell("relay", "kill", "fill"),
)
MORE = (
    Cell("manager", "stop", "commit"),
    Cell("trainer", "cut", "plan"),
    Cell("agent", "duplicate", "resume"),
    Cell("relay", "partition", "join"),
)
LOST_LEADERS = (
    Cell(LEADER, "members", "plan"),
    Cell(LEADER, "database", "transfer"),
)
REPEATS = (
    Cell("worker", "kill", "transfer"),  # the conformance suite kills workers
    Cell("relay", "cut", "transfer"),
)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, models: tuple[Path, Path, Expected]) -> Iterator[World]:
    with World(tmp_path_factory.mktemp("sample"), *models, {"one": 1, "two": 1}, relayed=True) as world:
        yield world


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "cell",
    [
        *SAMPLE,
        *(pytest.param(each, marks=pytest.mark.slow) for each in MORE),
        *(pytest.param(each, marks=[pytest.mark.slow, pytest.mark.hours]) for each in REPEATS),
    ],
    ids=str,
)
def test_a_sample_of_the_matrix(world: World, cell: Cell) -> None:
    result = play(world, cell)
    assert not result.wrong, result


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_sample_of_lost_leaders(tmp_path: Path, models: tuple[Path, Path, Expected]) -> None:
    with LeaderWorld(tmp_path, *models) as world:
        for cell in LOST_LEADERS:
            result = play_leader(world, cell)
            assert not result.wrong, result


def test_the_matrix_has_every_fault_at_every_stage() -> None:
    cells = all_cells()
    assert {cell.fault for cell in cells if cell.victim != LEADER} == set(FAULTS)
    assert {cell.stage for cell in cells if cell.victim != RELAY} == set(STAGES)
    assert {(cell.fault, cell.stage) for cell in cells if cell.victim == LEADER} == {
        (fault, stage) for fault in LEADER_FAULTS for stage in STAGES
    }
    assert {(cell.fault, cell.stage) for cell in cells if cell.victim == RELAY} == {
        (fault, stage) for fault in FAULTS for stage in RELAY_STAGES
    }
    assert {*SAMPLE, *MORE, *REPEATS, *LOST_LEADERS} <= set(cells)


@pytest.mark.slow
@pytest.mark.hours
@pytest.mark.timeout(900)
def test_a_few_updates_with_random_kills_leave_nothing_behind(
    tmp_path: Path, models: tuple[Path, Path, Expected]
) -> None:
    """Straight from the trainer, as the sample's cells of other victims than relays; random kills, and what grows, are
    also asked by way of a relay, below."""
    with World(tmp_path, *models, {"one": 1, "two": 1}, snapshot=True, deadlines=DEADLINES) as world:
        story = endure(world, 12, seed=7, every=4)
    assert not story.wrong
    assert sum(story.kills.values()) > 0


def test_what_grows_is_found_also_in_a_role_that_comes_later_and_files_of_dead_relays() -> None:
    small, large = Holdings(20, 10, 40 << 20), Holdings(20, 10, (40 << 20) + MORE_BYTES + 1)

    def stock(updates: int, sockets: int = 1, **roles: Holdings) -> Checkpoint:
        return Checkpoint(updates, roles, 1, 1 << 20, 1 << 20, sockets)

    assert judge([stock(1, relay=small), stock(2, relay=small, agent=large), stock(3, relay=small, agent=large)]) == []
    assert judge([stock(1, relay=small), stock(2, relay=large)]) == [f"one relay grew from {small} to {large}"]
    late = [stock(1), stock(2, agent=small), stock(3, agent=large)]
    assert judge(late) == [f"one agent grew from {small} to {large}"]
    assert len(judge([stock(1), stock(2, sockets=2)])) == 1


def endured_with_a_relay(
    path: Path, models: tuple[Path, Path, Expected], updates: int, seed: int, every: int, replicas: int
) -> None:
    """So many replicas and a relay, which ends in order and leaves no file behind."""
    names = {f"replica-{number}": 1 for number in range(replicas)}
    with World(path, *models, names, snapshot=True, deadlines=DEADLINES, probe_pause=1.0, relayed=True) as world:
        story = endure(world, updates, seed, every)
        assert world.relay is not None
        world.relay.end(signal.SIGTERM)
        assert world.relay.process.returncode == 0, world.relay.tail()
        assert not list(world.relay_directory.iterdir())
    assert not story.wrong
    assert story.kills[RELAY] > 0
    assert story.ends["held"] > 0


@pytest.mark.slow
@pytest.mark.hours
@pytest.mark.timeout(900)
def test_twenty_updates_by_way_of_a_relay_with_random_kills_and_calls_that_overlap(
    tmp_path: Path, models: tuple[Path, Path, Expected]
) -> None:
    """Its seed kills the relay, an agent, a worker, the trainer and the manager, one after another. Of two replicas one
    is late, or dies, while the other one installs: more of them are asked the same, for the price of their starts."""
    endured_with_a_relay(tmp_path, models, 20, seed=521, every=10, replicas=2)


@pytest.mark.slow
@pytest.mark.hours
@pytest.mark.timeout(7200)
def test_two_hundred_updates_by_way_of_a_relay_with_random_kills(
    tmp_path: Path, models: tuple[Path, Path, Expected]
) -> None:
    endured_with_a_relay(tmp_path, models, 200, seed=25, every=25, replicas=4)


@pytest.mark.slow
@pytest.mark.hours
@pytest.mark.timeout(7200)
def test_five_hundred_updates_of_ten_replicas_with_random_kills(
    tmp_path: Path, models: tuple[Path, Path, Expected]
) -> None:
    names = {f"replica-{number}": 1 for number in range(10)}
    with World(tmp_path, *models, names, snapshot=True, deadlines=DEADLINES, probe_pause=1.0) as world:
        story = endure(world, 500, seed=1, every=50)
    assert not story.wrong
