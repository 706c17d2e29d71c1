"""Kills at each step of each strategy: eight replicas of the reference engine, and a SIGKILL for the manager, for a
replica's agent or worker, or for the relay, while a wave goes on, between two waves, or on the way back.

A replica that is stopped (SIGSTOP) holds its wave up until the kill, so each cell happens at its step. Afterwards what
was killed is started again, as a supervisor does, and a person approves what waits. Then the deployment must be
decided, all replicas serve one version, that of the decision, and the next update reaches all.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import psutil
import pytest

from ckpt_engine import CkptEngineError
from ckpt_engine.v1 import manager_pb2
from tests.cluster import Replica, eventually
from tests.end_to_end.deployment_world import World, relay, running_fleet

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

NAMES = tuple("abcdefgh")
PATIENCE = 400.0
UNDECIDED = manager_pb2.Deployment.STATE_UNDECIDED
DEPLOYED, UNDONE = manager_pb2.Deployment.STATE_DEPLOYED, manager_pb2.Deployment.STATE_UNDONE
WAVES = {"rolling": (4, ("abcd", "efgh")), "canary": (2, ("ab", "cdefgh")), "all_or_none": (None, ("abcdefgh",))}
"""By strategy, what `wave` is, and the replicas of each wave."""

SECONDS = {"manager": 300.0, "agent": 120.0, "worker": 120.0, "relay": 40.0}
"""By what is killed, how long a wave may take. What a dead relay held comes back with the next update only."""


@dataclass(frozen=True)
class Cell:
    strategy: str
    step: str  # "wave 1", "wave 2": while it goes on; "between": two waves; "back": on the way back from wave 1
    victim: str  # "manager"; "agent", "worker": of a replica of that wave; "relay"

    def __str__(self) -> str:
        return f"{self.strategy}-{self.step}-{self.victim}".replace(" ", "-")


STEPS = {
    "rolling": ("wave 1", "between", "wave 2", "back"),
    "canary": ("wave 1", "between", "wave 2", "back"),
    "all_or_none": ("wave 1", "back"),
}
CELLS = [Cell(strategy, step, victim) for strategy, steps in STEPS.items() for step in steps for victim in SECONDS]
SAMPLE = {Cell("rolling", "wave 1", "manager"), Cell("rolling", "wave 1", "worker")}


class Killed:
    """What is killed in one world, and started again."""

    def __init__(self, world: World, model: Path) -> None:
        self.world, self.cluster, self.model = world, world.cluster, model

    def replica(self, name: str) -> Replica:
        """The process of this name that was started last."""
        return [each for each in self.cluster.replicas if each.name == name][-1]

    def kill(self, victim: str, name: str) -> None:
        """SIGKILL."""
        if victim == "manager":
            self.cluster.manager.kill()
            self.cluster.manager.wait(60)
        elif victim == "relay":
            self.cluster.relays[-1].end(signal.SIGKILL)
        elif victim == "agent":
            self.replica(name).process.kill()
            self.replica(name).process.wait(60)
        else:
            (worker,) = self.replica(name).workers()
            worker.kill()

    def start_again(self, victim: str, name: str) -> None:
        """As a supervisor does. An agent starts its engine again by itself."""
        if victim == "manager":
            self.cluster.start_manager("127.0.0.1:0")
            eventually("the manager answers again", PATIENCE, self.cluster._answers)
        elif victim == "relay":
            relay(self.cluster).registered()
        elif victim == "agent":
            self.cluster.replica(name, "reference", self.model)


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory, bare_model: Path) -> Iterator[Killed]:
    path = tmp_path_factory.mktemp("kills")
    with running_fleet(path, bare_model, NAMES, 600.0) as cluster:
        world = World(cluster, path)
        with world.trainer:
            yield Killed(world, bare_model)


def heal(world: World) -> int:
    """The version that all replicas serve after the next update, and that the relay holds."""
    versions: set[int] = set()

    def updated() -> bool:
        world.train()
        try:
            if not world.trainer.update_weights(prefetch="always", timeout=120.0).ok:
                return False
        except CkptEngineError:
            return False
        versions.clear()
        versions.update(world.serve().values())
        return len(versions) == 1 and versions.issubset(world.cluster.relays[-1].held)

    eventually("an update reaches all, and the relay holds it", PATIENCE, updated)
    return versions.pop()


@contextlib.contextmanager
def stopped(worker: psutil.Process) -> Iterator[None]:
    """It stands still meanwhile."""
    worker.suspend()
    try:
        yield
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            worker.resume()


def steered(world: World, *words: str) -> bool:
    """Whether a person's word was taken, or the deployment was decided already."""
    try:
        world.deploy(*words)
    except AssertionError as refused:
        return "is decided" in str(refused) or "no deployment" in str(refused)
    return True


