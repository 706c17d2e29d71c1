"""Engines and models shared by the tests here: starting an engine takes seconds, so each is started once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.reference.engine_process import EngineProcess, engine
from tests.tiny_model import decisive_prompts, make_tiny_qwen3

PADDED_VOCABULARY = 500  # no multiple of 128: with two workers the second one's last rows are padding
TOKENS = 32


class Version(NamedTuple):
    """Weights of one version, and a prompt whose 32 greedy tokens are beyond doubt under them."""

    number: int
    model: Any
    prompt: list[int]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that holds config.json only: whatever is served was installed."""
    path = tmp_path_factory.mktemp("tiny")
    make_tiny_qwen3(path, vocabulary=PADDED_VOCABULARY, weights=False)
    return path


@pytest.fixture(scope="session")
def versions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Version, Version]:
    """Two versions of the model in `checkpoint`."""
    torch.set_num_threads(1)  # at this size more threads only wait for each other, and engines run beside
    path = tmp_path_factory.mktemp("versions")
    models = [make_tiny_qwen3(path, seed, vocabulary=PADDED_VOCABULARY, weights=False) for seed in (1, 2)]
    first, second = (
        Version(number, model, decisive_prompts(model, 1, TOKENS)[0]) for number, model in enumerate(models, 1)
    )
    return first, second


@pytest.fixture(scope="session")
def one_worker(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    with engine(checkpoint, tmp_path_factory.mktemp("log") / "log") as running:
        yield running


@pytest.fixture(scope="session")
def two_workers(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    with engine(checkpoint, tmp_path_factory.mktemp("log") / "log", "--tensor-parallel", "2") as running:
        yield running
