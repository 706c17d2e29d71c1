"""The agents of an engine's other nodes, as the leading agent sees them: who is there, when all parts start and end.

It decides when a start of the engine (a generation) begins, which followers belong to it, when it has to end because
of one of them, and what of their words stands in the gate's page (mirror.py). It launches nothing itself.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ckpt_engine.agent.channel import Answer
from ckpt_engine.agent.link import LeaderLink
from ckpt_engine.agent.mirror import Mirror, MirrorError
from ckpt_engine.agent.nodes import NodeSettings
from ckpt_engine.agent.ports import ReservedPort
from ckpt_engine.core.deadlines import Deadlines
from ckpt_engine.engine.node_plan import Place
from ckpt_engine.v1 import manager_pb2, weights_pb2, worker_pb2
from ckpt_engine.words.state import EnginePage, WorkerWord

logger = logging.getLogger(__name__)

Reply = asyncio.Task[worker_pb2.AgentReply | None]


class NodesMissingError(Exception):
    """Not all nodes have an agent that is ready; the message says which, and where it should dial."""


@dataclass
class _Node:
    """What was last heard from one node's agent. sender: where commands to it go."""

    session: bytes
    sender: bytes
    heard: float
    message: worker_pb2.NodeMessage
    looked: int = 0
    conversations: dict[tuple[int, bytes], tuple[int, Reply]] = field(default_factory=dict)


