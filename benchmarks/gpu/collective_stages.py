"""Where the time of a whole update by a collective goes: a trainer on GPU 0, a replica on each of the next GPUs.

Every process tells when it reaches its named points (`ckpt_engine/trace.py`), which costs some 0.1 ms for each; one
clock notes them. Medians of a stage are those of the member that took longest. Without GPUs it runs over Gloo, with few
bytes, to show that it works.

    python -m benchmarks.gpu.collective_stages [--replicas N] [--engine reference|vllm] [--rounds N]
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from benchmarks.gpu.lines import LineProcess, answer
from benchmarks.gpu.measure import Series, rounded
from benchmarks.gpu.qwen3_8b import Tree, renew, write_config
from ckpt_engine import Trainer
from ckpt_engine.trace import ENVIRONMENT
from tests.cluster import Cluster, Replica, running_cluster
from tests.faults.listener import Held, Listener
from tests.tiny_model import make_tiny_qwen3

GPU = torch.cuda.is_available()
WARMUP = 2
SECONDS = 60.0
SMALL: dict[str, Any] = {"layers": 4, "hidden": 256, "intermediate": 1024, "vocabulary": 8000}
AGENT = "agent.does."


class Point(NamedTuple):
    """A process has reached a named point. at: monotonic seconds."""

    at: float
    pid: int
    name: str


class Clock(Held):
    """Notes when each point is reached, and holds nobody."""

    def __init__(self) -> None:
        super().__init__("", lambda _: False)
        self.points: list[Point] = []

    def take(self, pid: int, point: str) -> bool:
        self.points.append(Point(time.monotonic(), pid, point))
        return False


def stages_of(points: Iterable[Point], trainer: int, workers: Sequence[int]) -> dict[str, float]:
    """Seconds of each stage of one update. trainer, workers: process ids. Raises AssertionError for a point that is
    missing."""
    reached: dict[tuple[int, str], float] = {}
    agents: dict[str, float] = {}
    began: dict[tuple[int, str], float] = {}
    for point in points:
        reached[point.pid, point.name] = point.at
        what, _, edge = point.name.removeprefix(AGENT).rpartition(".")
        if point.name.startswith(AGENT) and edge == "begin":
            began[point.pid, what] = point.at
        elif point.name.startswith(AGENT) and (point.pid, what) in began:
            name = f"agent_{what}"
            agents[name] = max(agents.get(name, 0.0), point.at - began[point.pid, what])

    def at(pid: int, name: str) -> float:
        assert (pid, name) in reached, f"process {pid} never reached {name}: {sorted(reached)}"
        return reached[pid, name]

    def longest(first: str, last: str) -> float:
        return max(at(pid, f"worker.install.{last}") - at(pid, f"worker.install.{first}") for pid in workers)

    voted = max(at(trainer, "trainer.part.vote"), *(at(pid, "worker.install.vote") for pid in workers))
    begun = min(at(pid, "worker.install.transfer") for pid in workers)
    return {
        "worker_waits_for_go": longest("vote", "dirty"),
        "trainer_waits_for_go": at(trainer, "trainer.part.run") - at(trainer, "trainer.part.vote"),
        "last_vote_to_last_worker_begins": max(at(pid, "worker.install.dirty") for pid in workers) - voted,
        "last_vote_to_trainer_begins": at(trainer, "trainer.part.run") - voted,
        "trainer_begins_after_first_worker": at(trainer, "trainer.part.run") - begun,
        "first_bucket": longest("transfer", "first"),
        "other_buckets": longest("first", "arrived"),
        "trainer_sends": at(trainer, "trainer.part.sent") - at(trainer, "trainer.part.run"),
        "told_done_and_filled": longest("arrived", "install"),
        "install": longest("install", "verify"),
        "verify": longest("verify", "commit"),
        "marked_clean": longest("commit", "clean"),
        **agents,
    }


def train(address: str, directory: str) -> None:
    """The trainer's process: a line is the seed of new weights, its answer what came of the update."""
    model: nn.Module = Tree("cuda:0") if GPU else make_tiny_qwen3(Path(directory) / "trained", weights=False, **SMALL)
    with Trainer(address, lineage="stages") as trainer:
        trainer.publish(model, transport="nccl")
        answer(pid=os.getpid())
        for line in sys.stdin:
            if GPU:
                renew(model, int(line))
            else:
                torch.manual_seed(int(line))
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.normal_()
            answer(**trainer.update_weights(timeout=SECONDS).to_dict())


