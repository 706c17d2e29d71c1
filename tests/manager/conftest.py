"""A real manager on free loopback ports, with a ledger of the test's own."""

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from scripted_members import stub_at

from ckpt_engine.channel import ManagerStub
from ckpt_engine.core.deadlines import Deadlines
from ckpt_engine.manager.service import ManagerConfig, ManagerServer


@pytest.fixture
def config(tmp_path: Path) -> ManagerConfig:
    return ManagerConfig(
        listen="127.0.0.1:0",
        http="127.0.0.1:0",
        ledger=tmp_path / "ledger.sqlite3",
        deadlines=replace(Deadlines(), gather=20.0, update=60.0),
        stop_seconds=5.0,
    )


@pytest.fixture
async def manager(config: ManagerConfig) -> AsyncIterator[ManagerServer]:
    async with ManagerServer(config) as server:
        yield server


@pytest.fixture
async def stub(manager: ManagerServer) -> AsyncIterator[ManagerStub]:
    async with stub_at(manager.address) as made:
        yield made
