"""Nothing piles up: 500 updates leave every process with about the descriptors, mappings, threads and memory it had.

The same cluster then loses its trainer to SIGKILL: its shared memory must be gone once the next update has been made.
Shared memory here has no name, so it lives exactly as long as some process holds a descriptor of it or maps it. Both
can be read in /proc, for every process of this user; looking for the very inodes is exact whatever else the host does.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.cluster import Cluster, Replica, eventually, running_cluster

WARM_UP = 50
UPDATES = 500

SETTLE_SECONDS = 60.0
"""For what an update leaves behind for a moment: a closing connection, an idle worker thread of a pool."""

MORE_DESCRIPTORS = 4
"""The libraries open one when they like: a wake-up descriptor, a connection at that moment. One an update makes 450."""

MORE_MAPPINGS = 12
"""The allocators of C and Python take memory in pieces when they like. One mapping an update would make 450."""

MORE_THREADS = 3
"""gRPC's pool of threads grows and shrinks as it likes. One thread an update would make 450."""

MORE_BYTES = 6 << 20
"""Resident memory may still grow so much after the warm-up: 14 kB an update, of which the allocators' rounding and
late imports are most. The weights are 1.0 MB, so one update of ten that kept its weights would be noticed."""


@dataclass(frozen=True)
class Holdings:
    """What one process holds. resident in bytes, without what it shares with others."""

    descriptors: int
    mappings: int
    threads: int
    resident: int

    def exceeds(self, before: Holdings) -> bool:
        return (
            self.descriptors > before.descriptors + MORE_DESCRIPTORS
            or self.mappings > before.mappings + MORE_MAPPINGS
            or self.threads > before.threads + MORE_THREADS
            or self.resident > before.resident + MORE_BYTES
        )


def holdings(process: psutil.Process) -> Holdings:
    with process.oneshot():
        memory = process.memory_info()
        maps = Path(f"/proc/{process.pid}/maps").read_text().count("\n")
        return Holdings(process.num_fds(), maps, process.num_threads(), memory.rss - memory.shared)


class TrainerProcess:
    """One run of many_updates.py, told what to do over its input."""

    def __init__(self, address: str, directory: Path, lineage: str) -> None:
        script = Path(__file__).with_name("many_updates.py")
        self._process = subprocess.Popen(
            [sys.executable, str(script), address, str(directory), lineage],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def update(self, times: int) -> int:
        """Makes so many updates; returns the version that was reached. The test's own timeout bounds the wait."""
        requests, answers = self._process.stdin, self._process.stdout
        assert requests is not None
        assert answers is not None
        requests.write(f"{times}\n")
        requests.flush()
        answer = answers.readline()
        assert answer, "the trainer ended; its traceback is above"
        return int(answer)

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(60)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, bare_model: Path) -> Iterator[tuple[Cluster, Replica]]:
    """A manager and one reference replica with one worker."""
    with running_cluster(tmp_path_factory.mktemp("many")) as cluster:
        yield cluster, cluster.replica("one", "reference", bare_model).registered()


@pytest.fixture
def start(running: tuple[Cluster, Replica], tmp_path: Path) -> Iterator[Callable[[str], TrainerProcess]]:
    trainers: list[TrainerProcess] = []

    def start(lineage: str) -> TrainerProcess:
        trainers.append(TrainerProcess(running[0].address, tmp_path, lineage))
        return trainers[-1]

    yield start
    for trainer in trainers:
        trainer.kill()


def processes(cluster: Cluster, replica: Replica, trainer: TrainerProcess) -> dict[str, psutil.Process]:
    """Everyone who takes part, by name."""
    agent = psutil.Process(replica.process.pid)
    (worker,) = replica.workers()
    manager = psutil.Process(cluster.manager.pid)
    found = {"manager": manager, "trainer": psutil.Process(trainer.pid), "agent": agent, "worker": worker}
    others = [child for child in agent.children(recursive=True) if child.pid != worker.pid]
    return {**found, **{f"engine {index}": child for index, child in enumerate(others)}}


@pytest.mark.slow
def test_five_hundred_updates_leave_nothing_behind(
    running: tuple[Cluster, Replica], start: Callable[[str], TrainerProcess]
) -> None:
    cluster, replica = running
    trainer = start("many")
    assert trainer.update(WARM_UP) == WARM_UP
    everyone = processes(cluster, replica, trainer)
    assert any(name.startswith("engine") for name in everyone), "the engine's API process is one of its own"
    before = {name: holdings(process) for name, process in everyone.items()}
    began = time.monotonic()
    assert trainer.update(UPDATES - WARM_UP) == UPDATES
    seconds = time.monotonic() - began
    replica.serving(UPDATES)
    assert processes(cluster, replica, trainer).keys() == everyone.keys(), "no process came or went"

    def more() -> dict[str, tuple[Holdings, Holdings]]:
        after = {name: holdings(process) for name, process in everyone.items()}
        return {name: (before[name], after[name]) for name in everyone if after[name].exceeds(before[name])}

    end = time.monotonic() + SETTLE_SECONDS
    while more() and time.monotonic() < end:
        time.sleep(0.25)
    print(f"{UPDATES - WARM_UP} updates in {seconds:.1f} s")
    for name, process in everyone.items():
        print(name, before[name], holdings(process))
    assert not more(), "after the warm-up and at the end"


def inodes(process: int) -> set[int]:
    """The memory files of this package that a process maps or has a descriptor of. Raises OSError if it has gone."""
    found = set()
    for line in Path(f"/proc/{process}/maps").read_text().splitlines():
        if "/memfd:ckpt-engine" in line:
            found.add(int(line.split()[4]))
    for descriptor in Path(f"/proc/{process}/fd").iterdir():
        with contextlib.suppress(OSError):
            if "/memfd:ckpt-engine" in str(descriptor.readlink()):
                found.add(descriptor.stat().st_ino)
    return found


def holders(memory: set[int]) -> dict[int, set[int]]:
    """Which processes of this user hold any of these memory files."""
    found = {}
    for process in psutil.pids():
        with contextlib.suppress(OSError):  # gone meanwhile, or another user's
            if held := inodes(process) & memory:
                found[process] = held
    return found


@pytest.mark.slow
def test_a_killed_trainer_leaves_no_shared_memory(
    running: tuple[Cluster, Replica], start: Callable[[str], TrainerProcess]
) -> None:
    _, replica = running
    killed = start("killed")
    assert killed.update(2) == 2
    memory = inodes(killed.pid)
    assert memory, "the parameters lie in shared memory"
    (worker,) = replica.workers()
    assert set(holders(memory)) >= {killed.pid, worker.pid}, "the worker keeps what it read mapped for the next update"
    killed.kill()
    replica.serving(2)
    next_trainer = start("next")
    assert next_trainer.update(1) == 1
    replica.serving(1)
    eventually("nobody holds the killed trainer's memory", 60, lambda: not holders(memory))
    assert inodes(worker.pid) == inodes(next_trainer.pid), "what it maps now is the next trainer's"