def start(cluster: Cluster, engine: str, number: int, path: Path) -> Replica:
    """The replica of one GPU."""
    if engine == "vllm":
        from tests.gpu.gpu_server import start_gpu_vllm

        return start_gpu_vllm(cluster, f"gpu{number}", path, "--enforce-eager", visible=str(number))
    environment = {"CUDA_VISIBLE_DEVICES": str(number), "OMP_NUM_THREADS": "4"} if GPU else {}
    arguments = ("--device", "cuda") if GPU else ()
    return cluster.replica(f"gpu{number}", "reference", path, *arguments, environment=environment)


def measure(path: Path, replicas: int, engine: str, rounds: int) -> dict[str, Any]:
    """What `main` prints. path: an empty directory, as short as a socket's path has to be."""
    config = write_config(path / "model") if GPU else path / "model"
    if not GPU:
        make_tiny_qwen3(config, weights=False, **SMALL)
    with ExitStack() as stack:
        listener = stack.enter_context(Listener(path / "trace"))
        clock = Clock()
        listener._held.append(clock)
        os.environ[ENVIRONMENT] = str(listener.path)  # of every process that is started from here on
        stack.callback(os.environ.pop, ENVIRONMENT)
        cluster = stack.enter_context(running_cluster(path / "cluster"))
        for number in range(1, replicas + 1):
            start(cluster, engine, number, config)
        trainer = LineProcess(
            path / "trainer.log", ["benchmarks.gpu.collective_stages", "--train", cluster.address, str(path)]
        )
        stack.callback(trainer.close)
        pid = trainer.hear()["pid"]
        for replica in cluster.replicas:
            replica.registered(240.0)
        workers = [worker.pid for replica in cluster.replicas for worker in replica.workers()]
        series = Series()
        moved: list[float] = []
        for seed in itertools.count(1):
            clock.points.clear()
            trainer.say(str(seed))
            told = trainer.hear(SECONDS + 30)
            used = {each["transport"] for replica in told["replicas"] for each in replica["edges"]}
            assert told["ok"], f"{told}\n{[each.tail() for each in cluster.replicas]}"
            assert used == {"nccl"}, told
            moved.append(
                max(worker["transfer_seconds"] for replica in told["replicas"] for worker in replica["workers"])
            )
            series.add(
                call=told["seconds"],
                pause=max(replica["pause_seconds"] for replica in told["replicas"]),
                transfer=moved[-1],
                **stages_of(list(clock.points), pid, workers),
            )
            if seed == WARMUP + rounds:
                break
        return {
            "members": replicas + 1,
            "engine": engine,
            "device": torch.cuda.get_device_name(0) if GPU else "cpu",
            "bytes": int(told["replicas"][0]["bytes"]),
            "medians": series.last(rounds),
            "first": series.first(),
            "transfer_of_each_round": moved,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description="Where the time of an update by a collective goes.")
    parser.add_argument("--replicas", type=int, default=max(1, torch.cuda.device_count() - 1))
    parser.add_argument("--engine", choices=("reference", "vllm"), default="reference")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--train", nargs=2, metavar=("MANAGER", "DIRECTORY"), help="be the trainer's process")
    options = parser.parse_args()
    if options.train:
        train(*options.train)
        return
    if GPU and torch.cuda.device_count() <= options.replicas:
        parser.error(
            f"{options.replicas} replicas and a trainer need a GPU each, this host shows {torch.cuda.device_count()}"
        )
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # NVLink multicast can put a shared host's GPUs out of service
    with tempfile.TemporaryDirectory(prefix="ckpt") as path:
        found = measure(Path(path), options.replicas, options.engine, options.rounds)
    print(json.dumps(rounded(found)), flush=True)


if __name__ == "__main__":
    main()
