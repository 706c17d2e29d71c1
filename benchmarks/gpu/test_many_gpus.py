"""A trainer on GPU 0 and a replica on each other GPU, with Qwen3-8B's shapes: how the whole call, the pause, transfer
and install grow from one replica to all of them, for each way that weights can take.

Replicas are reference engines, so pauses are ours alone, or vLLM servers. The ways: every replica reads the trainer's
GPU over CUDA IPC; all take part in a collective (NCCL), which passes on from GPU to GPU; all read the host's relay.
Ceilings in the same run, of contiguous copies: from GPU 0 to all others at once, from each GPU to the next one at once,
and from pinned memory to all at once. Any number of GPUs from two on.

    python -m pytest benchmarks/gpu/test_many_gpus.py -k reference --benchmark-json=FILE        (reference, vllm)

In the environment: CKPT_ENGINE_MANY_WAYS (some of them, with commas), CKPT_ENGINE_MANY_ROUNDS and
CKPT_ENGINE_MANY_SECONDS, after which no other case is begun; what was not measured then is named.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.gpu.measure import ROUNDS as USUAL_ROUNDS
from benchmarks.gpu.measure import WARMUP, Series, rounded, seconds_of, versions
from benchmarks.gpu.qwen3_8b import BYTES, Tree, renew, write_config
from ckpt_engine import Trainer
from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.host.relay_directory import DIRECTORY
from tests.cluster import Cluster, running_cluster
from tests.gpu.gpu_server import needs_gpu_vllm, start_gpu_vllm

ROUNDS = int(os.environ.get("CKPT_ENGINE_MANY_ROUNDS", str(USUAL_ROUNDS)))
BEGIN_SECONDS = float(os.environ.get("CKPT_ENGINE_MANY_SECONDS", "300"))
BUFFER = 2 << 30
SECONDS = 60.0
THREADS = {"OMP_NUM_THREADS": str(min(16, len(os.sched_getaffinity(0))))}
WAYS = {
    "cuda_ipc": {"publish": "cuda_ipc", "prefetch": "never", "edges": "cuda_ipc"},
    "nccl": {"publish": "nccl", "prefetch": "auto", "edges": "nccl"},
    "relay": {"publish": "cuda_ipc", "prefetch": "always", "edges": "relay_memory"},
}


class Ceilings:
    """GB/s that each of `count` GPUs receives, all at the same time, of contiguous copies."""

    def __init__(self, gpus: int) -> None:
        self._at = [torch.empty(BUFFER, dtype=torch.uint8, device=f"cuda:{gpu}").fill_(gpu) for gpu in range(gpus)]
        self._to = [torch.empty(BUFFER, dtype=torch.uint8, device=f"cuda:{gpu}") for gpu in range(gpus)]
        self._pinned = torch.empty(BUFFER, dtype=torch.uint8, pin_memory=True).fill_(7)
        # torch copies between GPUs on the source's stream, so copies from one GPU need streams of their own there
        self._streams = [[torch.cuda.Stream(torch.device("cuda", gpu)) for _ in range(gpus)] for gpu in range(gpus)]

    def once(self, way: str, count: int) -> float:
        def copy(target: int) -> None:
            source = {"cuda_ipc": 0, "nccl": target - 1, "relay": target}[way]
            what = self._pinned if way == "relay" else self._at[source]
            with torch.cuda.stream(self._streams[target][target]), torch.cuda.stream(self._streams[source][target]):
                self._to[target].copy_(what, non_blocking=True)

        def work() -> None:
            for target in range(1, count + 1):
                copy(target)

        work()
        return BUFFER / seconds_of(work) / 1e9


@pytest.fixture
def replicas(two_gpus_for: Callable[[bool], None]) -> int:
    two_gpus_for(True)
    return torch.cuda.device_count() - 1


def chosen() -> list[str]:
    """The ways that are asked for."""
    ways = os.environ.get("CKPT_ENGINE_MANY_WAYS", ",".join(WAYS)).split(",")
    assert set(ways) <= WAYS.keys(), f"CKPT_ENGINE_MANY_WAYS names {ways}, and there are {list(WAYS)}"
    return ways


def start(cluster: Cluster, engine: str, number: int, config: Path) -> str:
    """Starts the replica of one GPU; its name."""
    name, visible = f"gpu{number}", str(number)
    if engine == "vllm":
        start_gpu_vllm(cluster, name, config, "--enforce-eager", visible=visible)
    else:
        environment = {"CUDA_VISIBLE_DEVICES": visible, **THREADS}
        cluster.replica(name, "reference", config, "--device", "cuda", environment=environment)
    return name


@pytest.mark.timeout(560)
@pytest.mark.parametrize("engine", ["reference", pytest.param("vllm", marks=needs_gpu_vllm)])
def test_a_trainer_and_a_replica_on_each_other_gpu(
    benchmark: BenchmarkFixture, replicas: int, engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DIRECTORY, str(tmp_path / "relays"))
    ways = chosen()
    found: dict[str, Any] = {}
    failed: list[str] = []
    left: list[str] = []
    with running_cluster(tmp_path / "cluster") as cluster:
        config = write_config(tmp_path / "model")
        if "relay" in ways:
            cluster.relay("a", "--deltas", "never", "--memory", f"{31 << 30}B", environment=THREADS)
        names = [start(cluster, engine, number, config) for number in range(1, replicas + 1)]
        model = Tree("cuda:0")
        renew(model, 0)
        ceilings = Ceilings(replicas + 1)
        for relay in cluster.relays:
            relay.registered()
        for replica in cluster.replicas:
            replica.registered(240.0)
        seeds = itertools.count(1)
        with Trainer(cluster.address, lineage="benchmark-many") as trainer:

            def updated(way: str, count: int, series: Series, rounds: list[float]) -> None:
                asked = WAYS[way]
                renew(model, next(seeds))
                series.add(ceiling_GB_s=ceilings.once(way, count))
                report = trainer.update_weights(
                    replicas=names[:count], prefetch=asked["prefetch"], min_replicas=count, timeout=SECONDS
                )
                assert report.ok, f"{way}, {count}: {report}\n{[each.tail() for each in cluster.replicas]}"
                workers = [worker for each in report.replicas for worker in each.message.workers]
                used = {use.transport for each in report.replicas for use in each.transports}
                assert used == {asked["edges"]}, f"{way}, {count}: {report}"
                moved = max(worker.transfer_seconds + worker.install_seconds for worker in workers)
                series.add(
                    seconds=report.seconds,
                    pause_seconds=max(each.pause_seconds for each in report.replicas),
                    moved_seconds=moved,
                    verify_seconds=max(worker.verify_seconds for worker in workers),
                    GB_s_each=BYTES / moved / 1e9,
                    **{f"stage_{name}": seconds for name, seconds in report.stages.items()},
                )
                rounds.append(moved)

            def every() -> None:
                published = ""
                stop_at = time.monotonic() + BEGIN_SECONDS
                for way in ways:
                    asked = WAYS[way]
                    if published != asked["publish"]:
                        published = asked["publish"]
                        trainer.publish(model, transport=published)
                    for count in range(1, replicas + 1):
                        if time.monotonic() > stop_at:
                            left.append(f"{way}, {count}")
                            continue
                        series = Series()
                        rounds: list[float] = []
                        try:
                            for _ in range(WARMUP + ROUNDS):
                                updated(way, count, series, rounds)
                        except (AssertionError, CkptEngineError) as error:  # the other ways are measured all the same
                            failed.append(f"{way}, {count}: {error}")
                            print(failed[-1][:3000], flush=True)
                            continue
                        share = series.median("GB_s_each", ROUNDS) / series.median("ceiling_GB_s", ROUNDS)
                        told = {"share_of_ceiling": share, "first": series.first(), "medians": series.last(ROUNDS)}
                        told["moved_in_each_round"] = rounds
                        found[f"{way}, {count}"] = told
                        print("\nRESULT", way, count, rounded(told), flush=True)

            benchmark.pedantic(every, rounds=1)
    assert found, failed
    one = min((told["medians"]["seconds"]["median"] for case, told in found.items() if case.endswith(", 1")), default=0)
    for told in found.values():
        told["over_the_fastest_way_to_one"] = told["medians"]["seconds"]["median"] / one if one else 0.0
    told_of_all = {"engine": engine, "bytes": BYTES, **found, "failed": failed, "not_begun": left}
    benchmark.extra_info.update(rounded({**told_of_all, "versions": versions("vllm")}))
    assert not failed, failed