def decided(world: World, number: int) -> manager_pb2.Deployment | None:
    """The deployment, once it is; None: a person's word is given, if that is waited for."""
    with contextlib.suppress(grpc.RpcError):
        rows = [each for each in world.cluster.status().deployments if each.number == number]
        if not rows:
            return None  # of a manager that has just been started again
        (row,) = rows
        if row.state in (DEPLOYED, UNDONE):
            return row
        if "deploy approve" in row.waits_for:
            steered(world, "approve")
    return None


@pytest.mark.parametrize(
    "cell", [each if each in SAMPLE else pytest.param(each, marks=pytest.mark.hours) for each in CELLS], ids=str
)
def test_a_kill(killed: Killed, cell: Cell) -> None:
    world, cluster = killed.world, killed.world.cluster
    base = heal(world)
    size, waves = WAVES[cell.strategy]
    second = cell.step == "wave 2"
    wave = waves[1 if second else 0]
    name, slow = wave[0], killed.replica(wave[-1]).workers()[0]
    with contextlib.ExitStack() as until_killed:
        if cell.step != "between":
            until_killed.enter_context(stopped(slow))
        condition = ("person",) if (cell.strategy, cell.step) == ("rolling", "between") else ()
        call = world.begin(strategy=cell.strategy, wave=size, condition=condition, timeout=SECONDS[cell.victim])
        eventually("it begins", PATIENCE, lambda: any(each.state == UNDECIDED for each in cluster.status().deployments))
        number = world.undecided.number
        if cell.step == "between":
            served = [base] * (8 - len(wave)) + [base + 1] * len(wave)
            world.until("the first wave serves", lambda found: found == served)
        elif second:
            if cell.strategy == "canary":
                eventually("it waits for a person", PATIENCE, lambda: "deploy approve" in world.undecided.waits_for)
                assert steered(world, "approve")
            eventually("the second wave is told", PATIENCE, lambda: len(world.undecided.waves) == 2)
        elif cell.step == "back":
            assert steered(world, "undo")
        killed.kill(cell.victim, name)
    killed.start_again(cell.victim, name)
    found: list[manager_pb2.Deployment] = []

    def look() -> bool:
        row = decided(world, number)
        found.extend([] if row is None else [row])
        return row is not None

    eventually("it is decided", PATIENCE, look)
    with contextlib.suppress(CkptEngineError):  # it lost its manager
        call()
    row = found[-1]
    if cell.victim == "manager" or cell.step == "back":
        assert row.state == (UNDONE if cell.step == "back" else DEPLOYED), row
    wanted = base if row.state == UNDONE else base + 1
    print(f"{cell}: {'undone' if row.state == UNDONE else 'deployed'}: {row.reason}")

    def settled() -> bool:
        """All serve what was decided; if nothing holds that any more, the others say so."""
        replicas = {each.name: each for each in cluster.status().replicas}
        others = [each for each in replicas.values() if not (each.serving and each.identity.version == wanted)]
        return set(replicas) == set(NAMES) and all(
            cell.victim == "relay" and "holds it" in each.drift.reason for each in others
        )

    eventually(f"all serve {wanted}: {world.serve()}", PATIENCE, settled)
    assert heal(world) >= base + 2, "an undone number stays used"
