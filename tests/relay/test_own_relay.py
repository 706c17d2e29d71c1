"""`agent --relay auto`: one relay a host, started by the first agent, and by another one when that ends."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from ckpt_engine.agent import own_relay
from ckpt_engine.agent.own_relay import OwnRelay
from ckpt_engine.core.deadlines import Deadlines

NOBODY = "127.0.0.1:1"
OPTIONS = ("--manager", NOBODY, "--memory", "8MiB", "--log-level", "error")
SECONDS = 60.0


async def until(look: Callable[[], bool]) -> None:
    async with asyncio.timeout(SECONDS):
        while not look():  # noqa: ASYNC110 - of other processes
            await asyncio.sleep(0.02)


def relays_of(pid: int) -> list[psutil.Process]:
    return [child for child in psutil.Process(pid).children() if "--until-stdin-ends" in child.cmdline()]


def listening(folder: Path) -> bool:
    return any(folder.glob("relay-*.sock"))


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_relay, "LOOK_SECONDS", 0.05)


async def test_one_relay_a_host_which_another_agent_follows(relay_directory: Path) -> None:
    said: dict[str, list[str]] = {"a": [], "b": []}
    first = asyncio.ensure_future(OwnRelay(OPTIONS, Deadlines(), said["a"].append).run())
    await until(lambda: listening(relay_directory))
    second = asyncio.ensure_future(OwnRelay(OPTIONS, Deadlines(), said["b"].append).run())
    await until(lambda: bool(said["b"]))
    assert said["b"] == [f"this host has a relay already, at {relay_directory}"]
    (relay,) = relays_of(os.getpid())
    assert said["a"] == [f"started a relay for this host (process {relay.pid})"]
    first.cancel()
    await asyncio.wait((first,), timeout=SECONDS)
    assert not relay.is_running() or relay.status() == psutil.STATUS_ZOMBIE
    await until(lambda: listening(relay_directory))
    assert said["b"][-1].startswith("started a relay")
    second.cancel()
    await asyncio.wait((second,), timeout=SECONDS)
    assert not listening(relay_directory)


async def test_a_relay_ends_with_an_agent_that_was_killed(relay_directory: Path) -> None:
    code = f"""
        import asyncio
        from ckpt_engine.agent.own_relay import OwnRelay
        from ckpt_engine.core.deadlines import Deadlines
        asyncio.run(OwnRelay({OPTIONS!r}, Deadlines(), print).run())
    """
    agent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", textwrap.dedent(code), stdout=asyncio.subprocess.DEVNULL
    )
    await until(lambda: listening(relay_directory))
    (relay,) = relays_of(agent.pid)
    agent.send_signal(signal.SIGKILL)
    await agent.wait()
    await until(lambda: not listening(relay_directory))
    await until(lambda: not relay.is_running() or relay.status() == psutil.STATUS_ZOMBIE)


async def test_a_directory_that_cannot_be_says_so(relay_directory: Path) -> None:
    os.mkdir(relay_directory)
    os.chmod(relay_directory, 0o777)
    said: list[str] = []
    looking = asyncio.ensure_future(OwnRelay(OPTIONS, Deadlines(), said.append).run())
    await until(lambda: bool(said))
    looking.cancel()
    assert "no relay can run here: " in said[0]
    assert "others could put their sockets" in said[0]
