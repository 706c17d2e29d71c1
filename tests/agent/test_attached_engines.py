"""Engines that somebody else started: found, followed, left alone, and never more than one agent each."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ckpt_engine.agent import attached
from ckpt_engine.agent.attached import AttachedEngine
from ckpt_engine.core.deadlines import Deadlines
from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.gate.directory import EngineDirectory
from tests.agent.hosts import QUICK, SECONDS, Events, nobody_asks, running
from tests.agent.small_engine import by_hand, environment
from tests.ports import free_port

pytestmark = pytest.mark.usefixtures("quick")


@pytest.fixture
def start_by_hand(root: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []

    def start(port: int, *arguments: str) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen(by_hand(port, root, *arguments), env=environment()))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def attach(port: int, events: Events, seconds: float = SECONDS) -> AttachedEngine:
    return AttachedEngine(
        "small", f"http://127.0.0.1:{port}/", events, nobody_asks, seconds, Deadlines().changed(QUICK)
    )


StartByHand = Callable[..., "subprocess.Popen[bytes]"]


async def test_an_engine_started_by_hand_gets_one_agent(start_by_hand: StartByHand, events: Events) -> None:
    port = free_port()
    process = start_by_hand(port, "--paused")
    first, second = attach(port, events), attach(port, events)
    try:
        async with running(first):
            await events.until(lambda: bool(events.ready))
            assert events.ready[0].paused is True, "a new agent must know that somebody paused the engine"
            assert first.default_name == f"small-{port}"
            with pytest.raises(CkptEngineError, match=rf"already has an agent \(pid {os.getpid()}\)"):
                await second.open()
        await first.close()
        async with running(second):
            await events.until(lambda: len(events.ready) == 2)
            assert second.agent_epoch == first.agent_epoch + 1
    finally:
        await first.close()
        await second.close()
    assert process.poll() is None, "an engine that is not ours goes on"


async def test_an_agent_follows_its_engine_to_a_new_start(start_by_hand: StartByHand, events: Events) -> None:
    port = free_port()
    process = start_by_hand(port)
    host = attach(port, events)
    try:
        async with running(host):
            await events.until(lambda: len(events.ready) == 1)
            assert host.page is not None
            old = host.page.path
            process.kill()
            process.wait()
            start_by_hand(port)
            await events.until(lambda: len(events.ready) == 2)
            assert len(events.exits) == 1
            assert host.page is not None
            assert host.page.path != old
            assert host.page.read()[0].alive
            # The lock of the old directory is free again, so that it can be cleaned away.
            EngineDirectory(old.parent).lock()
    finally:
        await host.close()


async def test_a_url_where_nothing_answers(events: Events, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits is told for what, and again."""
    monkeypatch.setattr(attached, "SAID_FIRST_SECONDS", 0.1)
    monkeypatch.setattr(attached, "SAID_AGAIN_SECONDS", 0.1)
    port = free_port()
    url = f"waiting for the engine: http://127.0.0.1:{port}"
    opening = asyncio.ensure_future(attach(port, events).open())
    await events.until(lambda: sum(f"{url} does not answer" in line for line in events.lines) > 1)
    opening.cancel()
    await asyncio.gather(opening, return_exceptions=True)
    assert all(f"{url} does not answer" in line or f"{url} has not answered yet" in line for line in events.lines)
    assert all("s left (--startup-timeout)" in line for line in events.lines)
    with pytest.raises(CkptEngineError, match="does not answer"):
        await attach(port, events, seconds=0.5).open()


async def test_a_server_that_takes_connections_and_says_nothing(
    events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attached, "SAID_FIRST_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        opening = asyncio.ensure_future(attach(port, events).open())
        await events.until(lambda: bool(events.lines))
        opening.cancel()
        await asyncio.gather(opening, return_exceptions=True)
    assert f"waiting for the engine: http://127.0.0.1:{port} has not answered yet" in events.lines[0]


async def test_a_server_without_our_gate(events: Events) -> None:
    port = free_port()
    server = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1", stderr=subprocess.DEVNULL
    )
    try:
        with pytest.raises(CkptEngineError, match="without ckpt-engine's gate"):
            await attach(port, events).open()
    finally:
        server.kill()
        await server.wait()
