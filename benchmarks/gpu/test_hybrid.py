"""Trainer and replica share a GPU in turns: the replica sleeps while the trainer works, and an update wakes it.

Qwen3-8B's shapes. What sleeping frees is read from the driver; the trainer then takes that memory, gives it back, and
updates. Afterwards greedy tokens are compared with those of a vLLM server that vLLM's own `ipc` backend brought to the
same weights.

    python -m pytest benchmarks/gpu/test_hybrid.py --benchmark-json=FILE
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.gpu.measure import Series, rounded, versions
from benchmarks.gpu.qwen3_8b import BYTES, Tree, renew, write_config
from benchmarks.gpu.rivals import ENVIRONMENT, NativeServer, backend_arguments
from ckpt_engine import Trainer
from tests.cluster import Cluster, Replica, running_cluster
from tests.engines.vllm_server import complete, tokens
from tests.gpu.exact import free_bytes, sleep
from tests.gpu.gpu_server import (
    KV_BYTES,
    needs_gpu_vllm,
    plain_vllm,
    start_gpu_vllm,
    wait_for_plain,
)

pytestmark = [*needs_gpu_vllm, pytest.mark.timeout(420)]

ROUNDS = 5
PROMPTS = [[5, 6, 7, 8], list(range(1000, 1064))]


class World(NamedTuple):
    """What both tests use."""

    cluster: Cluster
    replica: Replica
    judge: Any
    model: Tree
    trainer: Trainer


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    path = tmp_path_factory.mktemp("hybrid")
    config = write_config(path / "model")
    with contextlib.ExitStack() as stack:
        judge = stack.enter_context(
            plain_vllm(
                config,
                path / "judge.log",
                "--enforce-eager",
                *backend_arguments("ipc"),
                environment={**ENVIRONMENT, "CUDA_VISIBLE_DEVICES": "0"},
            )
        )
        cluster = stack.enter_context(running_cluster(path / "cluster"))
        arguments = ("--enforce-eager", "--enable-sleep-mode")
        replica = start_gpu_vllm(cluster, "vllm", config, *arguments, options=("--mode", "hybrid"), visible="0")
        model = Tree("cuda:0")
        wait_for_plain(judge)
        replica.registered(240)
        trainer = stack.enter_context(Trainer(cluster.address, lineage="benchmark-hybrid"))
        trainer.publish(model)
        yield World(cluster, replica, judge, model, trainer)


@pytest.mark.parametrize("level", [1, 2])
def test_update_of_a_sleeping_replica(benchmark: BenchmarkFixture, world: World, level: int) -> None:
    series = Series()
    seeds = itertools.count(level * 1000)
    renew(world.model, next(seeds))
    assert world.trainer.update_weights(timeout=60).ok

    def before() -> None:
        awake = free_bytes()
        began = time.perf_counter()
        sleep(world.cluster, level)
        series.add(sleep_seconds=time.perf_counter() - began)
        freed = free_bytes() - awake
        assert freed > 0.95 * (BYTES + KV_BYTES), f"level {level} freed {freed} bytes"
        series.add(freed_GB=freed / 1e9)
        activations = torch.empty(awake + int(0.9 * freed), dtype=torch.uint8, device="cuda:0").fill_(1)
        renew(world.model, next(seeds))
        del activations
        free_bytes()

    def update() -> None:
        report = world.trainer.update_weights(timeout=60)
        assert report.ok, f"{report}\n{world.replica.tail()}"
        assert report.verified
        (outcome,) = report.replicas
        series.add(
            report_seconds=report.seconds,
            sync_seconds=outcome.sync_seconds,
            **{f"stage_{name}": seconds for name, seconds in outcome.stages.items()},
        )

    benchmark.pedantic(update, setup=before, rounds=ROUNDS, warmup_rounds=1)
    rival = NativeServer(world.judge.url, world.model)
    series.add(vllm_ipc_awake_seconds=rival.update(rival.ipc()))
    for prompt in PROMPTS:
        ours, theirs = tokens(complete(world.replica, prompt)), tokens(complete(world.judge, prompt))
        assert ours == theirs, f"{prompt[:4]}: {ours} is not {theirs}"
    benchmark.extra_info.update(
        rounded({"level": level, "bytes": BYTES, "medians": series.last(ROUNDS), "versions": versions("vllm")})
    )
    print("\nRESULT hybrid", level, benchmark.extra_info, flush=True)
