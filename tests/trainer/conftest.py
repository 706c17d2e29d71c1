"""A real manager on a thread, and replicas that read what trainers publish."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from plain_replica import PlainReplica
from trainer_world import manager_config

from ckpt_engine.manager.service import running_manager


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[str]:
    """Its address."""
    with running_manager(manager_config(tmp_path / "ledger.sqlite3")) as address:
        yield address


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
