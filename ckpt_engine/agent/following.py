"""The agent of a node that follows: its part of an engine that spans nodes, and the words and questions of its workers.

It decides nothing about updates and does not know the manager: it starts its part when the leader's agent says so, ends
it when the leader says so or is not heard, and carries what its workers ask to the leader and the answers back.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

from ckpt_engine.agent.channel import AgentChannel
from ckpt_engine.agent.link import FollowerLink
from ckpt_engine.agent.logs import new_log
from ckpt_engine.agent.nodes import NodeSettings
from ckpt_engine.agent.process import EngineProcess, EngineProcessError, LineSink, torchrun_variables
from ckpt_engine.core.deadlines import Deadlines
from ckpt_engine.engine.node_plan import Place, node_plan_of
from ckpt_engine.v1 import worker_pb2
from ckpt_engine.words.directory import ENVIRONMENT, EngineDirectory, default_root
from ckpt_engine.words.state import EnginePage

_Key = tuple[int, bytes, int]


class FollowingAgent:
    """One node's agent, for one life of this process.

    arguments, model: of the engine, as node 0 has them. say: gets one plain line an event, on the loop. on_output: gets
    the engine's output lines, on another thread. root: below it the engine's directory is made; none: the default.
    sleeps: it is to give memory up.
    """

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
    ) -> None:
        """Raises ValueError, UnknownAdapterError: such an engine cannot be started."""
        self._nodes = nodes
        self._kind = kind
        self._arguments = arguments
        self._model = model
        self._transports = transports
        self._deadlines = deadlines
        self._say = say
        self._on_output = on_output
        self._root = root
        self._sleeps = sleeps
        self._plan_of = node_plan_of(kind)
        self._plan_of(arguments, 0, model, Place(nodes.nodes, nodes.rank, nodes.host, 1))
        self._session = os.urandom(16)
        self._sequence = 0
        self._command = worker_pb2.NodeCommand()
        self._heard_at = -float("inf")
        self._refused = ""
        self._link: FollowerLink | None = None
        self._directory: EngineDirectory | None = None
        self._page: EnginePage | None = None
        self._process: EngineProcess | None = None
        self._leader = b""
        self._generation = 0
        self._reason = ""
        self._looked = 0
        self._changed = asyncio.Event()
        self._questions: dict[_Key, asyncio.Future[worker_pb2.AgentReply]] = {}

    async def run(self, stop: asyncio.Event) -> None:
        """Until `stop` is set; ends its part of the engine in every case. Raises CkptEngineError: it cannot begin."""
        root = self._root = self._root or default_root()
        directory = self._directory = EngineDirectory.create(root)
        directory.lock()
        channel = AgentChannel(directory, self._relay)
        tasks: list[asyncio.Task[None]] = []
        try:
            await channel.start()
            self._link = FollowerLink(self._nodes.endpoint, self._nodes.keys(), self._heard)
            self._link.open()
            self._say(f"node {self._nodes.rank} of {self._nodes.nodes}, leader {self._nodes.leader}")
            tasks = [
                asyncio.create_task(self._beat(), name="beat"),
                asyncio.create_task(self._keep(), name="engine"),
                asyncio.create_task(_until_set(stop), name="stop"),
            ]
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._end("the agent was asked to stop")
            self._tell()
            await asyncio.sleep(0)  # the last message leaves on the loop's next turn
            await channel.close()
            if self._link is not None:
                self._link.close()
            if self._page is not None:
                self._page.close()
            directory.remove()

    # -- the engine's part

    async def _keep(self) -> None:
        """Brings what runs here to what the leader wants, for ever."""
        while True:
            if self._process is not None and (reason := await self._over()):
                await self._end(reason)
            elif self._process is None and self._wanted():
                await self._start()
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), self._deadlines.engine_watch)
            except TimeoutError:
                continue

    def _wanted(self) -> bool:
        """Whether the leader wants a part that has not been started yet."""
        command = self._command
        begun = command.session_id == self._leader and command.generation == self._generation
        return self._leads() and command.run and not begun

    async def _over(self) -> str:
        """Why the part that runs has to end; empty: it has not."""
        command = self._command
        if self._process is not None and not self._process.running:
            await self._process.wait()
            return self._process.describe_exit()
        if not self._leads():
            return f"the leader was not heard for {self._deadlines.lease:g} s"
        if command.session_id != self._leader:
            return "the leader was started anew"
        if not command.run or command.generation != self._generation:
            return "the leader ends the engine"
        dead = [word for word in self._page.read() if word.boot_id and not word.alive] if self._page else []
        return f"worker {dead[0].rank} of the engine (pid {dead[0].pid}) is dead" if dead else ""

    async def _start(self) -> None:
        command, directory = self._command, self._directory
        assert directory is not None
        self._leader, self._generation, self._reason = command.session_id, command.generation, ""
        if self._page is not None:
            self._page.close()
        directory.page.unlink(missing_ok=True)
        self._page = EnginePage(directory.page)
        place = Place(self._nodes.nodes, self._nodes.rank, command.master_address, command.master_port)
        plan = self._plan_of(self._arguments, 0, self._model, place)
        assert self._root is not None
        name = f"{self._kind}-node-{self._nodes.rank}-{socket.gethostname()}-{os.getpid()}"
        log = new_log(self._root, name)
        process = EngineProcess(
            plan.command(self._sleeps),
            {**plan.env, ENVIRONMENT: str(directory.path)},
            log,
            on_line=self._on_output,
            grace_seconds=self._deadlines.engine_grace,
            start_seconds=self._deadlines.engine_start,
            without=torchrun_variables(os.environ),
        )
        try:
            await process.start()
        except EngineProcessError as error:
            self._reason = str(error)
            self._say(self._reason)
        else:
            self._process = process
            self._say(f"part {self._nodes.rank} of the engine launched: pid {process.pid}, log {log}")
        self._tell()

    async def _end(self, reason: str) -> None:
        """Ends what runs, if anything does, and tells."""
        if self._process is None:
            return
        self._reason = reason
        self._say(f"{reason}; this part of the engine is ended")
        await self._process.stop()
        self._process = None
        self._tell()

    # -- the leader

    def _leads(self) -> bool:
        """Whether there is a leader that has been heard lately."""
        return bool(self._command.session_id) and time.monotonic() - self._heard_at <= self._deadlines.lease

    def _heard(self, command: worker_pb2.NodeCommand) -> None:
        if command.HasField("refused"):
            if command.refused.message != self._refused:
                self._refused = command.refused.message
                self._say(f"refused by the leader: {self._refused}")
            return
        self._refused = ""
        if not self._leads():
            self._say(f"joined the leader at {self._nodes.leader}")
        self._heard_at = time.monotonic()
        if command.HasField("reply"):
            future = self._questions.get((command.rank, command.boot_id, command.reply.sequence))
            if future is not None and not future.done() and self._obeys(command):
                future.set_result(command.reply)
        wanted = self._command.session_id, self._command.generation, self._command.run
        self._command = command
        if wanted != (command.session_id, command.generation, command.run):
            self._changed.set()
        if self._obeys(command) and command.look > self._looked:
            self._looked = command.look
            self._tell()

    def _obeys(self, command: worker_pb2.NodeCommand) -> bool:
        """Whether it is about the part that runs here."""
        return (
            self._process is not None
            and command.session_id == self._leader
            and command.generation == self._generation
            and command.run
        )

    async def _beat(self) -> None:
        """Tells at each heartbeat, and soon after a word has changed."""
        told = b""
        beaten = 0.0
        while True:
            now = time.monotonic()
            raw = self._page.raw() if self._page is not None else b""
            if raw != told or now - beaten >= self._deadlines.heartbeat:
                told, beaten = raw, now
                self._tell()
            await asyncio.sleep(min(self._deadlines.words, self._deadlines.heartbeat))

    def _tell(self, request: worker_pb2.WorkerRequest | None = None) -> None:
        if self._link is None:
            return
        self._sequence += 1
        words = self._page.read() if self._page is not None and self._process is not None else []
        message = worker_pb2.NodeMessage(
            session_id=self._session,
            sequence=self._sequence,
            node_rank=self._nodes.rank,
            nodes=self._nodes.nodes,
            kind=self._kind,
            transports=self._transports,
            leader_session=self._leader,
            generation=self._generation,
            running=self._process is not None,
            reason=self._reason,
            workers=[word.status() for word in words if word.boot_id],
            looked=self._looked,
            request=request,
        )
        self._link.send(message)

    async def _relay(self, request: worker_pb2.WorkerRequest) -> worker_pb2.AgentReply | None:
        """One worker's question, asked again until the leader answers. None: the worker shall ask again itself."""
        key = (request.rank, request.boot_id, request.sequence)
        answer: asyncio.Future[worker_pb2.AgentReply] = asyncio.get_running_loop().create_future()
        self._questions[key] = answer
        end = time.monotonic() + self._deadlines.worker_reply
        try:
            while (left := end - time.monotonic()) > 0:
                self._tell(request)
                done, _ = await asyncio.wait((answer,), timeout=min(left, self._deadlines.worker_attempt))
                if done:
                    return answer.result()
            return None
        finally:
            self._questions.pop(key, None)


async def _until_set(stop: asyncio.Event) -> None:
    await stop.wait()
