"""A model of Qwen3-8B's shapes from GPU 0 to GPU 1 by our schedule over NCCL, transfer and install, against bare NCCL.

Both move as many bytes in as large buckets, in turns in the same two processes. Every round is verified.

    python -m pytest benchmarks/gpu/test_collective.py --benchmark-json=FILE -s
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.gpu.measure import ROUNDS, WARMUP, rounded, versions
from ckpt_engine.core.collective import SLOTS

ROOT = Path(__file__).parents[2]
LIMIT = 150.0


@pytest.mark.timeout(200)
def test_collective_from_gpu_to_gpu(benchmark: BenchmarkFixture, two_gpus_for: Any) -> None:
    two_gpus_for(True)
    processes = []
    try:
        for member in range(2):
            asked = member, ROUNDS, WARMUP, SLOTS
            command = [sys.executable, "-m", "benchmarks.gpu.collective_rank", *map(str, asked)]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            processes.append(subprocess.Popen(command, cwd=ROOT, env=os.environ.copy(), text=True, **pipes))
        source, worker = processes
        where = source.stdout.readline()
        told, _ = benchmark.pedantic(lambda: worker.communicate(where, timeout=LIMIT), rounds=1)
        source.wait(LIMIT)
    finally:
        for process in processes:
            process.kill()
            process.wait(LIMIT)
    assert (source.returncode, worker.returncode) == (0, 0), told
    found = json.loads(told.splitlines()[-1])
    benchmark.extra_info.update(rounded({**found, "versions": versions()}))
    print("\nRESULT", benchmark.extra_info, flush=True)
    assert found["share_of_bare"] >= 0.85
