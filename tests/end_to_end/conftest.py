"""One cluster for all end-to-end tests here: starting engines takes seconds, so they are shared."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.cluster import Cluster, running_cluster
from tests.tiny_model import make_tiny_qwen3

PADDED_VOCABULARY = 500  # no multiple of 128: with two workers the last rows of the second one are padding


@pytest.fixture(scope="session")
def bare_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory without weights: whatever is served was installed."""
    path = tmp_path_factory.mktemp("bare")
    make_tiny_qwen3(path, vocabulary=PADDED_VOCABULARY, weights=False)
    return path


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, bare_model: Path) -> Iterator[Cluster]:
    """A manager with two reference replicas: `one` of one worker, `two` of two tensor-parallel ones."""
    torch.set_num_threads(1)
    with running_cluster(tmp_path_factory.mktemp("cluster")) as running:
        running.replica("one", "reference", bare_model)
        running.replica("two", "reference", bare_model, "--tensor-parallel", "2")
        for replica in running.replicas:
            replica.registered()
        yield running
