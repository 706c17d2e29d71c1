"""One session stream from a member to the manager, for its machine's commands `OpenStream`, `Send` and `ClosePeer`.

It opens, carries and ends. When to dial again, what to send first and what a lease is, the machine decides.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import Message

from ckpt_engine.channel import problem_of
from ckpt_engine.core.problems import unavailable
from ckpt_engine.machines.wire import pack, unpack
from ckpt_engine.shell.outbox import Outbox
from ckpt_engine.v1 import weights_pb2

QUEUE_LIMIT = 1000
"""Messages waiting to be written. A manager that reads nothing for so long counts as gone."""


class MemberStream:
    """A stream that begins at once, on the running loop.

    on_message, on_lost: called on the loop, and may not block. on_lost: at most once, and not after `close`.
    """

    def __init__(
        self,
        dial: Callable[[AsyncIterator[Any]], Any],
        envelope: type[Message],
        on_message: Callable[[Message], None],
        on_lost: Callable[[weights_pb2.Problem], None],
        goodbye_seconds: float,
    ) -> None:
        """dial: the stub's method, such as `stub.ReplicaSession`. envelope: the type of the messages that it takes.
        goodbye_seconds: for the manager to take queued messages, and to end the stream, after `close`."""
        self._goodbye_seconds = goodbye_seconds
        self._outbox: Outbox[Message] = Outbox("the manager", QUEUE_LIMIT)
        self._envelope = envelope
        self._on_message = on_message
        self._on_lost = on_lost
        self._closing = False
        self._call = dial(self._drain())
        self._reading = asyncio.create_task(self._read(), name="manager stream")

    def send(self, body: Message) -> None:
        """Queues a message; dropped if the stream is gone."""
        self._outbox.put(pack(self._envelope, body))
        if self._outbox.problem is not None:
            self._call.cancel()

    async def close(self) -> None:
        """Ends the stream after queued messages. Returns when that is done, or `goodbye_seconds` have passed."""
        self._closing = True
        self._outbox.close()
        try:
            await asyncio.wait((self._reading,), timeout=self._goodbye_seconds)
        finally:
            self._call.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)

    async def _read(self) -> None:
        problem = unavailable("the manager ended the session").problem
        try:
            async for command in self._call:
                body = unpack(command)
                if body is not None and not self._closing:
                    self._on_message(body)
        except grpc.RpcError as error:
            problem = problem_of(error)
        except asyncio.CancelledError:
            # grpc raises this also when the call was cancelled and not this task.
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            problem = self._outbox.problem or unavailable("the stream was cancelled").problem
        finally:
            self._call.cancel()
            self._outbox.close()  # ends the writer, which may wait for a message
        if not self._closing:
            self._on_lost(problem)

    async def _drain(self) -> AsyncIterator[Message]:
        while (message := await self._outbox.take()) is not None:
            yield message
