"""The agent's end of the worker channel: requests of the engine's workers in, the agent machine's answers out.

It is one ROUTER socket in the engine's directory, which only this user can enter. A request is one frame with a
WorkerRequest, an answer one frame with an AgentReply; an empty frame before it (as REQ sockets send) is returned.

Workers repeat a request when no answer comes in time, and its effect must not be repeated. So the last request of each
worker is kept with its answer. A request with the same boot id and sequence gets that answer again, or the one answer
that is still being worked out. Requests of one worker are handled one after the other.

A frame that cannot be parsed is counted and ignored: nothing that arrives here may stop the agent.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import zmq
import zmq.asyncio
from google.protobuf.message import DecodeError

from ckpt_engine.gate.directory import EngineDirectory
from ckpt_engine.v1 import worker_pb2

FRAME_LIMIT_BYTES = 256 << 20
"""ZeroMQ cuts the connection of a peer that announces more. The needs of 50,000 tensors take a few MiB."""
BOOT_ID_BYTES = 16
HIGH_WATER_MARK = 64
"""Most answers that wait for a worker that does not read them. Further ones are dropped, and the worker asks again."""

logger = logging.getLogger(__name__)

Answer = Callable[[worker_pb2.WorkerRequest], Awaitable[worker_pb2.AgentReply | None]]
"""Answers one request; None: no answer (the worker will ask again). Must have its own deadline."""


@dataclass
class ChannelCounters:
    """Counts of what has arrived since the start."""

    requests: int = 0
    repeated: int = 0
    ignored: int = 0  # frames that cannot be parsed, and requests overtaken by later ones
    failed: int = 0


@dataclass
class _Conversation:
    """The last request of one worker process, and its answer."""

    sequence: int = -1
    answer: bytes | None = None
    envelope: list[bytes] = field(default_factory=list)  # where the answer goes, by the latest copy of the request
    working: asyncio.Task[None] | None = None


class AgentChannel:
    """Listens at `directory.endpoint` from `start` to `close`. Everything runs on the loop that called `start`.

    answer: called once for every distinct request; its exceptions are logged, and the request stays unanswered.
    """

    def __init__(
        self, directory: EngineDirectory, answer: Answer, *, frame_limit_bytes: int = FRAME_LIMIT_BYTES
    ) -> None:
        self._directory = directory
        self._answer = answer
        self._frame_limit = frame_limit_bytes
        self._context: zmq.asyncio.Context | None = None
        self._socket: zmq.asyncio.Socket | None = None
        self._receiving: asyncio.Task[None] | None = None
        self._conversations: dict[tuple[int, bytes], _Conversation] = {}
        self.counters = ChannelCounters()

    async def start(self) -> None:
        """Binds the socket; the caller holds the directory's lock. Raises zmq.ZMQError."""
        self._context = zmq.asyncio.Context()
        socket = self._context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, self._frame_limit)
        socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
        self._socket = socket
        try:
            socket.bind(self._directory.endpoint)
        except zmq.ZMQError:
            await self.close()
            raise
        self._receiving = asyncio.create_task(self._receive(socket), name="worker channel")

    async def close(self) -> None:
        """Stops answering; requests under way are cancelled. Safe to call twice."""
        tasks = [talk.working for talk in self._conversations.values() if talk.working is not None]
        if self._receiving is not None:
            tasks.append(self._receiving)
            self._receiving = None
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._conversations.clear()
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._context is not None:
            self._context.term()
            self._context = None
            self._directory.socket.unlink(missing_ok=True)

    async def _receive(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            frames: list[bytes] = await socket.recv_multipart()
            self._dispatch(frames)

    def _dispatch(self, frames: list[bytes]) -> None:
        # ROUTER puts the peer's routing id first; a REQ socket puts an empty frame between that and the body.
        if len(frames) not in (2, 3) or (len(frames) == 3 and frames[1]):
            self.counters.ignored += 1
            return
        *envelope, body = frames
        try:
            request = worker_pb2.WorkerRequest.FromString(body)
        except DecodeError:
            self.counters.ignored += 1
            return
        if request.WhichOneof("body") is None or len(request.boot_id) != BOOT_ID_BYTES:
            self.counters.ignored += 1
            return
        talk = self._conversation(request)
        if request.sequence < talk.sequence:
            self.counters.ignored += 1  # a delayed copy; the worker has sent a later request
            return
        talk.envelope = envelope
        if request.sequence == talk.sequence and (talk.answer is not None or talk.working is not None):
            self.counters.repeated += 1
            if talk.answer is not None:
                self._send(envelope, talk.answer)
            return
        self.counters.requests += 1
        before = talk.working
        talk.sequence, talk.answer = request.sequence, None
        talk.working = asyncio.create_task(self._work(talk, request, before))

    def _conversation(self, request: worker_pb2.WorkerRequest) -> _Conversation:
        """The conversation with this worker process. Forgets that of an earlier process of the same rank, which is
        dead."""
        key = (request.rank, request.boot_id)
        if key not in self._conversations:
            for old in [other for other in self._conversations if other[0] == request.rank]:
                working = self._conversations.pop(old).working
                if working is not None:
                    working.cancel()
            self._conversations[key] = _Conversation()
        return self._conversations[key]

    async def _work(
        self, talk: _Conversation, request: worker_pb2.WorkerRequest, before: asyncio.Task[None] | None
    ) -> None:
        if before is not None and not before.done():
            await asyncio.wait((before,))
        try:
            reply = await self._answer(request)
        except Exception:
            self.counters.failed += 1
            logger.exception("a request of worker %d could not be answered", request.rank)
            reply = None
        if talk.sequence != request.sequence:
            return  # the worker has sent another request meanwhile and does not wait for this answer
        talk.working = None
        if reply is not None:
            reply.sequence = request.sequence
            talk.answer = reply.SerializeToString()
            self._send(talk.envelope, talk.answer)

    def _send(self, envelope: list[bytes], answer: bytes) -> None:
        """Sends without waiting: a worker that has died or does not read asks again, or not at all."""
        if self._socket is not None:
            sending = asyncio.ensure_future(self._socket.send_multipart([*envelope, answer], flags=zmq.NOBLOCK))
            sending.add_done_callback(_note_failure)


def _note_failure(sending: asyncio.Future[Any]) -> None:
    if not sending.cancelled() and (error := sending.exception()) is not None:
        logger.info("an answer to a worker was dropped: %s", error)
