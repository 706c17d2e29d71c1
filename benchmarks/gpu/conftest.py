"""Benchmarks on GPUs; skipped with a reason where there is none."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

_HERE = Path(__file__).parent

# A program that uses NVLink multicast can put a shared host's GPUs out of service.
os.environ.setdefault("NCCL_NVLS_ENABLE", "0")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = pytest.mark.skip(reason="needs an NVIDIA GPU: torch.cuda.is_available() is False here")
    for item in items:
        if _HERE in item.path.parents:
            item.add_marker("gpu")
            if not torch.cuda.is_available():
                item.add_marker(missing)


@pytest.fixture
def two_gpus_for() -> Callable[[bool], None]:
    """Call it with whether the case needs two GPUs; skips where there is one."""

    def need(two: bool) -> None:
        if two and torch.cuda.device_count() < 2:
            pytest.skip(f"needs two GPUs, this host shows {torch.cuda.device_count()}")

    return need
