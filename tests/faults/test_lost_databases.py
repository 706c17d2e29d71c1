"""The database that two managers share restarts, is away, or fails over to a replica that lacks its last commits.

Real processes, a real PostgreSQL with an asynchronous replica, and two replicas of the reference engine, each of whose
answers is judged.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests import postgresql
from tests.faults.cells import VICTIM
from tests.faults.leader_world import MANAGERS, LeaderWorld
from tests.faults.members import Member
from tests.faults.prober import SEEDS, Expected
from tests.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SECONDS = 120.0


class ReplicatedWorld(LeaderWorld):
    """Its managers are told both servers: `server`, and `standby`, which follows that."""

    def _start_managers(self, cluster: str = "") -> list[Member]:
        self.standby = self._made.enter_context(postgresql.running(self.server))
        return super()._start_managers(cluster)

    def ledger_of(self, manager: int) -> str:
        both = self.ledger_address.replace(
            f":{self.server.port}/", f":{self.server.port},127.0.0.1:{self.standby.port}/"
        )
        return f"{both}?target_session_attrs=read-write"

    def logs(self) -> str:
        return "".join((self.path / f"manager-{each}.log").read_text() for each in MANAGERS)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, models: tuple[Path, Path, Expected]) -> Iterator[ReplicatedWorld]:
    with ReplicatedWorld(tmp_path_factory.mktemp("databases"), *models) as world:
        yield world


@contextmanager
def transferring(world: LeaderWorld) -> Iterator[None]:
    """In the middle of an update, behind its commit: a worker is about to copy."""
    pids = {world.pid_of("worker", VICTIM)}
    with world.listener.holding("worker.install.transfer", pids.__contains__) as held:
        world.ask(SECONDS)
        assert held.wait(SECONDS), "no worker came so far"
        yield


def ended(world: LeaderWorld) -> None:
    answer = world.answer(SECONDS)
    assert answer is not None
    assert answer.get("ok"), answer


@pytest.mark.hours
def test_a_database_that_restarts_or_is_away_for_a_while_ends_no_update(world: ReplicatedWorld) -> None:
    assert not world.update_all()
    with transferring(world):
        world.server.stop(signal.SIGQUIT)
        world.server.start()
    ended(world)
    with transferring(world):
        world.server.stop()
        eventually("no manager leads", SECONDS, lambda: all(map(world.stands_by, MANAGERS)))
        assert "the term has ended: it was not renewed" in world.logs()
        two = world.replicas["two"].prober
        assert two.answered(world.version, time.monotonic(), SECONDS), "an install needs no ledger"
    world.server.start()
    ended(world)
    assert not world.update_all()
    assert world.take_violations() == []


def test_a_replica_of_the_database_without_the_last_commits_is_a_ledger_that_was_rolled_back(
    world: ReplicatedWorld,
) -> None:
    assert not world.update_all()
    status = world.status()
    assert status is not None
    cluster = status.fence.cluster
    eventually("the replica has all", SECONDS, lambda: world.standby.has_all_of(world.server))
    world.standby.stop_following()
    for _ in range(2):
        assert not world.update_all()
    with transferring(world):
        lost = world.version  # its commit, and those of the two updates before
        world.server.stop(signal.SIGKILL)
        world.standby.promote()
    ended(world)
    assert world.version == lost
    status = world.until("a manager leads", SECONDS, world.status)
    assert status.fence.cluster == cluster
    assert any("the ledger was rolled back" in warning for warning in status.warnings), status.warnings
    epoch = status.fence.epoch

    world.trainer.ask(lost - 1, (lost - 1) % SEEDS, SECONDS)
    again = world.answer(SECONDS)
    assert again is not None
    assert "error" in again, "a number that the ledger has lost is not given to other weights, nor does it go down"
    print(again["error"])

    assert not world.update_all()
    status = world.until("a manager leads", SECONDS, world.status)
    assert status.fence.epoch > epoch
    world.manager.end()
    assert not world.update_all(), "another manager knows it all from the ledger"
    assert world.take_violations() == []
    assert "Traceback" not in world.logs()
