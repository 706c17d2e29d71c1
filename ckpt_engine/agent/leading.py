"""The leading agent's side of an engine on several nodes: the shell around LeaderMachine.

The machine decides. This module has the connection to the followers, the far workers' slots in the gate's page, and the
port at which the engine's parts meet. Used on the agent's loop.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from ckpt_engine.agent.channel import Answer
from ckpt_engine.agent.link import LeaderLink
from ckpt_engine.agent.nodes import NodeSettings
from ckpt_engine.agent.ports import ReservedPort
from ckpt_engine.core.deadlines import Deadlines
from ckpt_engine.core.problems import CkptEngineError, aborted
from ckpt_engine.engine.node_plan import NodePart
from ckpt_engine.gate.page import CLEAN, DIRTY, MAX_WORKERS, EnginePage, WorkerSlot, WorkerWord
from ckpt_engine.machines.events import Peer, Reply, Send, Start, WorkerAsked
from ckpt_engine.machines.nodes import events
from ckpt_engine.machines.nodes.leader import LeaderMachine
from ckpt_engine.shell.loop import Loop
from ckpt_engine.v1 import manager_pb2, weights_pb2, worker_pb2

logger = logging.getLogger(__name__)

_LOOK_AGAIN_SECONDS, _SAY_AGAIN_SECONDS = 0.5, 10.0
"""Seconds between two looks at what the leader's name means, and between two lines that say so."""

_CLOSED = "this agent ends, and asks its engine's other nodes nothing more"


class NodesMissingError(Exception):
    """Some nodes have no agent that is ready; the message says which, and where their agents should dial."""


class FarSlots:
    """Slots of far workers in the page of one start of the engine."""

    def __init__(self, page: EnginePage) -> None:
        self._page = page
        self._slots: dict[int, WorkerSlot] = {}

    def boot_ids(self) -> tuple[bytes, ...]:
        """The boot ids in the page, by rank, as FollowerMessage carries them."""
        words = self._page.read()
        return tuple(word.boot_id for word in words) if words else (b"",) * MAX_WORKERS

    def show(self, word: events.ShowWord) -> None:
        """Writes a far worker's word into its slot."""
        slot = self._slots.get(word.rank)
        if slot is None or slot.boot_id != word.boot_id:
            slot = self._slots[word.rank] = WorkerSlot(self._page, word.rank, word.boot_id)
        if not word.alive:
            slot.dead()
        elif word.state == CLEAN and word.identity is not None:
            slot.clean(word.epoch, word.identity)
        elif word.state == DIRTY:
            slot.dirty(word.epoch)
        else:
            slot.none()


