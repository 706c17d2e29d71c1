"""A real manager on free loopback ports, with a ledger of the test's own."""

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import trustme
from manager_keys import Keys
from scripted_members import stub_at

from ckpt_engine.channel import ManagerStub
from ckpt_engine.core.deadlines import Deadlines
from ckpt_engine.manager.service import ManagerConfig, ManagerServer
from tests.postgresql import postgresql  # noqa: F401  # a fixture


@pytest.fixture
def config(tmp_path: Path) -> ManagerConfig:
    return ManagerConfig(
        listen="127.0.0.1:0",
        http="127.0.0.1:0",
        ledger=tmp_path / "ledger.sqlite3",
        deadlines=replace(Deadlines(), gather=20.0, lease=600.0, update=600.0),  # scripted members do not beat
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


@pytest.fixture
async def client(manager: ManagerServer) -> AsyncIterator[httpx.AsyncClient]:
    """Of its HTTP side."""
    async with httpx.AsyncClient(base_url=f"http://{manager.http_address}", timeout=60, trust_env=False) as made:
        yield made


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    path = tmp_path / "keys"
    path.mkdir()
    return Keys(path, trustme.CA())


@pytest.fixture
async def asking(config: ManagerConfig, keys: Keys) -> AsyncIterator[ManagerServer]:
    """A manager over TLS that asks for tokens."""
    async with ManagerServer(replace(config, security=keys.asking)) as server:
        yield server
