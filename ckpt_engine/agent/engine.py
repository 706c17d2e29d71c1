"""An engine as its agent sees it: where it is, how to drive it, whether it still lives.

`EngineHost` has two implementations: an engine that the agent launches (launched.py), and one that runs already
(attached.py). Both call `EngineEvents` whenever the engine is ready and whenever it has ended.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit, urlunsplit

from ckpt_engine.agent.http import EngineClient
from ckpt_engine.core.deadlines import Deadlines
from ckpt_engine.engine.adapter import AdapterModule, AdapterSettings, EngineAdapter, EngineCallError
from ckpt_engine.gate.directory import EngineDirectory
from ckpt_engine.gate.gate import INFO_ROUTE
from ckpt_engine.gate.page import EnginePage, WorkerWord
from ckpt_engine.machines.events import EngineReady
from ckpt_engine.v1 import manager_pb2


class EngineEvents(Protocol):
    """Callbacks on the agent's loop; they must neither block nor raise."""

    def engine_ready(self, ready: EngineReady) -> None: ...

    def engine_exited(self, reason: str) -> None:
        """Called when the engine has ended, at most once after each `engine_ready`. Its workers hold nothing then."""
        ...

    def say(self, line: str) -> None:
        """Prints one plain line for people."""
        ...


class EngineFailedError(Exception):
    """The engine has ended and will not be started again; the message says why, with its last lines."""


class EngineHost(Protocol):
    """One engine and its runtime directory, of which we are the only agent from `open` to `close`."""

    async def open(self) -> None:
        """Takes the directory. Raises CkptEngineError if another agent has it, or the engine cannot be found."""
        ...

    async def run(self) -> None:
        """Keeps the engine running until cancelled. Raises EngineFailedError if it has ended for good.

        Cancelling does not end the engine; `close` does.
        """
        ...

    async def close(self) -> None:
        """Ends the engine if the agent launched it, and releases the directory. Safe to call any time, also twice."""
        ...

    def replace(self, reason: str) -> bool:
        """Ends an engine that does not react, so that `run` starts a new one. False: the agent did not launch it."""
        ...

    async def look(self, seconds: float) -> None:
        """Updates the words of workers on other nodes in `page`, within `seconds`."""
        ...

    def status(self, word: WorkerWord) -> manager_pb2.WorkerStatus:
        """A word of `page` as a message for the manager."""
        ...

    @property
    def agent_epoch(self) -> int: ...

    @property
    def default_name(self) -> str:
        """The replica's default name, without the host's name before it: kind and port."""
        ...

    @property
    def page(self) -> EnginePage | None: ...

    @property
    def adapter(self) -> EngineAdapter | None:
        """The adapter; None unless the engine is running."""
        ...


@dataclass(frozen=True)
class EngineLocation:
    """An engine's answer at /ckpt_engine/info."""

    directory: Path


async def locate(url: str, seconds: float) -> EngineLocation:
    """Asks the engine at `url` for its runtime directory. Raises EngineCallError in words for people."""
    client = EngineClient(url)
    try:
        directory = (await client.call("GET", INFO_ROUTE, seconds)).json()["directory"]
    except EngineCallError as error:
        if not error.answered:
            raise EngineCallError(f"{url} does not answer: {error}", answered=False) from error
        message = f"the server at {url} answers {INFO_ROUTE} with 404: it was started without ckpt-engine's gate"
        raise EngineCallError(message if error.status == 404 else f"{url}: {error}", answered=True) from error
    except (ValueError, KeyError, TypeError) as error:
        raise EngineCallError(
            f"{url}{INFO_ROUTE} answers something else than an engine's gate", answered=True
        ) from error
    finally:
        client.close()
    return EngineLocation(Path(directory))


def connect(module: AdapterModule, url: str, directory: EngineDirectory) -> EngineAdapter:
    """Makes a driver for the engine at `url`, with the token of its directory."""
    return module.create_adapter(AdapterSettings(url, directory.path, directory.token()))


async def probe(adapter: EngineAdapter, url: str, seconds: float, advertise: str = "") -> EngineReady:
    """Asks a healthy engine for its version and layout. advertise: replaces the host of `url` for other hosts.

    Raises EngineCallError without an answer within `seconds`, EngineFailedError if this adapter cannot drive it.
    """
    try:
        async with asyncio.timeout(seconds):
            info = await adapter.probe(seconds)
    except TimeoutError:
        raise EngineCallError(f"{url} did not say within {seconds:g} s what it is", answered=False) from None
    if not info.supported:
        raise EngineFailedError(f"{adapter.kind} {info.version} at {url} cannot be driven: {info.reason}")
    engine = manager_pb2.Engine(
        kind=adapter.kind,
        version=info.version,
        url=advertised_url(url, advertise),
        pause_modes=sorted(adapter.capabilities.pause_modes - info.refused_modes.keys()),
        refused_modes={int(mode): reason for mode, reason in info.refused_modes.items()},
    )
    levels = adapter.capabilities.sleep_levels if info.sleep_levels is None else info.sleep_levels
    return EngineReady(engine, info.world_size, info.paused, info.asleep, sleep_levels=levels, untested=info.untested)


def checked_advertise(address: str) -> str:
    """Checks the address at which other hosts reach this one. Raises ValueError unless it is a bare host or IP."""
    bare = re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?", address) is not None
    if address and not bare and not _is_ipv6(address):
        raise ValueError(f"--advertise takes a host's name or IP address without scheme and port, not {address!r}")
    return address


def advertised_url(url: str, advertise: str) -> str:
    """`url` with its host replaced by the advertised one; unchanged if there is none."""
    if not advertise:
        return url
    parts = urlsplit(url)
    host = f"[{advertise}]" if _is_ipv6(advertise) else advertise
    return urlunsplit(parts._replace(netloc=host if parts.port is None else f"{host}:{parts.port}"))


def _is_ipv6(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).version == 6
    except ValueError:
        return False


class EngineWatch:
    """Decides from repeated looks whether an engine has ended. One instance for each start of an engine."""

    def __init__(
        self,
        adapter: EngineAdapter,
        page: EnginePage,
        deadlines: Deadlines,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._deadlines = deadlines
        self._adapter = adapter
        self._page = page
        self._clock = clock
        self._healthy_at = clock()
        self._workers_alive_at = clock()

    async def look(self) -> str:
        """Looks once: why the engine counts as ended; empty: it lives. Takes at most twice
        `engine_health` seconds."""
        if await self._adapter.healthy(self._deadlines.engine_health):
            self._healthy_at = self._clock()
            await self._adapter.count_guesses(self._deadlines.engine_health)
        elif self._clock() - self._healthy_at > self._deadlines.engine_unhealthy:
            return f"the engine has not answered its health route for {self._deadlines.engine_unhealthy:g} s"
        dead = [word for word in self._page.read() if word.boot_id and not word.alive]
        if not dead:
            self._workers_alive_at = self._clock()
        elif self._clock() - self._workers_alive_at > self._deadlines.engine_dead_worker:
            return f"worker {dead[0].rank} of the engine (pid {dead[0].pid}) is dead"
        return ""
