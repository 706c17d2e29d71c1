"""Training frameworks in environments of their own, which `engines/build` makes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import Cluster, running_cluster
from tests.tiny_model import make_tiny_qwen3

_HERE = Path(__file__).parent

NEEDS = {
    "test_openrlhf": "CKPT_ENGINE_OPENRLHF_PYTHON",
    "test_slime": "CKPT_ENGINE_SLIME_PYTHON",
    "test_verl": "CKPT_ENGINE_VERL_PYTHON",
    "test_ray": "CKPT_ENGINE_VERL_PYTHON",  # it has Ray, too
    "": "CKPT_ENGINE_TRL_PYTHON",
}
"""The variable without which a test is skipped, by how its file's name begins."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _HERE in item.path.parents:
            item.add_marker("framework")
            variable = next(name for start, name in NEEDS.items() if item.path.stem.startswith(start))
            if variable not in os.environ:
                item.add_marker(pytest.mark.skip(reason=f"{variable} is not set; `engines/run` sets the Pythons"))


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A manager and two reference replicas that have no weights yet; the model lies at `model` beside them, float32."""
    import torch

    path = tmp_path_factory.mktemp("frameworks")
    make_tiny_qwen3(path / "model", dtype=torch.float32)
    with running_cluster(path) as cluster:
        for name in ("one", "two"):
            cluster.replica(name, "reference", path / "model", "--dtype", "float32")
        for replica in cluster.replicas:
            replica.registered()
        yield cluster
