"""The shelf of one adapter as the engine of an agent of its own.

It decides when a shelf is there: as long as the engine that another agent of this process launched is. It starts and
ends no engine, and decides nothing about versions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ckpt_engine.agent.channel import AgentChannel, Answer
from ckpt_engine.agent.engine import EngineEvents, probe
from ckpt_engine.agent.launched import LaunchedEngine
from ckpt_engine.core.deadlines import Deadlines
from ckpt_engine.engine.adapter import AdapterSettings, EngineAdapter, EngineCallError, load_shelf_module
from ckpt_engine.gate.directory import EngineDirectory
from ckpt_engine.gate.page import EnginePage, WorkerWord
from ckpt_engine.gate.shelf import shelf_directory
from ckpt_engine.machines.events import EngineReady
from ckpt_engine.v1 import manager_pb2

LOOK_SECONDS = 0.2


class ShelfHost:
    """See `EngineHost`. The engine is that of another agent in this process."""

    def __init__(
        self,
        kind: str,
        adapter: str,
        engine: LaunchedEngine,
        ready: Callable[[], EngineReady | None],
        events: EngineEvents,
        answer: Answer,
        deadlines: Deadlines,
    ) -> None:
        """kind: of the engine. ready: what the engine said of its present start; None: it is not there."""
        self._module = load_shelf_module(kind)
        self._adapter_name = adapter
        self._engine = engine
        self._ready = ready
        self._events = events
        self._answer = answer
        self._deadlines = deadlines
        self._directory: EngineDirectory | None = None
        self._channel: AgentChannel | None = None
        self.agent_epoch = 0
        self.page: EnginePage | None = None
        self.adapter: EngineAdapter | None = None

    @property
    def default_name(self) -> str:
        return f"{self._engine.default_name}.{self._adapter_name}"

    async def open(self) -> None:
        """Waits until the engine has its directory, and takes the shelf's."""
        while (engine := self._engine.directory) is None:  # noqa: ASYNC110 - ends with the agent of the engine
            await asyncio.sleep(LOOK_SECONDS)
        directory = shelf_directory(engine.path, self._adapter_name)
        directory.lock()
        self._directory = directory
        self.agent_epoch = directory.next_agent_epoch()
        self._channel = AgentChannel(directory, self._answer)
        await self._channel.start()

    async def run(self) -> None:
        """Serves one start of the engine after another until cancelled."""
        while True:
            ready = self._ready()
            if ready is not None:
                try:
                    await self._serve(ready)
                except EngineCallError as error:
                    self._events.say(f"waiting for the engine: {error}")
                finally:
                    await self._forget()
            await asyncio.sleep(LOOK_SECONDS)

    async def _serve(self, ready: EngineReady) -> None:
        engine = self._engine.directory
        assert engine is not None
        assert self._directory is not None
        self.page = EnginePage(self._directory.page)
        settings = AdapterSettings(self._engine.url, engine.path, engine.token())
        self.adapter = self._module.create_shelf_adapter(settings, self._adapter_name)
        shelf = await probe(self.adapter, settings.url, self._deadlines.engine_probe)
        shelf.engine.url = ready.engine.url
        self._events.engine_ready(shelf)
        while self._ready() is ready:  # noqa: ASYNC110 - ends with the engine, or is cancelled
            await asyncio.sleep(LOOK_SECONDS)
        self._events.engine_exited("the engine has ended")

    async def _forget(self) -> None:
        if self.adapter is not None:
            adapter, self.adapter = self.adapter, None
            await adapter.close()
        if self.page is not None:
            page, self.page = self.page, None
            page.close()

    async def close(self) -> None:
        """Leaves the shelf as it is: its engine ends with the engine's agent."""
        await self._forget()
        if self._channel is not None:
            await self._channel.close()
            self._channel = None
        if self._directory is not None:
            self._directory.unlock()
            self._directory = None

    def replace(self, reason: str) -> bool:
        """Refuses: the engine's own agent ends it."""
        return False

    async def look(self, seconds: float) -> None:
        """Does nothing: all workers are on this host."""

    def status(self, word: WorkerWord) -> manager_pb2.WorkerStatus:
        """See `EngineHost`."""
        return word.status()
