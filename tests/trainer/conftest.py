"""A real manager on a thread, and replicas that read what trainers publish."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from keeper import Keeper
from plain_replica import PlainReplica
from trainer_world import manager_config

from ckpt_engine.manager.service import running_manager
from ckpt_engine.v1.weights_pb2 import Identity
from tests.postgresql import postgresql  # noqa: F401  # a fixture


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[str]:
    """Its address."""
    with running_manager(manager_config(tmp_path / "ledger.sqlite3")) as address:
        yield address


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Below it lie the checkpoints that a manager may publish."""
    path = tmp_path / "checkpoints"
    path.mkdir()
    return path


@pytest.fixture
def replica(manager: str) -> Iterator[Callable[..., PlainReplica]]:
    """Starts replicas that are stopped after the test."""
    started: list[PlainReplica] = []

    def start(name: str = "plain", address: str = manager, pool: str = "") -> PlainReplica:
        started.append(PlainReplica(address, name, pool).start())
        return started[-1]

    yield start
    for each in started:
        each.stop()


@pytest.fixture
def hold(tmp_path: Path) -> Iterator[Callable[..., Keeper]]:
    """Starts keepers, each of one version; they are stopped after the test."""
    started: list[Keeper] = []

    def start(address: str, name: str, identity: Identity, weights: dict[str, torch.Tensor]) -> Keeper:
        started.append(Keeper(address, name, tmp_path / name, weights))
        return started[-1].start(identity)

    yield start
    for each in started:
        each.stop()
