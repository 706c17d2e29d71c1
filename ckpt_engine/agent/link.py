"""The connection between the agents of one engine's nodes: ZeroMQ over TCP, both sides proven by CURVE keys.

It carries NodeMessage to the leader and NodeCommand back, and decides nothing. A message may be lost or arrive twice,
but never overtakes an earlier one of the same connection. One that cannot be parsed is ignored. Used on the agent's
loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

import zmq
import zmq.asyncio
from google.protobuf.message import DecodeError
from zmq.auth.asyncio import AsyncioAuthenticator

from ckpt_engine.agent.channel import FRAME_LIMIT_BYTES
from ckpt_engine.agent.nodes import Keys
from ckpt_engine.core.problems import precondition
from ckpt_engine.v1 import worker_pb2

HIGH_WATER_MARK = 1000
LAST_WORDS_MILLISECONDS = 500
"""Time for a follower's last message, that its part has ended; without it the leader would wait for a lease."""

logger = logging.getLogger(__name__)

OnNodeMessage = Callable[[bytes, worker_pb2.NodeMessage], None]
OnNodeCommand = Callable[[worker_pb2.NodeCommand], None]


class LeaderLink:
    """Listens from `open` to `close`. on_message: gets the sender (for `send`) and the message."""

    def __init__(self, endpoints: Sequence[str], keys: Keys | None, on_message: OnNodeMessage) -> None:
        self._endpoints = endpoints
        self._keys = keys
        self._on_message = on_message
        self._context: zmq.asyncio.Context | None = None
        self._socket: zmq.asyncio.Socket | None = None
        self._authenticator: AsyncioAuthenticator | None = None
        self._receiving: asyncio.Task[None] | None = None

    def open(self) -> None:
        """Starts to listen. Raises FAILED_PRECONDITION if the address cannot be used."""
        self._context = zmq.asyncio.Context()
        socket = _socket(self._context, zmq.ROUTER)
        self._socket = socket
        if self._keys is not None:
            self._authenticator = AsyncioAuthenticator(self._context)
            self._authenticator.start()
            self._authenticator.configure_curve_callback("*", _SingleKey(self._keys.follower_public))
            socket.curve_server = True
            socket.curve_secretkey = self._keys.leader_secret
            socket.curve_publickey = self._keys.leader_public
        for endpoint in self._endpoints:
            try:
                socket.bind(endpoint)
            except zmq.ZMQError as error:
                self.close()
                raise precondition(f"the agents of other nodes cannot be heard at {endpoint}: {error}") from error
        self._receiving = asyncio.create_task(self._receive(socket), name="node link")

    def send(self, receiver: bytes, command: worker_pb2.NodeCommand) -> None:
        """Queues a command without waiting. It is dropped if the receiver has disconnected or does not read."""
        _send(self._socket, [receiver, command.SerializeToString()])

    def close(self) -> None:
        """Stops listening. Safe to call twice."""
        if self._receiving is not None:
            self._receiving.cancel()
            self._receiving = None
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._authenticator is not None:
            self._authenticator.stop()
            self._authenticator = None
        if self._context is not None:
            self._context.term()
            self._context = None

    async def _receive(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            frames: list[bytes] = await socket.recv_multipart()
            if len(frames) != 2:
                continue
            try:
                message = worker_pb2.NodeMessage.FromString(frames[1])
            except DecodeError:
                continue
            try:
                self._on_message(frames[0], message)
            except Exception:  # nothing that arrives here may stop the agent
                logger.exception("a message of node %d could not be taken", message.node_rank)


class FollowerLink:
    """Keeps a connection to the leader from `open` to `close`; dials again as needed, where the leader's name leads
    then."""

    def __init__(self, endpoint: str, keys: Keys | None, on_message: OnNodeCommand, lease: float) -> None:
        """lease: seconds after which a connection counts as broken on which nothing comes: TCP alone would hold on for
        many minutes to a host that has gone, while the leader is at another address by now."""
        self._endpoint = endpoint
        self._lease = lease
        self._keys = keys
        self._on_message = on_message
        self._context: zmq.asyncio.Context | None = None
        self._socket: zmq.asyncio.Socket | None = None
        self._receiving: asyncio.Task[None] | None = None

    def open(self) -> None:
        """Starts to dial. The leader need not listen yet."""
        self._context = zmq.asyncio.Context()
        socket = _socket(self._context, zmq.DEALER)
        self._socket = socket
        socket.setsockopt(zmq.HEARTBEAT_IVL, max(1, int(self._lease * 250)))
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, max(1, int(self._lease * 1000)))
        if self._keys is not None:
            socket.curve_secretkey = self._keys.follower_secret
            socket.curve_publickey = self._keys.follower_public
            socket.curve_serverkey = self._keys.leader_public
        socket.connect(self._endpoint)
        self._receiving = asyncio.create_task(self._receive(socket), name="node link")

    def send(self, message: worker_pb2.NodeMessage) -> None:
        """Queues a message without waiting. It is dropped while the leader is not connected."""
        _send(self._socket, [message.SerializeToString()])

    def close(self) -> None:
        """Disconnects, after a moment for the last message. Safe to call twice."""
        if self._receiving is not None:
            self._receiving.cancel()
            self._receiving = None
        if self._socket is not None:
            self._socket.close(linger=LAST_WORDS_MILLISECONDS)
            self._socket = None
        if self._context is not None:
            self._context.term()
            self._context = None

    async def _receive(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            body: bytes = await socket.recv()
            try:
                command = worker_pb2.NodeCommand.FromString(body)
            except DecodeError:
                continue
            try:
                self._on_message(command)
            except Exception:
                logger.exception("a command of the leading node could not be taken")


class _SingleKey:
    """Accepts peers that prove to have one key."""

    def __init__(self, public: bytes) -> None:
        self._public = public

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self._public


def _socket(context: zmq.asyncio.Context, kind: int) -> zmq.asyncio.Socket:
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.IPV6, 1)
    socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.MAXMSGSIZE, FRAME_LIMIT_BYTES)
    socket.setsockopt(zmq.RECONNECT_IVL, 100)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
    # Messages that were queued for an absent leader would be stale: only living connections take messages.
    socket.setsockopt(zmq.IMMEDIATE, 1)
    return socket


def _send(socket: zmq.asyncio.Socket | None, frames: list[bytes]) -> None:
    if socket is not None:
        sending = asyncio.ensure_future(socket.send_multipart(frames, flags=zmq.NOBLOCK))
        sending.add_done_callback(_note_failure)


def _note_failure(sending: asyncio.Future[Any]) -> None:
    if not sending.cancelled() and (error := sending.exception()) is not None:
        logger.debug("a message to another node was dropped: %s", error)