class Followers:
    """The agents of an engine's other nodes, from `open` to `close`.

    Its methods raise INTERNAL once its machine has failed, and ABORTED after `close`.
    """

    def __init__(
        self,
        settings: NodeSettings,
        kind: str,
        transports: Sequence[str],
        answer: Answer,
        say: Callable[[str], None],
        deadlines: Deadlines,
    ) -> None:
        """answer: of the worker channel, also for far workers. say: prints a line for people."""
        self._settings = settings
        self._answer = answer
        self._say = say
        self._machine = LeaderMachine(
            os.urandom(16), settings.nodes, settings.leader, settings.host, kind, transports, deadlines
        )
        self._loop = Loop("leading agent", self._machine, self._perform, None, self._failed)
        self._link: LeaderLink | None = None
        self._root: Path | None = None
        self._slots: FarSlots | None = None
        self._port: ReservedPort | None = None
        self._looks = 0
        self._waiting: dict[object, list[asyncio.Future[None]]] = {}
        self._closed = False

    async def open(self, seconds: float) -> None:
        """Starts to listen. Raises CkptEngineError: the address or the token cannot be used.

        seconds: for the leader's name to mean an address of this host. That of a pod that has just started may be
        unknown yet, or still mean the pod before it.
        """
        keys = self._settings.keys()
        until, said_at = time.monotonic() + seconds, 0.0
        while True:
            try:
                endpoints = await asyncio.to_thread(self._settings.listening_endpoints)
                break
            except CkptEngineError as error:
                now = time.monotonic()
                if now >= until:
                    raise
                if now >= said_at:
                    said_at = now + _SAY_AGAIN_SECONDS
                    words = f"{error.problem.message}; {until - now:.0f} s left (--startup-timeout)"
                    self._say(f"waiting for the leader's name: {words}")
            await asyncio.sleep(_LOOK_AGAIN_SECONDS)
        self._link = LeaderLink(endpoints, keys, self._receive)
        self._link.open()
        self._loop.feed(Start())

    async def gather(self, page: EnginePage, root: Path, seconds: float) -> NodePart:
        """Waits until all followers are connected and their parts of an earlier start have ended; begins a generation.

        page: new, of this start. Raises NodesMissingError after `seconds`, CkptEngineError if no port is free.
        """
        self._root, self._slots = root, FarSlots(page)
        await self._answered(events.AllHere, events.GatherNodes(seconds))
        assert self._port is not None
        return self.part(self._port.number)

    def part(self, port: int) -> NodePart:
        """This node's part of the engine."""
        return NodePart(self._settings.nodes, 0, self._settings.host, port)

    def trouble(self) -> str:
        """Why the engine cannot go on because of another node; empty if it can."""
        self._check()
        return self._machine.trouble(time.monotonic())

    async def look(self, seconds: float) -> None:
        """Updates far workers' words in the page; a follower that does not answer within `seconds` counts as lost."""
        self._looks += 1
        await self._answered(self._looks, events.Look(self._looks, seconds))

    def status(self, word: WorkerWord) -> manager_pb2.WorkerStatus:
        """A word of the page as a message for the manager, with the node and process of the worker."""
        return self._machine.placed(word.status())

    async def end(self) -> None:
        """Has all followers end their parts, and waits a while for that. Their words do not count any more."""
        if self._link is not None and self._loop.problem is None:
            await self._answered(events.PartsEnded, events.EndParts())

    async def close(self) -> None:
        """Ends the parts; callers that still wait for an answer get an error. Safe to call twice."""
        async with AsyncExitStack() as closings:
            closings.callback(self._release_port)
            closings.push_async_callback(self._loop.stop, 0.0)
            closings.callback(self._shut)
            await self.end()

    def _release_port(self) -> None:
        if self._port is not None:
            self._port.release()

    def _shut(self) -> None:
        self._closed = True
        for key in tuple(self._waiting):
            self._end_wait(key, aborted(_CLOSED))
        link, self._link = self._link, None
        if link is not None:
            link.close()

    # -- events for the machine

    def _receive(self, sender: bytes, message: worker_pb2.NodeMessage) -> None:
        boot_ids = () if self._slots is None else self._slots.boot_ids()
        self._loop.feed(events.FollowerMessage(Peer(sender.hex()), message, boot_ids))

    async def _answered(self, key: object, event: object) -> None:
        """Feeds an event and waits for the machine's answer. Callers with the same key share one answer."""
        self._check()
        waiting = self._waiting.setdefault(key, [])
        in_flight = any(not other.done() for other in waiting)
        answer = asyncio.get_running_loop().create_future()
        waiting.append(answer)
        if not in_flight:
            self._loop.feed(event)
        await answer

    async def _ask(self, number: int, request: worker_pb2.WorkerRequest) -> None:
        reply = None
        try:
            reply = await self._answer(request)
        except Exception:  # the worker asks again, or not at all
            logger.exception("a request of worker %d on another node failed", request.rank)
        self._loop.feed(Reply(number, reply))

    def _check(self) -> None:
        if self._loop.problem is not None:
            raise CkptEngineError(self._loop.problem)
        if self._closed:
            raise aborted(_CLOSED)

    def _failed(self, _event: object, problem: weights_pb2.Problem) -> None:
        for key in tuple(self._waiting):
            self._end_wait(key, CkptEngineError(problem))

    # -- the machine's commands

    def _perform(self, command: events.LeaderCommand) -> None:
        match command:
            case Send(peer, worker_pb2.NodeCommand() as body):
                if self._link is not None:
                    self._link.send(bytes.fromhex(peer), body)
            case events.ShowWord():
                assert self._slots is not None
                self._slots.show(command)
            case WorkerAsked(number, request):
                self._loop.start(self._ask(number, request))
            case events.SayLine(line):
                self._say(line)
            case events.AllHere():
                self._begin()
            case events.NodesMissing(reason):
                self._end_wait(events.AllHere, NodesMissingError(reason))
            case events.Looked(number):
                self._end_wait(number)
            case events.PartsEnded():
                self._end_wait(events.PartsEnded)

    def _begin(self) -> None:
        assert self._root is not None
        if all(waiting.done() for waiting in self._waiting.get(events.AllHere, ())):
            return  # the agent is stopping
        self._release_port()
        try:
            self._port = ReservedPort(self._root)
        except CkptEngineError as error:
            self._end_wait(events.AllHere, error)
        else:
            self._loop.feed(events.Begin(self._port.number))
            self._end_wait(events.AllHere)

    def _end_wait(self, key: object, error: Exception | None = None) -> None:
        for answer in self._waiting.pop(key, ()):
            if answer.done():
                continue
            if error is None:
                answer.set_result(None)
            else:
                answer.set_exception(error)
