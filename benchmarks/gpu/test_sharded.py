"""Two FSDP2 ranks update a vLLM server with tensor parallel 2 on the same two GPUs: slices only.

The ceiling: both GPUs at the same time copy as many bytes contiguously as their worker reads from its own GPU and from
the other one, local and remote copies running side by side.

    python -m pytest benchmarks/gpu/test_sharded.py --benchmark-json=FILE
"""

from __future__ import annotations

import contextlib
import itertools
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.gpu.lines import LineProcess
from benchmarks.gpu.measure import ROUNDS, WARMUP, Series, rounded, seconds_of, versions
from benchmarks.gpu.qwen3_8b import slice_bytes, write_config
from tests.cluster import running_cluster
from tests.gpu.gpu_server import needs_gpu_vllm, start_gpu_vllm

pytestmark = [*needs_gpu_vllm, pytest.mark.timeout(420)]

RANKS = 2
HALF = 5 << 30  # more than a worker reads from either side


class BothCopy:
    """Both GPUs copy given byte counts from themselves and from each other, all at once."""

    def __init__(self) -> None:
        buffers = range(RANKS)
        self._from = [torch.empty(HALF, dtype=torch.uint8, device=f"cuda:{i}").fill_(i + 1) for i in buffers]
        self._local = [torch.empty(HALF, dtype=torch.uint8, device=f"cuda:{i}") for i in buffers]
        self._remote = [torch.empty(HALF, dtype=torch.uint8, device=f"cuda:{i}") for i in buffers]
        self._streams = [[torch.cuda.Stream(torch.device("cuda", i)) for _ in range(2)] for i in buffers]

    def once(self, local: list[int], remote: list[int]) -> float:
        """local, remote: bytes for each GPU. Seconds until the slower one has all."""

        def work() -> None:
            for gpu in range(RANKS):
                other = 1 - gpu
                with torch.cuda.stream(self._streams[gpu][0]):
                    self._local[gpu][: local[gpu]].copy_(self._from[gpu][: local[gpu]], non_blocking=True)
                # torch copies between GPUs on the source's current stream
                with torch.cuda.stream(self._streams[gpu][1]), torch.cuda.stream(self._streams[other][1]):
                    self._remote[gpu][: remote[gpu]].copy_(self._from[other][: remote[gpu]], non_blocking=True)

        return seconds_of(work)


def test_update_from_shards(benchmark: BenchmarkFixture, two_gpus_for: Any, tmp_path: Path) -> None:
    two_gpus_for(True)
    config = write_config(tmp_path / "model")
    series = Series()
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(running_cluster(tmp_path / "cluster"))
        replica = start_gpu_vllm(cluster, "vllm", config, "--enforce-eager", tensor_parallel=RANKS)
        ranks = [
            LineProcess(
                tmp_path / f"rank-{rank}.log",
                ["benchmarks.gpu.fsdp_rank", cluster.address, str(rank), str(tmp_path / "store")],
            )
            for rank in range(RANKS)
        ]
        for rank in ranks:
            stack.callback(rank.close)
        for rank in ranks:
            rank.hear(120)
        replica.registered(240)
        both = BothCopy()
        traffic: dict[str, Any] = {}
        seeds = itertools.count(1)

        def tell(line: str) -> list[dict[str, Any]]:
            for rank in ranks:
                rank.say(line)
            return [rank.hear() for rank in ranks]

        def before() -> None:
            tell(f"renew {next(seeds)}")
            if traffic:
                series.add(ceiling_seconds=both.once(traffic["local"], traffic["remote"]))

        def update() -> None:
            first, _ = tell("update")
            assert first["ok"], f"{first['text']}\n{replica.tail()}"
            (outcome,) = first["report"]["replicas"]
            moved: dict[str, dict[int, int]] = {"local": defaultdict(int), "remote": defaultdict(int)}
            for edge in outcome["edges"]:
                worker = edge.get("workerRank", 0)
                side = "local" if edge.get("sourceRank", 0) == worker else "remote"
                moved[side][worker] += int(edge["bytes"])
            traffic.update({side: [counts[worker] for worker in range(RANKS)] for side, counts in moved.items()})
            traffic["transports"] = sorted({edge["transport"] for edge in outcome["edges"]})
            workers = outcome["workers"]
            series.add(
                pause_seconds=outcome["pauseSeconds"],
                transfer_and_install_seconds=max(
                    worker.get("transferSeconds", 0.0) + worker.get("installSeconds", 0.0) for worker in workers
                ),
                transfer_seconds=max(worker.get("transferSeconds", 0.0) for worker in workers),
                install_seconds=max(worker.get("installSeconds", 0.0) for worker in workers),
                verify_seconds=max(worker.get("verifySeconds", 0.0) for worker in workers),
            )

        benchmark.pedantic(update, setup=before, rounds=ROUNDS, warmup_rounds=WARMUP)
        total = sum(traffic["local"]) + sum(traffic["remote"])
        assert total == slice_bytes(RANKS), f"{total} bytes moved, {slice_bytes(RANKS)} are needed"
    benchmark.extra_info.update(
        rounded(
            {
                **traffic,
                "bytes": total,
                "over_ceiling": series.median("transfer_and_install_seconds") / series.median("ceiling_seconds"),
                "medians": series.last(ROUNDS),
                "versions": versions("vllm"),
            }
        )
    )
    print("\nRESULT sharded", benchmark.extra_info, flush=True)
