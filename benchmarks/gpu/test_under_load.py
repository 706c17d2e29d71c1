"""32 streams of a vLLM server with CUDA graphs, an update every 1.5 s, and vLLM's own `ipc` backend in the same run.
under_load.py says what the numbers are.

    python -m pytest benchmarks/gpu/test_under_load.py --benchmark-json=FILE
"""

from __future__ import annotations

from pathlib import Path

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.gpu.under_load import Load, measure, vllm_on_a_gpu
from tests.gpu.gpu_server import needs_gpu_vllm

pytestmark = [*needs_gpu_vllm, pytest.mark.timeout(560)]


def test_updates_while_clients_stream(benchmark: BenchmarkFixture, tmp_path: Path) -> None:
    with vllm_on_a_gpu(tmp_path, rival=True) as world:
        found = benchmark.pedantic(lambda: measure(world, Load(), tmp_path, lambda result: None), rounds=1)
    benchmark.extra_info.update({key: value for key, value in found.items() if key != "fields"})
    requests = found["ours"]["requests"]
    assert not requests["failed"], requests
