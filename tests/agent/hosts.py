"""What tests of engines, launched and attached, share: who listens to a host, and a host that runs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from ckpt_engine.agent.attached import AttachedEngine
from ckpt_engine.agent.launched import LaunchedEngine
from ckpt_engine.machines.events import EngineReady
from ckpt_engine.v1 import worker_pb2

SECONDS = 60.0
QUICK = "engine_restart_first=0.1 engine_watch=0.1"


class Events:
    """What the host told, in order: "ready", and the reasons of exits."""

    def __init__(self) -> None:
        self.ready: list[EngineReady] = []
        self.exits: list[str] = []
        self.lines: list[str] = []
        self._changed = asyncio.Event()

    def engine_ready(self, ready: EngineReady) -> None:
        self.ready.append(ready)
        self._changed.set()

    def engine_exited(self, reason: str) -> None:
        self.exits.append(reason)
        self._changed.set()

    def say(self, line: str) -> None:
        self.lines.append(line)
        self._changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(SECONDS):
            while not condition():
                self._changed.clear()
                await self._changed.wait()


async def nobody_asks(request: worker_pb2.WorkerRequest) -> worker_pb2.AgentReply | None:
    return None


@contextlib.asynccontextmanager
async def running(host: LaunchedEngine | AttachedEngine) -> AsyncIterator[asyncio.Future[None]]:
    await host.open()
    run = asyncio.ensure_future(host.run())
    try:
        yield run
    finally:
        run.cancel()
        await asyncio.gather(run, return_exceptions=True)
