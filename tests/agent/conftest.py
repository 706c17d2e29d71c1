"""A manager that a test plays, and agents of it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

from ckpt_engine.agent.launched import LaunchSettings
from ckpt_engine.agent.session import AgentSettings
from ckpt_engine.core.deadlines import ENVIRONMENT, Deadlines
from tests.agent.hosts import Events
from tests.agent.plain_manager import PlainManager, plain_manager
from tests.agent.running_agent import QUICK, SECONDS, Beside, RunningAgent, Start
from tests.agent.small_engine import answers, by_hand, environment
from tests.distributions import SMALL, distribution
from tests.ports import free_port

__all__ = ["plain_manager"]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The small engine, and an agent that looks at it often."""
    monkeypatch.syspath_prepend(distribution(tmp_path_factory.mktemp("installed"), "small", SMALL))
    monkeypatch.setenv(ENVIRONMENT, QUICK)


@pytest.fixture
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of engines' directories."""
    return tmp_path_factory.mktemp("engines")


@pytest.fixture
async def events() -> Events:
    return Events()


@pytest.fixture
async def beside(root: Path) -> AsyncIterator[Beside]:
    """Starts engines that no agent launches, tells each one's URL once it answers, and ends them whatever happens."""
    started: list[asyncio.subprocess.Process] = []

    async def beside(*arguments: str) -> tuple[str, asyncio.subprocess.Process]:
        port = free_port()
        started.append(await asyncio.create_subprocess_exec(*by_hand(port, root, *arguments), env=environment()))
        await answers(port)
        return f"http://127.0.0.1:{port}", started[-1]

    yield beside
    for engine in started:
        if engine.returncode is None:
            engine.kill()
        await engine.wait()


@pytest.fixture
async def start(manager: PlainManager, quick: None, root: Path) -> AsyncIterator[Start]:
    """Starts agents of `manager`, and ends them whatever happens. url: of an engine beside it; else it launches one."""
    started: list[RunningAgent] = []

    def start(
        *arguments: str, url: str = "", name: str = "", check_engine: Literal["auto", "always", "never"] = "auto"
    ) -> RunningAgent:
        launch = LaunchSettings("small", arguments, startup_seconds=SECONDS, root=root)
        deadlines = Deadlines.from_environment(os.environ).changed("words=0.1 resend=0.5 reconnect_most=0.3")
        settings = AgentSettings(
            manager.address, "small", launch, name=name, deadlines=deadlines, check_engine=check_engine
        )
        if url:
            settings = replace(settings, launch=None, url=url)
        started.append(RunningAgent(settings))
        return started[-1]

    yield start
    for agent in started:
        await agent.end()
