"""Faults in updates by a collective: of a worker, an agent, the trainer, which leads, and the manager, before *go* and
after it. Whatever happens, the trainer's call ends by its deadline, and the next update brings everybody up."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.faults.cells import NEW, OLD, QUARANTINED, Cell
from tests.faults.conductor import play
from tests.faults.prober import Expected
from tests.faults.world import World

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

BACK, ENDED = frozenset({OLD}), frozenset({QUARANTINED})
DONE = frozenset({NEW})
WORKER = "one, worker 0"


@dataclass(frozen=True)
class Together(Cell):
    """A cell of a collective. of_victim, of_bystander: what may become of them. named: what the report must say, if the
    trainer lived to get one: who did not go on."""

    of_victim: frozenset[str] = DONE
    of_bystander: frozenset[str] = DONE
    named: str = ""

    def allowed(self) -> tuple[frozenset[str], frozenset[str]]:
        return self.of_victim, self.of_bystander


CELLS = (
    # A communicator is made, and nobody is paused: whoever is not there in time is named; all others stay as they are.
    Together("worker", "stop", "setup", ENDED | BACK, BACK, WORKER),
    Together("worker", "kill", "setup", ENDED, BACK, WORKER),
    Together("agent", "stop", "setup", DONE | BACK, DONE | BACK),
    Together("trainer", "stop", "setup", DONE | BACK, DONE | BACK),
    Together("trainer", "kill", "setup", BACK, BACK),
    # Nobody has voted for the victim, so nobody begins: all others go back.
    Together("worker", "kill", "quiesce", ENDED, BACK),
    Together("agent", "kill", "quiesce", ENDED, BACK),
    Together("trainer", "kill", "quiesce", BACK, BACK),
    Together("worker", "stop", "quiesce", ENDED | BACK, BACK, WORKER),
    Together("agent", "stop", "quiesce", DONE | BACK, DONE | BACK),
    Together("worker", "stop", "arming", ENDED | BACK, BACK, WORKER),
    Together("worker", "kill", "arming", ENDED, BACK, WORKER),
    Together("agent", "stop", "arming", DONE, DONE),
    Together("trainer", "stop", "arming", DONE | BACK, DONE | BACK),
    Together("trainer", "stop", "quiesce", DONE | BACK, DONE | BACK),
    Together("manager", "kill", "quiesce", DONE, DONE),
    # After *go*: whoever is not done is dirty; nobody needs the manager.
    Together("worker", "kill", "transfer", ENDED, ENDED),
    Together("agent", "kill", "transfer", ENDED, ENDED | DONE),
    Together("trainer", "kill", "transfer", ENDED, ENDED),
    # It is named, too, if the update has more time than these 8 s, of which it is silent for 5 before it is blamed:
    # tests/end_to_end/test_collective_updates.py.
    Together("worker", "stop", "transfer", ENDED, ENDED),
    Together("agent", "stop", "transfer", DONE, DONE),
    Together("trainer", "stop", "transfer", ENDED | DONE, ENDED | DONE),
    Together("manager", "kill", "transfer", DONE, DONE),
    Together("manager", "partition", "transfer", DONE, DONE),
)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, models: tuple[Path, Path, Expected]) -> Iterator[World]:
    with World(tmp_path_factory.mktemp("together"), *models, {"one": 1, "two": 1}, together=True) as world:
        yield world


SAMPLE = ("worker-kill-transfer", "worker-stop-transfer", "trainer-kill-quiesce", "manager-kill-transfer")
"""Of each run of the slow tests; all others take some minutes."""


@pytest.mark.parametrize(
    "cell",
    [pytest.param(cell, marks=() if str(cell) in SAMPLE else pytest.mark.hours, id=str(cell)) for cell in CELLS],
)
def test_a_fault_in_a_collective(world: World, cell: Cell) -> None:
    result = play(world, cell)
    assert not result.wrong, result
    assert isinstance(cell, Together)
    assert cell.named in result.report, result
