"""A real manager whose ledger is kept, lost, rolled back, full, read-only or taken by another manager.

One replica serves all the time and is asked for tokens; whatever happens to the ledger, it must go on, and the next
update after the repair must reach it by way of the relay. Nothing is relaunched but the manager.
"""

from __future__ import annotations

import ctypes
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.faults.members import start_manager
from tests.faults.prober import Expected
from tests.faults.world import World
from tests.ports import free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # engines start slowly on a busy machine

SECONDS = 120.0
CAP_DAC_OVERRIDE, PR_CAPBSET_DROP = 1, 24


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, models: tuple[Path, Path, Expected]) -> Iterator[World]:
    with World(tmp_path_factory.mktemp("ledger"), *models, {"one": 1}, relayed=True) as world:
        yield world


@pytest.fixture
def world(running: World) -> Iterator[World]:
    """Everybody there and serving; nobody has seen what must not be."""
    assert not running.update_all()
    relay = running.relay
    yield running
    assert running.relay is relay
    assert running.take_violations() == []


def forget(ledger: Path) -> None:
    for path in ledger.parent.glob(ledger.name + "*"):
        path.unlink()


def cluster_and_epoch(world: World) -> tuple[str, int]:
    status = world.until("the manager answers", SECONDS, world.status)
    return status.fence.cluster, status.fence.epoch


def serves(world: World, version: int) -> bool:
    return world.replicas["one"].prober.answered(version, time.monotonic(), SECONDS)


def test_a_kept_ledger_goes_on_where_it_was(world: World) -> None:
    cluster, epoch = cluster_and_epoch(world)
    worker = world.engine("one")[-1].pid
    world.kill("manager", "one")
    assert serves(world, world.version), "a dead manager stops nobody"
    assert not world.update_all()
    now, later = cluster_and_epoch(world)
    assert now == cluster
    assert later > epoch
    assert world.engine("one")[-1].pid == worker


def test_a_rolled_back_ledger_reuses_no_epoch(world: World, tmp_path: Path) -> None:
    world.kill("manager", "one")
    old = tmp_path / "old"
    shutil.copytree(world.ledger.parent, old, ignore=lambda _, names: [n for n in names if "ledger" not in n])
    for _ in range(3):
        assert not world.update_all()
    cluster, epoch = cluster_and_epoch(world)
    world.kill("manager", "one")
    forget(world.ledger)
    shutil.copytree(old, world.ledger.parent, dirs_exist_ok=True)
    world.heal()
    status = world.status()
    assert status is not None
    assert any("rolled back" in warning for warning in status.warnings), status.warnings
    assert cluster_and_epoch(world)[0] == cluster
    assert not world.update_all()
    assert cluster_and_epoch(world)[1] > epoch


def test_a_lost_ledger_is_said_and_its_cluster_comes_back_without_a_relaunch(world: World) -> None:
    cluster, epoch = cluster_and_epoch(world)
    worker = world.engine("one")[-1].pid
    world.kill("manager", "one")
    forget(world.ledger)
    world.restart_manager()

    def warned() -> bool:
        status = world.status()
        return status is not None and any(f"--cluster {cluster}" in warning for warning in status.warnings)

    world.until("the manager says who was refused and the way back", SECONDS, warned)
    assert serves(world, world.version), "refused members go on serving"
    world.kill("manager", "one")
    forget(world.ledger)
    world.restart_manager(cluster=cluster)
    assert not world.update_all()
    assert cluster_and_epoch(world) > (cluster, epoch)
    assert world.engine("one")[-1].pid == worker


def test_a_full_disk_refuses_updates_and_is_over_when_there_is_room(world: World) -> None:
    """The limit on file sizes is what a full disk is to a write: it fails, and what was written before stays."""
    version, epochs = world.version, [worker.epoch for worker in world.replica("one").workers]
    _, hard = resource.prlimit(world.manager.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(world.manager.pid, resource.RLIMIT_FSIZE, (0, hard))
    # The epoch of the next update may be spent already, so two are asked for; no replica may be touched by either.
    refused = []
    for _ in range(2):
        world.ask(60)
        refused.append(world.answer(60) or {})
    assert "FAILED_PRECONDITION" in refused[1].get("error", ""), refused
    assert "ledger" in refused[1]["error"]
    status = world.status()
    assert status is not None
    assert any("no update can begin" in warning for warning in status.warnings), status.warnings
    assert [worker.epoch for worker in world.replica("one").workers] == epochs
    assert serves(world, version)
    resource.prlimit(world.manager.pid, resource.RLIMIT_FSIZE, (hard, hard))

    def can_begin() -> bool:
        now = world.status()
        return now is not None and not any("no update can begin" in warning for warning in now.warnings)

    world.until("the warning goes by itself", SECONDS, can_begin)
    assert not world.update_all()


def test_a_read_only_ledger_is_refused_at_the_start(world: World) -> None:
    world.kill("manager", "one")
    for path in world.ledger.parent.glob("ledger.sqlite*"):
        path.chmod(0o400)
    # Root may write what nobody may write; without this capability it is like everybody else.
    drop = partial(ctypes.CDLL(None).prctl, PR_CAPBSET_DROP, CAP_DAC_OVERRIDE) if os.getuid() == 0 else None
    command = [sys.executable, "-m", "ckpt_engine", "manager", "--listen", "127.0.0.1:0", "--http", ""]
    done = subprocess.run(
        [*command, "--ledger", str(world.ledger)], capture_output=True, text=True, timeout=SECONDS, preexec_fn=drop
    )
    for path in world.ledger.parent.glob("ledger.sqlite*"):
        path.chmod(0o600)
    assert done.returncode == 1
    assert "cannot be used" in done.stderr
    assert serves(world, world.version)
    assert not world.update_all()


def test_a_second_manager_on_the_same_ledger_does_not_start(world: World, tmp_path: Path) -> None:
    second = start_manager(tmp_path, free_port(), {}, world.ledger)
    assert second.process.wait(SECONDS) == 1
    assert f"in use by pid {world.manager.pid}" in second.tail()
    assert not world.update_all()


def test_a_manager_that_lost_its_lock_begins_nothing_more(world: World, tmp_path: Path) -> None:
    version = world.version
    world.ledger.with_name("ledger.sqlite.lock").unlink()
    second = start_manager(tmp_path, free_port(), {}, world.ledger)
    try:
        world.until("the second one holds the ledger", SECONDS, lambda: "manager started" in second.tail())
        refused = []
        for _ in range(2):
            world.ask(60)
            refused.append(world.answer(60) or {})
        assert "another manager has taken the ledger" in refused[1].get("error", ""), refused
        assert serves(world, version)
    finally:
        second.end()
    world.restart_manager()
    assert not world.update_all()
