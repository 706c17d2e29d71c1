"""Tests that need an NVIDIA GPU: this folder's are marked `gpu`, and skipped with a reason where there is none."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tests.gpu.seen import Seen

_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Asked of torch once; a CUDA build without a driver counts as no GPU."""
    missing = pytest.mark.skip(reason="needs an NVIDIA GPU: torch.cuda.is_available() is False here")
    for item in items:
        if _HERE not in item.path.parents:
            continue
        item.add_marker("gpu")
        if not torch.cuda.is_available():
            item.add_marker(missing)


@pytest.fixture
def two_gpus() -> tuple[torch.device, torch.device]:
    """The first two GPUs of this host; skips where there is one."""
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs two GPUs, this host shows {torch.cuda.device_count()}")
    return torch.device("cuda", 0), torch.device("cuda", 1)


@pytest.fixture
def repository() -> Path:
    """Where `python -m ckpt_engine` and `-m tests....` are started from."""
    os.environ.setdefault("PYTHONPATH", "")
    return _HERE.parents[1]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seen", metavar="FILE", help="JSON of what ran on this GPU, for `python -m tests.gpu.seen`")


def pytest_configure(config: pytest.Config) -> None:
    if file := config.getoption("--seen"):
        config.pluginmanager.register(Seen(Path(file)))