class Followers:
    """From `open` to `close`, on the agent's loop. answer: of the worker channel, also for far workers."""

    def __init__(
        self,
        settings: NodeSettings,
        kind: str,
        transports: Sequence[str],
        answer: Answer,
        say: Callable[[str], None],
        deadlines: Deadlines,
    ) -> None:
        self._settings = settings
        self._kind = kind
        self._transports = frozenset(transports)
        self._answer = answer
        self._say = say
        self._deadlines = deadlines
        self._session = os.urandom(16)
        self._link: LeaderLink | None = None
        self._beating: asyncio.Task[None] | None = None
        self._nodes: dict[int, _Node] = {}
        self._members: dict[int, bytes] = {}
        self._mirror: Mirror | None = None
        self._generation = 0
        self._run = False
        self._port: ReservedPort | None = None
        self._looks = 0
        self._wrong = ""
        self._changed = asyncio.Event()

    def open(self) -> None:
        """Listens. Raises CkptEngineError: the address or the token cannot be used."""
        self._link = LeaderLink(self._settings.listening_endpoint(), self._settings.keys(), self._heard)
        self._link.open()
        self._beating = asyncio.create_task(self._beat(), name="nodes")

    async def gather(self, page: EnginePage, root: Path, seconds: float) -> Place:
        """Waits until all followers are there and their parts of an earlier start are gone; begins a generation.

        page: new, of this start. Raises NodesMissingError after `seconds`, CkptEngineError if no port is free.
        """
        self._run = False
        self._tell_all()
        if not await self._until(lambda: not self._missing(), min(seconds, 3 * self._deadlines.heartbeat)):
            self._say(f"waiting: {self._missing()} (at {self._settings.leader})")
        if not await self._until(lambda: not self._missing(), seconds):
            raise NodesMissingError(
                f"{self._missing()} after {seconds:g} s: start its agent with --nodes {self._settings.nodes} "
                f"--node-rank R --leader {self._settings.leader}"
            )
        if self._port is not None:
            self._port.release()
        self._port = ReservedPort(root)
        self._members = {rank: node.session for rank, node in self._nodes.items()}
        self._mirror = Mirror(page)
        self._wrong = ""
        self._generation += 1
        self._run = True
        self._tell_all()
        return self.place(self._port.number)

    def place(self, port: int) -> Place:
        """Of this node."""
        return Place(self._settings.nodes, 0, self._settings.host, port)

    def trouble(self) -> str:
        """Why the engine cannot go on because of another node; empty if it can."""
        if self._wrong:
            return self._wrong
        for rank, session in self._members.items():
            node = self._nodes.get(rank)
            if node is None or node.session != session:
                return f"the agent of node {rank} was started anew"
            if not self._is_heard(node):
                return f"the agent of node {rank} was not heard for {self._deadlines.lease:g} s"
            if self._current(node.message) and not node.message.running and node.message.reason:
                return f"node {rank}: {node.message.reason}"
        return ""

    async def look(self, seconds: float) -> None:
        """Brings what the followers' pages say now into ours; who does not tell within `seconds` is lost."""
        if not self._run or self._mirror is None:
            return
        self._looks += 1
        number, generation = self._looks, self._generation
        self._tell_all()

        def late() -> list[int]:
            return [rank for rank in self._members if rank not in self._nodes or self._nodes[rank].looked < number]

        if not await self._until(lambda: not late() or generation != self._generation, seconds):
            for rank in late():
                self._mirror.lose(rank)

    def status(self, word: WorkerWord) -> manager_pb2.WorkerStatus:
        """A word of the page as the manager is told it."""
        return word.status() if self._mirror is None else self._mirror.status(word)

    async def end(self) -> None:
        """Has all followers end their parts, and waits a while for that; what they hold counts no more."""
        self._run = False
        self._members = {}
        if self._mirror is not None:
            for rank in self._nodes:
                self._mirror.lose(rank)
            self._mirror = None
        self._tell_all()
        gone = lambda: not any(node.message.running and self._is_heard(node) for node in self._nodes.values())  # noqa: E731
        await self._until(gone, 2 * self._deadlines.engine_grace)

    async def close(self) -> None:
        """Ends the parts. Safe to call twice."""
        if self._link is not None:
            await self.end()
            self._link.close()
            self._link = None
        if self._beating is not None:
            self._beating.cancel()
            await asyncio.gather(self._beating, return_exceptions=True)
            self._beating = None
        for node in self._nodes.values():
            for _, reply in node.conversations.values():
                reply.cancel()
        if self._port is not None:
            self._port.release()

    # -- what followers tell

    def _heard(self, sender: bytes, message: worker_pb2.NodeMessage) -> None:
        rank = message.node_rank
        if refused := self._refusal(message):
            problem = weights_pb2.Problem(code=weights_pb2.Problem.FAILED_PRECONDITION, message=refused)
            self._send(sender, worker_pb2.NodeCommand(session_id=self._session, refused=problem))
            return
        node = self._nodes.get(rank)
        if node is None or node.session != message.session_id:
            self._say(f"node {rank} has joined")
            if self._mirror is not None:
                self._mirror.lose(rank)  # the words of the agent before it are nobody's any more
            node = self._nodes[rank] = _Node(message.session_id, sender, 0.0, message)
        elif message.sequence <= node.message.sequence:
            return
        node.sender, node.heard, node.message = sender, time.monotonic(), message
        if self._current(message):
            self._take(rank, node, message)
        self._tell(node)
        self._changed.set()

    def _refusal(self, message: worker_pb2.NodeMessage) -> str:
        """Why this message is not taken; empty: it is."""
        rank, nodes = message.node_rank, self._settings.nodes
        if message.nodes != nodes or not 0 < rank < nodes:
            return f"node {rank} of {message.nodes} cannot follow: node 0 has --nodes {nodes}"
        if message.kind != self._kind:
            return f"node {rank} would start engine {message.kind!r}, node 0 starts {self._kind!r}"
        if lacking := sorted(self._transports - set(message.transports)):
            return (
                f"node {rank} cannot read over {', '.join(lacking)}, which node 0 can: run `ckpt-engine doctor` there, "
                "or start all nodes with the same --transport"
            )
        node = self._nodes.get(rank)
        if node is not None and node.session != message.session_id and self._is_heard(node):
            return f"node {rank} has an agent already: each node has its own --node-rank"
        return ""

    def _take(self, rank: int, node: _Node, message: worker_pb2.NodeMessage) -> None:
        assert self._mirror is not None
        request = message.request if message.HasField("request") else None
        if request is not None and request.HasField("installed"):
            self._mirror.settled(request.rank, request.boot_id, request.installed.fence.epoch)
        try:
            self._mirror.take(rank, message.workers)
        except MirrorError as error:
            self._wrong = str(error)
            self._mirror.lose(rank)
            return
        node.looked = max(node.looked, message.looked)
        if request is not None and self._mirror.has(rank, request.rank, request.boot_id):
            self._ask(node, request)

    def _ask(self, node: _Node, request: worker_pb2.WorkerRequest) -> None:
        """Answers a far worker's request once, however often it comes."""
        key = (request.rank, request.boot_id)
        sequence, reply = node.conversations.get(key, (-1, None))
        if request.sequence < sequence:
            return
        if request.sequence > sequence or reply is None:
            for old in [each for each in node.conversations if each[0] == request.rank]:
                del node.conversations[old]  # of this worker before, or of a process before it
            reply = asyncio.create_task(self._reply(request, self._generation))
            node.conversations[key] = (request.sequence, reply)
            reply.add_done_callback(lambda done: self._answered(node, request, done))
        elif reply.done():
            self._answered(node, request, reply)

    async def _reply(self, request: worker_pb2.WorkerRequest, generation: int) -> worker_pb2.AgentReply | None:
        reply = await self._answer(request)
        if reply is None or generation != self._generation or self._mirror is None:
            return None
        if reply.HasField("install"):
            # Before it leaves: from then on the far worker may write, and our gate must not learn it later.
            self._mirror.ordered(request.rank, request.boot_id, reply.install.fence.epoch)
        reply.sequence = request.sequence
        return reply

    def _answered(self, node: _Node, request: worker_pb2.WorkerRequest, done: Reply) -> None:
        if done.cancelled():
            return
        if (error := done.exception()) is not None:
            logger.error(
                "a request of worker %d on node %d failed", request.rank, node.message.node_rank, exc_info=error
            )
        elif (reply := done.result()) is not None:
            self._send(node.sender, self._command(node, rank=request.rank, boot_id=request.boot_id, reply=reply))

    # -- what they are told

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._deadlines.heartbeat)
            for rank, node in self._nodes.items():
                if self._mirror is not None and not self._is_heard(node):
                    self._mirror.lose(rank)
            self._tell_all()

    def _tell_all(self) -> None:
        for node in self._nodes.values():
            self._tell(node)

    def _tell(self, node: _Node) -> None:
        self._send(node.sender, self._command(node))

    def _command(
        self,
        node: _Node,
        rank: int = 0,
        boot_id: bytes = b"",
        reply: worker_pb2.AgentReply | None = None,
    ) -> worker_pb2.NodeCommand:
        """Our whole state. An agent that came later than this start of the engine has no part in it."""
        return worker_pb2.NodeCommand(
            session_id=self._session,
            generation=self._generation,
            run=self._run and self._members.get(node.message.node_rank) == node.session,
            master_address=self._settings.host,
            master_port=self._port.number if self._port is not None else 0,
            look=self._looks,
            rank=rank,
            boot_id=boot_id,
            reply=reply,
        )

    def _send(self, receiver: bytes, command: worker_pb2.NodeCommand) -> None:
        if self._link is not None:
            self._link.send(receiver, command)

    # -- small things

    def _current(self, message: worker_pb2.NodeMessage) -> bool:
        """Whether it is about the engine that runs now."""
        return (
            self._run
            and self._mirror is not None
            and message.leader_session == self._session
            and message.generation == self._generation
            and self._members.get(message.node_rank) == message.session_id
        )

    def _is_heard(self, node: _Node) -> bool:
        return time.monotonic() - node.heard <= self._deadlines.lease

    def _missing(self) -> str:
        """Which nodes are not ready for a new start; empty: all are."""
        absent = [
            rank
            for rank in range(1, self._settings.nodes)
            if rank not in self._nodes or not self._is_heard(self._nodes[rank])
        ]
        if absent:
            return f"no agent of node {', '.join(map(str, absent))} has joined"
        ending = [rank for rank, node in sorted(self._nodes.items()) if node.message.running]
        return f"node {', '.join(map(str, ending))} still has a part of the engine before" if ending else ""

    async def _until(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Whether it came true within `seconds`; looked at whenever something was heard, and at each heartbeat."""
        end = time.monotonic() + seconds
        while not condition():
            left = end - time.monotonic()
            if left <= 0:
                return False
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), min(left, self._deadlines.heartbeat))
            except TimeoutError:
                continue
        return True
