"""An engine that the agent launches, restarts when it fails, and ends when the agent ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from urllib.parse import urlsplit

from ckpt_engine.addresses import EVERY_ADDRESS
from ckpt_engine.agent.channel import AgentChannel, Answer
from ckpt_engine.agent.engine import (
    EngineEvents,
    EngineFailedError,
    EngineWatch,
    connect,
    locate,
    probe,
)
from ckpt_engine.agent.leading import Followers, NodesMissingError
from ckpt_engine.agent.logs import new_log
from ckpt_engine.agent.ports import ReservedPort, is_free, owner_of
from ckpt_engine.agent.process import EngineProcess, EngineProcessError, LineSink
from ckpt_engine.agent.starting import engine_process, new_page
from ckpt_engine.core.deadlines import Deadlines
from ckpt_engine.engine.adapter import EngineAdapter, EngineCallError, LaunchPlan, load_adapter, load_shelf_module
from ckpt_engine.engine.node_plan import NodePart, node_plan_of
from ckpt_engine.gate.directory import ENVIRONMENT, EngineDirectory, default_root
from ckpt_engine.gate.page import EnginePage, WorkerWord
from ckpt_engine.gate.shelf import clear_shelves
from ckpt_engine.machines.events import EngineReady
from ckpt_engine.v1 import manager_pb2

LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
EVERYWHERE = frozenset({"", *EVERY_ADDRESS})
"""The addresses that an engine may listen at."""

PORTS_TAKEN = 5
"""How often an agent tries again, in total, because another program took the port that it had chosen."""


class Restart(StrEnum):
    """When to restart an engine that ended by itself."""

    NO = "no"
    ON_FAILURE = "on-failure"
    """Restart it if it was ready at least once, whatever its status: vLLM's server exits with 0 when its engine core
    was killed. An engine that was never ready most likely has wrong arguments, and a restart would hide its message."""
    ALWAYS = "always"
    """Restart it also if it was never ready: for hosts where that depends on others, such as a model on a disk not yet
    mounted."""


@dataclass(frozen=True)
class LaunchSettings:
    """How to launch an engine and keep it running."""

    kind: str
    arguments: tuple[str, ...] = ()  # to the engine, unchanged
    model: str = ""
    port: int = 0  # 0: a free one, chosen at each start
    restart: Restart = Restart.ON_FAILURE
    restart_limit: int = 0  # of restarts in a row without `engine_steady` seconds of service between; 0: no limit
    startup_seconds: float = 600.0  # from launch until it answers
    log_path: Path | None = None  # None: a file for each launch in the runtime directory's `logs`
    root: Path | None = None  # folder for the engine's directory; None: the default
    sleeps: bool = False  # launch it so that it can give memory up
    advertise: str = ""  # the host in the URL that other hosts get, if it listens beyond loopback
    stage_memory: str = ""  # of each worker, as in --stage-memory
    scrub_seconds: str = ""  # of each worker, as in --scrub-seconds
    adapters: Mapping[str, int] = field(default_factory=dict)  # and how many versions the engine keeps of each


class LaunchedEngine:
    """See `EngineHost`."""

    def __init__(
        self,
        settings: LaunchSettings,
        events: EngineEvents,
        answer: Answer,
        deadlines: Deadlines,
        on_output: LineSink | None = None,
        followers: Followers | None = None,
    ) -> None:
        """answer: of the worker channel. on_output: gets every line that the engine prints. followers: agents of the
        engine's other nodes, which this agent leads."""
        self._followers = followers
        self._deadlines = deadlines
        self._settings = settings
        self._events = events
        self._answer = answer
        self._on_output = on_output
        self._module = load_adapter(settings.kind)
        self._root = settings.root
        self._reserved: ReservedPort | None = None
        self._lost_ports = 0
        self._port = settings.port
        self._directory: EngineDirectory | None = None
        self._channel: AgentChannel | None = None
        self._process: EngineProcess | None = None
        self._replace_reason = ""
        self.agent_epoch = 0
        self.url = ""  # of the engine's API on loopback, once it was launched
        self.page: EnginePage | None = None
        self.adapter: EngineAdapter | None = None

    @property
    def default_name(self) -> str:
        return f"{self._settings.kind}-{self._port}"

    @property
    def directory(self) -> EngineDirectory | None:
        """The engine's runtime directory, while it is open."""
        return self._directory

    @property
    def pid(self) -> int | None:
        """The pid of the engine's first process; None unless it runs."""
        return self._process.pid if self._process is not None and self._process.running else None

    async def open(self) -> None:
        """Makes the directory and listens in it.

        Raises ValueError if the adapter refuses the launch arguments, EngineFailedError if it cannot drive the
        installed version, CkptEngineError if there is no room for the directory.
        """
        self._root = self._root or default_root()
        if not self._port:
            self._port = self._reserve_port()
        plan = self._plan(None if self._followers is None else self._followers.part(1))
        if refusal := await asyncio.to_thread(self._module.refused_command, plan.argv):
            raise EngineFailedError(refusal)
        if self._settings.adapters:
            load_shelf_module(self._settings.kind).refuse_adapters(plan.argv, self._settings.adapters)
        directory = EngineDirectory.create(self._root)
        self._directory = directory
        directory.lock()
        self.agent_epoch = directory.next_agent_epoch()
        self.page = EnginePage(directory.page)
        self._channel = AgentChannel(directory, self._answer)
        await self._channel.start()
        if self._followers is not None:
            await self._followers.open(self._settings.startup_seconds)

    async def run(self) -> None:
        """Keeps the engine running by the restart policy. See `EngineHost.run`."""
        backoff = self._deadlines.engine_restart_first
        restarts = in_a_row = 0
        worked = False
        while True:
            ready = False
            try:
                started = time.monotonic()
                engine = await self._start()
                ready = worked = True
                serving_since = time.monotonic()
                self._events.say(f"engine ready at {engine.engine.url} after {serving_since - started:.1f} s")
                self._events.engine_ready(engine)
                reason = await self._until_gone()
            except (EngineProcessError, EngineCallError, EngineFailedError, NodesMissingError) as error:
                await self._end_process()
                if self._port_was_taken():
                    await self._forget_engine()
                    continue
                if not worked and self._settings.restart is not Restart.ALWAYS:
                    raise EngineFailedError(str(error)) from error
                reason = str(error)
            await self._end_process()
            await self._forget_engine()
            if ready:
                self._events.engine_exited(reason)
                if time.monotonic() - serving_since > self._deadlines.engine_steady:
                    backoff = self._deadlines.engine_restart_first
                    in_a_row = 0
            if self._settings.restart is Restart.NO:
                raise EngineFailedError(reason)
            if self._settings.restart_limit and in_a_row >= self._settings.restart_limit:
                raise EngineFailedError(f"{reason}\n{in_a_row} restarts in a row did not help (--restart-limit)")
            restarts, in_a_row = restarts + 1, in_a_row + 1
            self._events.say(f"{reason}\nrestart {restarts} of the engine in {backoff:g} s")
            await asyncio.sleep(backoff)
            backoff = min(backoff * 2, self._deadlines.engine_restart_most)
            if self._settings.port == 0:
                self._port = self._reserve_port()

    async def close(self) -> None:
        """Ends all that the engine started (SIGTERM, a grace, SIGKILL), then deletes the directory."""
        async with AsyncExitStack() as closings:
            if self._reserved is not None:
                closings.callback(self._reserved.release)
            closings.push_async_callback(self._close_directory)
            if self._followers is not None:
                closings.push_async_callback(self._followers.close)
            closings.push_async_callback(self._forget_engine)
            await self._end_process()

    async def _close_directory(self) -> None:
        directory, self._directory = self._directory, None
        channel, self._channel = self._channel, None
        async with AsyncExitStack() as closings:
            if directory is not None:
                closings.callback(directory.remove)
            if self.page is not None:
                closings.callback(self._close_page, self.page)
            if channel is not None:
                await channel.close()

    def _close_page(self, page: EnginePage) -> None:
        self.page = None
        page.close()

    def replace(self, reason: str) -> bool:
        """Has it ended within `engine_watch` seconds; it is restarted as after any failure."""
        self._replace_reason = reason
        return True

    def _advertised(self, plan: LaunchPlan) -> str:
        """The host in the URL that other hosts get; empty if they could not reach the engine."""
        if self._settings.advertise and plan.listens_at in LOOPBACK:
            self._events.say(
                "the engine listens on this host only, so its URL stays one of this host: give it --host 0.0.0.0 "
                "(behind --) to have other hosts reach it"
            )
            return ""
        return self._settings.advertise

    def _reserve_port(self) -> int:
        if self._reserved is not None:
            self._reserved.release()
        assert self._root is not None
        self._reserved = ReservedPort(self._root)
        return self._reserved.number

    def _port_was_taken(self) -> bool:
        """Whether another program listens at the port of our engine, which has ended. Chooses another port then."""
        if self._settings.port or self._lost_ports >= PORTS_TAKEN or is_free(self._port):
            return False
        self._lost_ports += 1
        self._events.say(f"port {self._port} was taken by another program; the engine gets another one")
        self._port = self._reserve_port()
        return True

    async def look(self, seconds: float) -> None:
        """See `EngineHost`."""
        if self._followers is not None:
            await self._followers.look(seconds)

    def status(self, word: WorkerWord) -> manager_pb2.WorkerStatus:
        """See `EngineHost`."""
        return word.status() if self._followers is None else self._followers.status(word)

    def _plan(self, part: NodePart | None = None) -> LaunchPlan:
        """Plans the launch. part: of an engine that spans nodes."""
        settings = self._settings
        if part is None:
            plan = self._module.launch_plan(settings.arguments, self._port, settings.model)
        else:
            plan = node_plan_of(settings.kind)(settings.arguments, self._port, settings.model, part)
        if ENVIRONMENT in plan.env:
            raise ValueError(f"the adapter for {settings.kind} sets {ENVIRONMENT}, which is the agent's to set")
        if plan.listens_at not in LOOPBACK | EVERYWHERE:
            raise ValueError(
                f"--host {plan.listens_at}: the agent drives its engine over loopback, so the engine must listen at "
                "127.0.0.1 (this host only) or at 0.0.0.0 (other hosts too)"
            )
        return replace(plan, url=plan.url.rstrip("/"))

    async def _port_is_ours(self, plan: LaunchPlan) -> None:
        """Waits until the port is free, for as long as another engine may take to end (such as that of a killed agent).

        Raises EngineProcessError that names the program on the port: an engine would load for minutes and then fail.
        """
        port = urlsplit(plan.url).port or self._port
        host = {"": "127.0.0.1", "localhost": "127.0.0.1"}.get(plan.listens_at, plan.listens_at)
        until = time.monotonic() + (self._deadlines.engine_grace if self._settings.port else 0)
        last_line = ""
        while not is_free(port, host):
            line = f"port {port} is taken by {await asyncio.to_thread(owner_of, port)}"
            if time.monotonic() > until:
                raise EngineProcessError(f"{line}: end that, or name another one (--port; 0: a free one)")
            if line != last_line:
                self._events.say(f"{line}; waiting up to {self._deadlines.engine_grace:g} s for it")
                last_line = line
            await asyncio.sleep(0.2)

    async def _start(self) -> EngineReady:
        """Launches the engine, waits until it answers, and asks for its version and layout."""
        assert self._directory is not None
        page = self.page = new_page(self._directory, self.page)
        clear_shelves(self._directory.path)
        followers, part = self._followers, None
        if followers is not None:
            assert self._root is not None
            part = await followers.gather(page, self._root, self._settings.startup_seconds)
        plan = self._plan(part)
        self.url = plan.url
        await self._port_is_ours(plan)
        assert self._root is not None
        log = self._settings.log_path or new_log(self._root, self.default_name)
        process = engine_process(
            plan,
            self._settings.sleeps,
            self._directory,
            log,
            self._deadlines,
            self._on_output,
            self._settings.stage_memory,
            self._settings.scrub_seconds,
            self._settings.adapters,
        )
        self._process = process
        await process.start()
        self._events.say(f"engine launched: pid {process.pid}, {plan.url}, log {log}")
        adapter = connect(self._module, plan.url, self._directory)
        self.adapter = adapter
        path = self._directory.path

        async def ours_and_healthy(seconds: float) -> bool:
            if followers is not None and (trouble := followers.trouble()):
                raise EngineCallError(trouble, answered=True)
            # What answers may be another engine that has the port, while ours fails to get it.
            if not await adapter.healthy(seconds):
                return False
            try:
                return (await locate(plan.url, seconds)).directory == path
            except EngineCallError:
                return False

        def waiting(remaining: float) -> None:
            last = "".join(f"; it said last: {line.strip()[:200]}" for line in process.last_lines(1))
            self._events.say(f"waiting for the engine to answer, {remaining:.0f} s left (--startup-timeout){last}")

        await process.wait_healthy(ours_and_healthy, self._settings.startup_seconds, waiting)
        return await probe(adapter, plan.url, self._deadlines.engine_probe, self._advertised(plan))

    async def _until_gone(self) -> str:
        """Waits until the engine has ended and returns why. Ends a server that runs but does not work."""
        assert self._process is not None
        assert self.adapter is not None
        assert self.page is not None
        watch = EngineWatch(self.adapter, self.page, self._deadlines)
        self._replace_reason = ""
        end = asyncio.ensure_future(self._process.wait())
        try:
            while True:
                done, _ = await asyncio.wait((end,), timeout=self._deadlines.engine_watch)
                if done:
                    return self._process.describe_exit()
                elsewhere = "" if self._followers is None else self._followers.trouble()
                if reason := self._replace_reason or elsewhere or await watch.look():
                    if end.done():
                        continue
                    self._events.say(f"{reason}; ending it")
                    await self._process.kill()
                    return reason
        finally:
            end.cancel()

    async def _end_process(self) -> None:
        try:
            if self._process is not None:
                await self._process.stop()
        finally:
            if self._followers is not None:
                await self._followers.end()

    async def _forget_engine(self) -> None:
        if self.adapter is not None:
            adapter, self.adapter = self.adapter, None
            await adapter.close()
        self._process = None
