"""A real manager on a thread, and the command line as a user has it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import Result

from ckpt_engine.core.deadlines import Deadlines
from ckpt_engine.manager.service import ManagerConfig, running_manager
from tests.command_line import run

Run = Callable[..., Result]


def _of_one_loop(record: logging.LogRecord) -> bool:
    return "PollerCompletionQueue" not in record.getMessage()


@pytest.fixture(autouse=True)
def two_loops_in_one_process() -> Iterator[None]:
    """The manager's loop and a command's share this process here, as they never do for users: grpc.aio then wakes one
    of them for the other's events now and then, says so in the log, and goes on."""
    log = logging.getLogger("asyncio")
    log.addFilter(_of_one_loop)
    yield
    log.removeFilter(_of_one_loop)


@pytest.fixture(name="run")
def runner() -> Run:
    return run


@pytest.fixture
def config(tmp_path: Path) -> ManagerConfig:
    return ManagerConfig(
        "127.0.0.1:0", "127.0.0.1:0", tmp_path / "ledger.sqlite3", deadlines=Deadlines(), stop_seconds=1.0
    )


@pytest.fixture
def manager(config: ManagerConfig) -> Iterator[str]:
    """Its address."""
    with running_manager(config) as address:
        yield address
