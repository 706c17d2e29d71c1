"""A trainer on the CPU updates two vLLM servers, one on each GPU, against Moonshot's checkpoint-engine.

Every server gets all of Qwen3-8B's bytes from the trainer's shared memory. Moonshot's parameter server holds half of
them in each rank's pinned memory and broadcasts between the GPUs; no engine is attached to it. The ceiling is a copy
from pinned memory to both GPUs at once.

    python -m pytest benchmarks/gpu/test_from_host.py --benchmark-json=FILE
"""

from __future__ import annotations

import contextlib
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.gpu.measure import WARMUP, Series, rounded, seconds_of, versions
from benchmarks.gpu.qwen3_8b import BYTES, HostWeights, Tree, write_config
from benchmarks.gpu.rivals import moonshot
from ckpt_engine import Trainer
from tests.cluster import running_cluster
from tests.gpu.gpu_server import needs_gpu_vllm, start_gpu_vllm

pytestmark = [*needs_gpu_vllm, pytest.mark.timeout(420)]

ROUNDS = 10
GPUS = 2
PINNED = 2 << 30


class PinnedCopy:
    """From one pinned buffer to all GPUs at once."""

    def __init__(self) -> None:
        self._source = torch.empty(PINNED, dtype=torch.uint8, pin_memory=True).fill_(3)
        self._targets = [torch.empty(PINNED, dtype=torch.uint8, device=f"cuda:{gpu}") for gpu in range(GPUS)]

    def once(self) -> float:
        """Gigabytes a second that each GPU gets while all do."""
        seconds = seconds_of(lambda: [target.copy_(self._source, non_blocking=True) for target in self._targets])
        return PINNED / seconds / 1e9


def test_update_of_two_gpus(benchmark: BenchmarkFixture, two_gpus_for: Any, tmp_path: Path) -> None:
    two_gpus_for(True)
    config = write_config(tmp_path / "model")
    series = Series()
    rival = moonshot(tmp_path, GPUS, ROUNDS + WARMUP)
    for seconds in rival["seconds"]:
        series.add(moonshot_seconds=seconds)
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(running_cluster(tmp_path / "cluster"))
        for gpu in range(GPUS):
            start_gpu_vllm(cluster, f"vllm-{gpu}", config, "--enforce-eager", visible=str(gpu))
        model = Tree("cpu")
        weights = HostWeights(model)
        weights.renew(0)
        ceiling = PinnedCopy()
        trainer = stack.enter_context(Trainer(cluster.address, lineage="benchmark-host"))
        trainer.publish(model, move=True)
        for replica in cluster.replicas:
            replica.registered(240)
        seeds = itertools.count(1)
        transports: list[str] = []

        def before() -> None:
            weights.renew(next(seeds))
            series.add(ceiling_GB_s=ceiling.once())

        def update() -> None:
            report = trainer.update_weights(timeout=90)
            assert report.ok, f"{report}\n{cluster.replicas[0].tail()}"
            assert report.nbytes == GPUS * BYTES
            workers = [worker for outcome in report.replicas for worker in outcome.message.workers]
            series.add(
                pause_seconds=max(outcome.pause_seconds for outcome in report.replicas),
                sync_seconds=max(outcome.sync_seconds for outcome in report.replicas),
                report_seconds=report.seconds,
                transfer_and_install_seconds=max(w.transfer_seconds + w.install_seconds for w in workers),
                verify_seconds=max(worker.verify_seconds for worker in workers),
            )
            transports[:] = sorted({use.transport for outcome in report.replicas for use in outcome.transports})

        benchmark.pedantic(update, setup=before, rounds=ROUNDS, warmup_rounds=WARMUP)
    benchmark.extra_info.update(
        rounded(
            {
                "bytes_to_each_gpu": BYTES,
                "transport": transports,
                "rival": "Moonshot checkpoint-engine 0.4.2",
                "rival_once": {key: value for key, value in rival.items() if key != "seconds"},
                "times_faster_than_rival": series.median("moonshot_seconds") / series.median("sync_seconds"),
                "share_of_pinned_ceiling": BYTES
                / series.median("transfer_and_install_seconds")
                / 1e9
                / series.median("ceiling_GB_s"),
                "medians": series.last(ROUNDS),
                "versions": versions("vllm", "checkpoint-engine"),
            }
        )
    )
    print("\nRESULT host", benchmark.extra_info, flush=True)
