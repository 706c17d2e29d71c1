"""The agent of a following node: the shell around FollowerMachine.

The machine decides. This module has the connection to the leader, this node's part of the engine, and its workers'
channel and page.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from ckpt_engine.agent.channel import AgentChannel
from ckpt_engine.agent.link import FollowerLink
from ckpt_engine.agent.logs import new_log
from ckpt_engine.agent.nodes import NodeSettings
from ckpt_engine.agent.process import EngineProcess, EngineProcessError, LineSink
from ckpt_engine.agent.questions import Questions
from ckpt_engine.agent.starting import engine_process, new_page
from ckpt_engine.core.deadlines import Deadlines
from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.engine.node_plan import NodePart, node_plan_of
from ckpt_engine.gate.directory import EngineDirectory, default_root
from ckpt_engine.gate.page import EnginePage
from ckpt_engine.machines.events import Message, Reply, Send, Start, Stop
from ckpt_engine.machines.nodes import events
from ckpt_engine.machines.nodes.follower import FollowerMachine
from ckpt_engine.shell.loop import Loop
from ckpt_engine.v1 import weights_pb2, worker_pb2


class FollowingAgent:
    """One node's agent, for the lifetime of this process."""

    def __init__(
        self,
        nodes: NodeSettings,
        kind: str,
        arguments: tuple[str, ...],
        model: str,
        transports: tuple[str, ...],
        deadlines: Deadlines,
        say: Callable[[str], None],
        on_output: LineSink | None = None,
        root: Path | None = None,
        sleeps: bool = False,
        stage_memory: str = "",
        scrub_seconds: str = "",
    ) -> None:
        """arguments, model: of the engine, as on node 0. say: gets a plain line for each event, on the loop. on_output:
        gets the engine's output lines, on another thread. root: folder for the engine's directory; None: the default.
        sleeps: the engine is launched so that it can give memory up. stage_memory, scrub_seconds: of each
        worker, as in --stage-memory and --scrub-seconds.

        Raises ValueError, UnknownAdapterError: such an engine cannot be started.
        """
        self._nodes = nodes
        self._kind = kind
        self._arguments = arguments
        self._model = model
        self._deadlines = deadlines
        self._say = say
        self._on_output = on_output
        self._root = root
        self._sleeps = sleeps
        self._by_environment = stage_memory, scrub_seconds
        self._plan_of = node_plan_of(kind)
        self._plan_of(arguments, 0, model, NodePart(nodes.nodes, nodes.rank, nodes.host, 1))
        self._machine = FollowerMachine(
            os.urandom(16), nodes.rank, nodes.nodes, nodes.leader, kind, transports, deadlines
        )
        self._loop = Loop("following agent", self._machine, self._perform, None, self._failed)
        self._link: FollowerLink | None = None
        self._directory: EngineDirectory | None = None
        self._page: EnginePage | None = None
        self._process: EngineProcess | None = None
        self._watched = False  # whether the machine expects the process and its workers to live
        self._work: asyncio.Task[None] | None = None
        self._fault: asyncio.Future[None] | None = None
        self._questions = Questions(self._loop.feed)

    async def run(self, stop: asyncio.Event) -> None:
        """Runs until `stop` is set; always ends its part of the engine. Raises CkptEngineError: it cannot start, or its
        machine has failed."""
        root = self._root = self._root or default_root()
        directory = self._directory = EngineDirectory.create(root)
        directory.lock()
        channel = AgentChannel(directory, self._answer_worker)
        self._fault = asyncio.get_running_loop().create_future()
        tasks: list[asyncio.Future[Any]] = [self._fault]
        try:
            await channel.start()
            self._link = FollowerLink(self._nodes.endpoint, self._nodes.keys(), self._receive, self._deadlines.lease)
            self._link.open()
            self._say(f"node {self._nodes.rank} of {self._nodes.nodes}, leader {self._nodes.leader}")
            self._loop.feed(Start())
            tasks += [asyncio.ensure_future(self._watch()), asyncio.ensure_future(stop.wait())]
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._close(directory, channel)

    async def _close(self, directory: EngineDirectory, channel: AgentChannel) -> None:
        """Closes everything, also if one closing raises."""
        async with AsyncExitStack() as closings:
            closings.callback(directory.remove)
            closings.callback(self._let_go)
            closings.push_async_callback(channel.close)
            closings.push_async_callback(self._end_all)

    def _let_go(self) -> None:
        try:
            if self._link is not None:
                self._link.close()
        finally:
            if self._page is not None:
                self._page.close()

    async def _end_all(self) -> None:
        self._loop.feed(Stop("the agent was asked to stop"))
        while self._work is not None:  # a start in progress is followed by an end
            await self._work
        try:
            if self._process is not None:  # the machine has failed, or a start or an end has
                await self._process.stop()
        finally:
            await asyncio.sleep(0)  # the last message is sent on the loop's next turn
            await self._loop.stop(0.0)

    # -- events for the machine

    def _receive(self, command: worker_pb2.NodeCommand) -> None:
        self._loop.feed(Message(events.LEADER, command))

    async def _watch(self) -> None:
        """Watches the part's process and page until cancelled."""
        before = b""
        deadlines = self._deadlines
        while True:
            page, raw = self._page, b"" if self._page is None else self._page.raw()
            if raw != before:
                before = raw
                self._loop.feed(events.WordsChanged())
            if self._watched and self._process is not None and page is not None:
                dead = [word for word in page.read() if word.boot_id and not word.alive]
                if not self._process.running:
                    await self._process.wait()
                    self._part_failed(self._process.describe_exit())
                elif dead:
                    self._part_failed(f"worker {dead[0].rank} of the engine (pid {dead[0].pid}) is dead")
            await asyncio.sleep(min(deadlines.words, deadlines.heartbeat, deadlines.engine_watch))

    def _part_failed(self, reason: str) -> None:
        self._watched = False
        self._loop.feed(events.PartFailed(reason))

    async def _answer_worker(self, request: worker_pb2.WorkerRequest) -> worker_pb2.AgentReply | None:
        if self._loop.problem is not None:
            return None
        return await self._questions.ask(request)

    def _failed(self, _event: object, problem: weights_pb2.Problem) -> None:
        """Ends `run`, and all workers' waits for answers."""
        self._questions.close()
        self._end(CkptEngineError(problem))

    def _end(self, error: Exception) -> None:
        if self._fault is not None and not self._fault.done():
            self._fault.set_exception(error)

    # -- the machine's commands

    def _perform(self, command: events.FollowerCommand) -> None:
        match command:
            case Send(_, worker_pb2.NodeMessage() as message):
                if message.running and self._page is not None:
                    message.workers.extend(word.status() for word in self._page.read() if word.boot_id)
                if self._link is not None:
                    self._link.send(message)
            case Reply(number, reply):
                self._questions.answer(number, reply)
            case events.StartPart(address, port):
                part = NodePart(self._nodes.nodes, self._nodes.rank, address, port)
                self._work = asyncio.create_task(self._start(part))
            case events.EndPart():
                self._work = asyncio.create_task(self._stop())
            case events.SayLine(line):
                self._say(line)

    async def _start(self, part: NodePart) -> None:
        """Starts this node's part, which takes as long as a launcher may. An unexpected error ends `run`."""
        problem = ""
        try:
            process, log = self._new_process(part)
            await process.start()
        except EngineProcessError as error:
            problem = str(error)
        except Exception as error:
            self._end(error)
            return
        else:
            self._process, self._watched = process, True
            self._say(f"part {self._nodes.rank} of the engine launched: pid {process.pid}, log {log}")
        finally:
            self._work = None
        self._loop.feed(events.PartStarted(problem))

    def _new_process(self, part: NodePart) -> tuple[EngineProcess, Path]:
        assert self._directory is not None
        assert self._root is not None
        self._page = new_page(self._directory, self._page)
        plan = self._plan_of(self._arguments, 0, self._model, part)
        log = new_log(self._root, f"{self._kind}-node-{self._nodes.rank}-{socket.gethostname()}-{os.getpid()}")
        own = self._directory, log, self._deadlines, self._on_output, *self._by_environment
        return engine_process(plan, self._sleeps, *own), log

    async def _stop(self) -> None:
        """Ends this node's part, which takes as long as the engine's grace. An unexpected error ends `run`, which tries
        once more."""
        self._watched = False
        try:
            if self._process is not None:
                await self._process.stop()
            self._process = None
        except Exception as error:
            self._end(error)
            return
        finally:
            self._work = None
        self._loop.feed(events.PartEnded())
