"""FSDP2 ranks update a vLLM server with tensor parallel 2, slices only: two ranks on the server's own GPUs (`same`), or
as many as there are GPUs for, up to a power of two, beside the two of the server (`others`; three GPUs or more).

The ceiling: all GPUs at the same time copy as many bytes contiguously as each worker reads from each rank's GPU, local
and remote copies running side by side.

    python -m pytest benchmarks/gpu/test_sharded.py -k same --benchmark-json=FILE        (same, others)
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

WORKERS = 2

Traffic = dict[tuple[int, int], int]
"""Bytes by (GPU of a rank, GPU of a worker)."""


class AllCopy:
    """All pairs of GPUs copy as many bytes as they are told, all at once."""

    def __init__(self) -> None:
        self._pairs: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor, torch.cuda.Stream, torch.cuda.Stream]] = {}

    def once(self, traffic: Traffic) -> float:
        """Seconds until the slowest pair has all."""
        for (source, target), size in traffic.items():
            if (source, target) not in self._pairs:
                self._pairs[source, target] = (
                    torch.empty(size, dtype=torch.uint8, device=f"cuda:{source}").fill_(source + 1),
                    torch.empty(size, dtype=torch.uint8, device=f"cuda:{target}"),
                    torch.cuda.Stream(torch.device("cuda", source)),
                    torch.cuda.Stream(torch.device("cuda", target)),
                )

        def work() -> None:
            for pair in traffic:
                held, to, at_source, at_target = self._pairs[pair]
                # torch copies between GPUs on the source's current stream
                with torch.cuda.stream(at_target), torch.cuda.stream(at_source):
                    to.copy_(held, non_blocking=True)

        return seconds_of(work)


def layout(case: str, gpus: int) -> tuple[int, list[int]]:
    """How many ranks, on the first GPUs, and the GPUs of the workers."""
    if case == "same":
        return WORKERS, list(range(WORKERS))
    spare = gpus - WORKERS
    ranks = 1 << (spare.bit_length() - 1) if spare > 0 else 0
    return ranks, list(range(gpus - WORKERS, gpus))


@pytest.mark.parametrize("case", ["same", "others"])
def test_update_from_shards(benchmark: BenchmarkFixture, two_gpus_for: Any, tmp_path: Path, case: str) -> None:
    two_gpus_for(True)
    count, gpus_of_workers = layout(case, torch.cuda.device_count())
    if not count:
        pytest.skip(
            f"needs three GPUs: of {torch.cuda.device_count()} the server takes {WORKERS}, none is left to train"
        )
    config = write_config(tmp_path / "model")
    series = Series()
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(running_cluster(tmp_path / "cluster"))
        replica = start_gpu_vllm(
            cluster,
            "vllm",
            config,
            "--enforce-eager",
            visible=",".join(map(str, gpus_of_workers)),
            tensor_parallel=WORKERS,
        )
        ranks = [
            LineProcess(
                tmp_path / f"rank-{rank}.log",
                ["benchmarks.gpu.fsdp_rank", cluster.address, str(rank), str(tmp_path / "store"), str(count)],
            )
            for rank in range(count)
        ]
        for rank in ranks:
            stack.callback(rank.close)
        for rank in ranks:
            rank.hear(120)
        replica.registered(240)
        ceiling = AllCopy()
        traffic: Traffic = {}
        transports: list[str] = []
        seeds = itertools.count(1)

        def tell(line: str) -> list[dict[str, Any]]:
            for rank in ranks:
                rank.say(line)
            return [rank.hear() for rank in ranks]

        def before() -> None:
            tell(f"renew {next(seeds)}")
            if traffic:
                series.add(ceiling_seconds=ceiling.once(traffic))

        def update() -> None:
            first, *_ = tell("update")
            assert first["ok"], f"{first['text']}\n{replica.tail()}"
            (outcome,) = first["report"]["replicas"]
            moved: Traffic = defaultdict(int)
            for edge in outcome["edges"]:
                pair = edge.get("sourceRank", 0), gpus_of_workers[edge.get("workerRank", 0)]
                moved[pair] += int(edge["bytes"])
            traffic.update(moved)
            transports[:] = sorted({edge["transport"] for edge in outcome["edges"]})
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
        total = sum(traffic.values())
        assert total == slice_bytes(WORKERS), f"{total} bytes moved, {slice_bytes(WORKERS)} are needed"
    benchmark.extra_info.update(
        rounded(
            {
                "case": case,
                "ranks": count,
                "workers_on": gpus_of_workers,
                "transports": transports,
                "bytes": total,
                "bytes_from_to": {f"{source} to {target}": size for (source, target), size in traffic.items()},
                "over_ceiling": series.median("transfer_and_install_seconds") / series.median("ceiling_seconds"),
                "medians": series.last(ROUNDS),
                "versions": versions("vllm"),
            }
        )
    )
    print("\nRESULT sharded", case, benchmark.extra_info, flush=True)
