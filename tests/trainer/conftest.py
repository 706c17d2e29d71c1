"""A real manager on a thread, and replicas that read what trainers publish."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from plain_replica import PlainReplica

from ckpt_engine.core.deadlines import Deadlines
from ckpt_engine.manager.service import ManagerConfig, running_manager

DEADLINES = Deadlines(
    heartbeat=0.3, lease=2.0, resend=0.5, gather=15.0, prepare=15.0, seal=15.0, update=30.0, report=0.5
)


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[str]:
    """Its address."""
    with running_manager(manager_config(tmp_path / "ledger.sqlite3")) as address:
        yield address


def manager_config(ledger: Path, listen: str = "127.0.0.1:0") -> ManagerConfig:
    return ManagerConfig(listen=listen, http="", ledger=ledger, deadlines=DEADLINES, stop_seconds=1.0)


@pytest.fixture
def replica(manager: str) -> Iterator[Callable[..., PlainReplica]]:
    """Starts replicas that are stopped after the test."""
    started: list[PlainReplica] = []

    def start(name: str = "plain", address: str = manager) -> PlainReplica:
        started.append(PlainReplica(address, name).start())
        return started[-1]

    yield start
    for each in started:
        each.stop()
