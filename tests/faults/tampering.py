"""A gRPC server between one member and the manager that can delay session messages and send them twice.

Real gRPC on both sides: it accepts the member's calls and makes the same ones to the manager, and the bytes of every
message stay as they are. Only messages of the session streams are tampered with; a stream keeps its order, so a
delay lets other calls (blobs, UpdateWeights) overtake the session, and repetitions come right behind each other and,
once more, after the next message.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio

from ckpt_engine.channel import channel_options
from ckpt_engine.grpc_loops import quiet_loop
from tests.faults.proxy import Loop

SESSIONS = ("TrainerSession", "ReplicaSession", "HolderSession")


class Tamperer:
    """delay: seconds that each session message waits, both ways. duplicate: whether each is sent three times in all."""

    def __init__(self, loop: Loop, manager: str) -> None:
        self.delay = 0.0
        self.duplicate = False
        self.tampered = 0
        self._loop = loop
        self._manager = manager
        self.port = loop.run(self._start())

    def close(self) -> None:
        self._loop.run(self._stop())

    async def _start(self) -> int:
        quiet_loop()
        self._channel = grpc.aio.insecure_channel(self._manager, options=channel_options())
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        self._server.add_generic_rpc_handlers((_Handler(self),))
        port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        return port

    async def _stop(self) -> None:
        await self._server.stop(0)
        await self._channel.close()

    async def forward(self, method: str, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        """One call, whatever its kind: as streams both ways."""
        is_session = method.rpartition("/")[2] in SESSIONS
        call = self._channel.stream_stream(method)(
            self._tampered(requests) if is_session else requests, metadata=context.invocation_metadata()
        )
        try:
            async for message in self._tampered(call) if is_session else call:
                yield message
        except grpc.aio.AioRpcError as error:
            context.set_trailing_metadata(tuple(error.trailing_metadata() or ()))
            await context.abort(error.code(), error.details() or "")
        finally:
            call.cancel()

    async def _tampered(self, messages: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """In their order; each leaves `delay` seconds after it came, however many wait."""
        waiting: asyncio.Queue[tuple[float, bytes] | BaseException | None] = asyncio.Queue()
        taking = asyncio.ensure_future(self._take(messages, waiting))
        clock = asyncio.get_running_loop().time
        before: bytes | None = None
        try:
            while (item := await waiting.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                due, message = item
                if due > clock():
                    self.tampered += 1
                    await asyncio.sleep(due - clock())
                yield message
                if self.duplicate:
                    self.tampered += 1
                    yield message
                    if before is not None:
                        yield before
                before = message
        finally:
            taking.cancel()

    async def _take(
        self, messages: AsyncIterator[bytes], waiting: asyncio.Queue[tuple[float, bytes] | BaseException | None]
    ) -> None:
        try:
            async for message in messages:
                waiting.put_nowait((asyncio.get_running_loop().time() + self.delay, message))
        except Exception as error:  # raised where the messages are used
            waiting.put_nowait(error)
        else:
            waiting.put_nowait(None)


class _Handler(grpc.GenericRpcHandler):  # type: ignore[misc]
    def __init__(self, tamperer: Tamperer) -> None:
        self._tamperer = tamperer

    def service(self, details: Any) -> Any:
        """Every method is carried as streams both ways; a unary call is a stream of one message on the wire."""
        method = details.method

        async def forward(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
            async for message in self._tamperer.forward(method, requests, context):
                yield message

        return grpc.stream_stream_rpc_method_handler(forward)
