"""A checkpoint directory of Qwen3-8B's shapes to each of two GPUs (or the one that there is); see directory.py.

python -m pytest benchmarks/gpu/test_directory.py --benchmark-json=FILE
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.gpu.directory import AT, measure, place_of
from benchmarks.gpu.measure import ROUNDS
from ckpt_engine.host.relay_directory import DIRECTORY


@pytest.mark.timeout(400)
def test_a_checkpoint_directory_to_gpus(
    benchmark: BenchmarkFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DIRECTORY, str(tmp_path / "relays"))
    at = Path(os.environ.get(AT, tmp_path))
    found = benchmark.pedantic(lambda: measure(tmp_path, at, place_of(False), ROUNDS), rounds=1)
    benchmark.extra_info.update(found)
