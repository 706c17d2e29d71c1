"""An engine on this host that the agent did not start, with our gate in it.

The agent never ends or restarts it. When it ends, the agent waits for whatever answers at the same URL next. If that is
a new start with a new runtime directory, the agent moves there.
"""

from __future__ import annotations

import asyncio
import time
from urllib.parse import urlsplit

from ckpt_engine.agent.channel import AgentChannel, Answer
from ckpt_engine.agent.engine import (
    EngineEvents,
    EngineWatch,
    connect,
    locate,
    probe,
)
from ckpt_engine.core.deadlines import Deadlines
from ckpt_engine.core.problems import CkptEngineError, precondition
from ckpt_engine.engine.adapter import EngineAdapter, EngineCallError, load_adapter
from ckpt_engine.gate.directory import EngineDirectory
from ckpt_engine.gate.page import EnginePage, WorkerWord
from ckpt_engine.v1 import manager_pb2

SAID_FIRST_SECONDS, SAID_AGAIN_SECONDS = 1.0, 10.0
"""Time until the first line that an engine is waited for, and between the next ones."""


class AttachedEngine:
    """See `EngineHost`."""

    def __init__(
        self,
        kind: str,
        url: str,
        events: EngineEvents,
        answer: Answer,
        startup_seconds: float,
        deadlines: Deadlines,
        advertise: str = "",
    ) -> None:
        """url: of the engine's API on loopback. startup_seconds: for it to answer the first time. advertise: the host
        in the URL that other hosts get."""
        self._advertise = advertise
        self._deadlines = deadlines
        self._kind = kind
        self._url = url.rstrip("/")
        self._events = events
        self._answer = answer
        self._startup_seconds = startup_seconds
        self._module = load_adapter(kind)
        self._trouble = f"{self._url} has not answered yet"
        self._directory: EngineDirectory | None = None
        self._channel: AgentChannel | None = None
        self.agent_epoch = 0
        self.page: EnginePage | None = None
        self.adapter: EngineAdapter | None = None

    @property
    def default_name(self) -> str:
        parts = urlsplit(self._url)
        return f"{self._kind}-{parts.port or {'https': 443}.get(parts.scheme, 80)}"

    async def open(self) -> None:
        """Waits for the engine and takes its directory. Raises CkptEngineError."""
        until = time.monotonic() + self._startup_seconds
        saying = asyncio.ensure_future(self._say_waiting(until))
        try:
            while True:
                try:
                    await self._enter()
                    return
                except EngineCallError as error:
                    self._trouble = str(error)
                    if error.answered or time.monotonic() > until:
                        raise precondition(self._trouble) from error
                await asyncio.sleep(self._deadlines.engine_watch)
        finally:
            saying.cancel()

    async def _say_waiting(self, until: float) -> None:
        await asyncio.sleep(SAID_FIRST_SECONDS)
        while True:
            remaining = max(0.0, until - time.monotonic())
            self._events.say(f"waiting for the engine: {self._trouble}; {remaining:.0f} s left (--startup-timeout)")
            await asyncio.sleep(SAID_AGAIN_SECONDS)

    async def run(self) -> None:
        """Serves one start of the engine after another until cancelled. Raises EngineFailedError if this adapter cannot
        drive what answers."""
        last = ""
        while True:
            try:
                await self._enter()
                await self._serve()
            except (EngineCallError, CkptEngineError) as error:
                if str(error) != last:
                    self._events.say(f"waiting for the engine: {error}")
                last = str(error)
            else:
                last = ""
            await self._forget_engine()
            await asyncio.sleep(self._deadlines.engine_watch)

    async def close(self) -> None:
        """Leaves the engine as it is; another agent may take over."""
        await self._forget_engine()
        await self._leave()

    def replace(self, reason: str) -> bool:
        """Refuses: an engine that the agent did not start is not ended by it. Its gate stays closed."""
        return False

    async def look(self, seconds: float) -> None:
        """Does nothing: all of its workers are on this host."""

    def status(self, word: WorkerWord) -> manager_pb2.WorkerStatus:
        """See `EngineHost`."""
        return word.status()

    async def _enter(self) -> None:
        """Takes the directory that the engine names now, unless the agent has it already."""
        path = (await locate(self._url, self._deadlines.engine_health)).directory
        if self._directory is not None and self._directory.path == path:
            return
        await self._leave()
        try:
            directory = EngineDirectory(path)
            directory.token()
        except OSError as error:
            reason = f"the engine's directory {path} cannot be used from here: {error.strerror}"
            raise precondition(f"{reason}; run the agent as the same user, in the same container") from error
        directory.lock()
        self._directory = directory
        self.agent_epoch = max(self.agent_epoch, directory.next_agent_epoch())
        self.page = EnginePage(directory.page)
        self._channel = AgentChannel(directory, self._answer)
        await self._channel.start()

    async def _leave(self) -> None:
        if self._channel is not None:
            await self._channel.close()
            self._channel = None
        if self.page is not None:
            self.page.close()
            self.page = None
        if self._directory is not None:
            self._directory.unlock()
            self._directory = None

    async def _serve(self) -> None:
        """Watches the engine from the moment it is ready until it has ended."""
        assert self._directory is not None
        assert self.page is not None
        adapter = connect(self._module, self._url, self._directory)
        self.adapter = adapter
        if not await adapter.healthy(self._deadlines.engine_health):
            raise EngineCallError(f"{self._url} is not healthy yet", answered=True)
        ready = await probe(adapter, self._url, self._deadlines.engine_probe, self._advertise)
        self._events.say(f"engine ready at {self._url}")
        self._events.engine_ready(ready)
        watch = EngineWatch(adapter, self.page, self._deadlines)
        reason = ""
        while not reason:
            await asyncio.sleep(self._deadlines.engine_watch)
            reason = await watch.look() or await self._moved()
        self._events.say(reason)
        self._events.engine_exited(reason)

    async def _moved(self) -> str:
        """Reports a new start of the engine at the URL, which its health route would not show; empty: there is none."""
        assert self._directory is not None
        try:
            path = (await locate(self._url, self._deadlines.engine_health)).directory
        except EngineCallError:
            return ""  # that is for the watch to judge
        return "" if path == self._directory.path else f"the engine at {self._url} was restarted"

    async def _forget_engine(self) -> None:
        if self.adapter is not None:
            adapter, self.adapter = self.adapter, None
            await adapter.close()
