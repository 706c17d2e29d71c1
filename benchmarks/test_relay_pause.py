"""What a relay does to the pause of several replicas of one host, and to the time for which their trainer is held.

Two replicas of the reference engine, a real server each, with 215 MB of weights. The trainer's memory without a relay,
by way of one, and by way of one with `until="held"`, in turns: each version has other weights, and all are verified.
Then the same from a checkpoint's files.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import quantiles
from typing import Any

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from ckpt_engine import Trainer
from ckpt_engine.host.relay_directory import DIRECTORY
from tests.cluster import Cluster, running_cluster
from tests.tiny_model import make_tiny_qwen3

ROUNDS = 7
REPLICAS = 2
WISHES: dict[str, dict[str, str]] = {
    "without a relay": {"prefetch": "never"},
    "by way of a relay": {"prefetch": "always"},
    "by way of a relay, held": {"prefetch": "always", "until": "held"},
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Cluster, Any, Path]]:
    path = tmp_path_factory.mktemp("pause")
    directory = path / "relays"
    directory.mkdir(mode=0o700)
    told = {DIRECTORY: str(directory)}
    model = make_tiny_qwen3(path / "model", 1, layers=12, hidden=1024, intermediate=2560, vocabulary=4096)
    with running_cluster(path / "cluster") as running:
        replicas = [
            running.replica(f"r{number}", "reference", path / "model", environment=told) for number in range(REPLICAS)
        ]
        running.relay("near", "--deltas", "never", "--memory", "1GiB", environment=told).registered()
        for replica in replicas:
            replica.registered()
        yield running, model, path / "model"


@pytest.mark.parametrize("source", ["memory", "files"])
def test_pause_with_and_without_a_relay(
    benchmark: BenchmarkFixture, cluster: tuple[Cluster, Any, Path], source: str
) -> None:
    running, model, files = cluster
    pauses: dict[str, list[float]] = {way: [] for way in WISHES}
    calls: dict[str, list[float]] = {way: [] for way in WISHES}
    moved = 0
    with Trainer(running.address, lineage=source) as trainer:
        trainer.publish(model if source == "memory" else files, move=source == "memory")
        for turn in range(ROUNDS + 1):
            for way, wishes in WISHES.items():
                if source == "memory":
                    with torch.no_grad():
                        for parameter in model.parameters():
                            parameter.add_(0.125)
                began = time.perf_counter()
                report = trainer.update_weights(**wishes)
                seconds = time.perf_counter() - began
                report = trainer.wait(report.version) if report.held else report
                assert report.ok, report
                assert report.verified
                read = {edge.transport for each in report.replicas for edge in each.message.edges}
                assert (read == {"relay_memory"}) == (wishes["prefetch"] == "always")
                moved = report.replicas[0].message.bytes
                if turn:
                    pauses[way] += [replica.pause_seconds for replica in report.replicas]
                    calls[way].append(seconds)
    benchmark.pedantic(lambda: None, rounds=1)  # the rounds are in `extra_info`
    benchmark.extra_info.update(
        bytes_of_a_replica=moved,
        replicas=REPLICAS,
        pause_milliseconds={way: spread(found) for way, found in pauses.items()},
        call_milliseconds={way: spread(found) for way, found in calls.items()},
        processors=len(os.sched_getaffinity(0)),
        python=platform.python_version(),
        torch=torch.__version__,
    )
    for way in WISHES:
        print(f"\n{source}, {way}: pause {spread(pauses[way])}, call {spread(calls[way])}")


def spread(seconds: list[float]) -> dict[str, float]:
    """Milliseconds: median and quartiles."""
    low, middle, high = quantiles(seconds, n=4)
    return {"median": round(middle * 1e3, 1), "25 %": round(low * 1e3, 1), "75 %": round(high * 1e3, 1)}
