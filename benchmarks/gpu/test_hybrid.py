"""Trainer and replica share a GPU in turns: the replica sleeps while the trainer works, and an update wakes it.

Qwen3-8B's shapes. What sleeping frees is read from the driver; the trainer then takes that memory, gives it back, and
updates. Afterwards greedy tokens are compared with those of a server that the engine's own way brought to the same
weights: vLLM's `ipc` backend, SGLang's `update_weights_from_tensor`.

    python -m pytest benchmarks/gpu/test_hybrid.py -k vllm --benchmark-json=FILE    (vllm, sglang)
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.gpu.measure import Series, rounded, versions
from benchmarks.gpu.qwen3_8b import BYTES, KEYS, LAYERS, Tree, renew, write_config
from benchmarks.gpu.rivals import (
    ENVIRONMENT,
    SGLANG_SIZES,
    NativeServer,
    NativeSglang,
    backend_arguments,
)
from ckpt_engine import Trainer
from tests.cluster import Cluster, Replica, running_cluster
from tests.engines import sglang_server, vllm_server
from tests.gpu.exact import free_bytes, sleep
from tests.gpu.gpu_server import KV_BYTES, needs_gpu_vllm, plain_vllm, start_gpu_vllm
from tests.gpu.sglang_fleet import needs_gpu_sglang, plain_sglang, start_gpu_sglang

pytestmark = pytest.mark.timeout(420)

ROUNDS = 5
PROMPTS = [[5, 6, 7, 8], list(range(1000, 1064))]


@dataclass(frozen=True)
class Engine:
    """One engine, as far as this needs it."""

    plain: Callable[[Path, Path], Any]  # starts a server without us: of a model, with a log
    start: Callable[[Cluster, Path], Replica]  # a hybrid replica
    own_update: Callable[[str, Tree], float]  # brings the server without us to the trainer's weights; seconds
    tokens: Callable[[Any, list[int]], list[int]]  # greedy ones of a server
    cache_bytes: int


def _vllm_plain(model: Path, log: Path) -> Any:
    environment = {**ENVIRONMENT, "CUDA_VISIBLE_DEVICES": "0"}
    return plain_vllm(model, log, "--enforce-eager", *backend_arguments("ipc"), environment=environment)


def _vllm_replica(cluster: Cluster, model: Path) -> Replica:
    arguments = ("--enforce-eager", "--enable-sleep-mode")
    return start_gpu_vllm(cluster, "vllm", model, *arguments, options=("--mode", "hybrid"), visible="0")


def _vllm_update(url: str, model: Tree) -> float:
    rival = NativeServer(url, model)
    return rival.update(rival.ipc())


def _sglang_replica(cluster: Cluster, model: Path) -> Replica:
    arguments = (*SGLANG_SIZES, "--enable-memory-saver")
    return start_gpu_sglang(cluster, "sglang", model, *arguments, options=("--mode", "hybrid"), visible="0")


ENGINES = {
    "vllm": Engine(
        _vllm_plain,
        _vllm_replica,
        _vllm_update,
        lambda server, prompt: vllm_server.tokens(vllm_server.complete(server, prompt)),
        KV_BYTES,
    ),
    "sglang": Engine(
        lambda model, log: plain_sglang(model, log, *SGLANG_SIZES),
        _sglang_replica,
        lambda url, model: NativeSglang(url, model).update(),
        lambda server, prompt: sglang_server.tokens(sglang_server.complete(server, prompt)),
        8192 * LAYERS * 2 * KEYS * 2,
    ),
}
"""SGLang's cache: keys and values of as many tokens as SGLANG_SIZES say."""


@dataclass(frozen=True)
class World:
    """Servers of one engine, and a trainer on their GPU."""

    engine: Engine
    cluster: Cluster
    replica: Replica
    judge: Any
    model: Tree
    trainer: Trainer


@pytest.fixture(scope="module")
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    name = request.param
    engine, path = ENGINES[name], tmp_path_factory.mktemp(name)
    config = write_config(path / "model")
    with contextlib.ExitStack() as stack:
        judge = stack.enter_context(engine.plain(config, path / "judge.log"))
        cluster = stack.enter_context(running_cluster(path / "cluster"))
        replica = engine.start(cluster, config)
        model = Tree("cuda:0")
        judge.wait()
        replica.registered(240)
        trainer = stack.enter_context(Trainer(cluster.address, lineage=f"benchmark-hybrid-{name}"))
        trainer.publish(model)
        yield World(engine, cluster, replica, judge, model, trainer)


@pytest.mark.parametrize(
    ("world", "level"),
    [
        pytest.param("vllm", 1, marks=needs_gpu_vllm),
        pytest.param("vllm", 2, marks=needs_gpu_vllm),
        pytest.param("sglang", 2, marks=needs_gpu_sglang),
    ],
    indirect=["world"],
)
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
        assert freed > 0.95 * (BYTES + world.engine.cache_bytes), f"level {level} freed {freed} bytes"
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
    series.add(own_update_awake_seconds=world.engine.own_update(world.judge.url, world.model))
    for prompt in PROMPTS:
        ours, theirs = world.engine.tokens(world.replica, prompt), world.engine.tokens(world.judge, prompt)
        assert ours == theirs, f"{prompt[:4]}: {ours} is not {theirs}"
    benchmark.extra_info.update(
        rounded(
            {"level": level, "bytes": BYTES, "medians": series.last(ROUNDS), "versions": versions("vllm", "sglang")}
        )
    )
    print("\nRESULT hybrid", level, benchmark.extra_info, flush=True)
