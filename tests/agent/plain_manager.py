"""A manager that does what a test tells it and nothing else: the raw protocol over a real gRPC server."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

import grpc.aio
import pytest
from google.protobuf.message import Message

from ckpt_engine.core.manifest import DIGEST_FORMAT
from ckpt_engine.machines.wire import pack, unpack
from ckpt_engine.v1 import manager_pb2, manager_pb2_grpc, weights_pb2

SECONDS = 60.0
CLUSTER = "cluster-of-a-test"
HELLOS = manager_pb2.ReplicaHello | manager_pb2.HolderHello
MessageT = TypeVar("MessageT", bound=Message)


class PlainManager(manager_pb2_grpc.CheckpointEngineMembersServicer):
    """Keeps every message of every session in `received`. `welcome`: greet each hello, as managers do."""

    def __init__(self, heartbeat: float = 0.2, welcome: bool = True) -> None:
        self.received: list[Message] = []
        self.sessions = 0
        self.blobs: dict[bytes, bytes] = {}
        self.blob_gets = 0
        self.port = 0
        self.refuse: weights_pb2.Problem | None = None
        self._welcome = welcome
        self._heartbeat = heartbeat
        self._outgoing: asyncio.Queue[Message | None] = asyncio.Queue()
        self._server: grpc.aio.Server | None = None
        self._changed = asyncio.Event()

    async def start(self) -> PlainManager:
        """Serves, at the port that it had before if it was stopped."""
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        manager_pb2_grpc.add_CheckpointEngineMembersServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        await self._server.start()
        return self

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(grace=None)
            self._server = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def send(self, body: Message) -> None:
        """To the latest session."""
        self._outgoing.put_nowait(body)

    def end_session(self) -> None:
        self._outgoing.put_nowait(None)

    def put(self, data: bytes) -> manager_pb2.BlobRef:
        digest = hashlib.sha256(data).digest()
        self.blobs[digest] = data
        return manager_pb2.BlobRef(digest=digest, size=len(data))

    def all(self, kind: type[MessageT]) -> list[MessageT]:
        return [body for body in self.received if isinstance(body, kind)]

    async def until(self, condition: Callable[[], bool], seconds: float = SECONDS) -> None:
        """Until a message has come that makes `condition` true."""
        async with asyncio.timeout(seconds):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def next(self, kind: type[MessageT], seconds: float = SECONDS) -> MessageT:
        """The next message of this kind; earlier ones do not count."""
        before = len(self.all(kind))
        await self.until(lambda: len(self.all(kind)) > before, seconds)
        return self.all(kind)[before]

    # ---------------------------------------------------------------- the service

    async def ReplicaSession(self, requests: Any, context: Any) -> AsyncIterator[Message]:  # noqa: N802 - gRPC's name
        async for command in self._session(requests, manager_pb2.ReplicaCommand):
            yield command

    async def HolderSession(self, requests: Any, context: Any) -> AsyncIterator[Message]:  # noqa: N802 - gRPC's name
        async for command in self._session(requests, manager_pb2.HolderCommand):
            yield command

    async def _session(self, requests: Any, envelope: type[Message]) -> AsyncIterator[Message]:
        self.sessions += 1
        outgoing: asyncio.Queue[Message | None] = asyncio.Queue()
        self._outgoing = outgoing
        reading = asyncio.ensure_future(self._read(requests, outgoing))
        try:
            while (body := await outgoing.get()) is not None:
                yield pack(envelope, body)
        finally:
            reading.cancel()

    async def _read(self, requests: Any, outgoing: asyncio.Queue[Message | None]) -> None:
        async for request in requests:
            body = unpack(request)
            assert body is not None
            self.received.append(body)
            if isinstance(body, HELLOS) and self.refuse is not None:
                outgoing.put_nowait(manager_pb2.Refused(problem=self.refuse))
                outgoing.put_nowait(None)
            elif isinstance(body, HELLOS) and self._welcome:
                fence = weights_pb2.Fence(cluster=CLUSTER)
                welcome = manager_pb2.Welcome(
                    digest_format=DIGEST_FORMAT, fence=fence, lease_seconds=10.0, heartbeat_seconds=self._heartbeat
                )
                outgoing.put_nowait(welcome)
            elif isinstance(body, manager_pb2.ReplicaHeartbeat | manager_pb2.Heartbeat):
                outgoing.put_nowait(manager_pb2.Heartbeat(sequence=body.sequence))
            self._changed.set()
        outgoing.put_nowait(None)

    async def HasBlob(self, request: manager_pb2.BlobRef, context: Any) -> manager_pb2.HasBlobResponse:  # noqa: N802 - gRPC's name
        return manager_pb2.HasBlobResponse(present=request.digest in self.blobs)

    async def PutBlob(self, chunks: Any, context: Any) -> manager_pb2.BlobRef:  # noqa: N802 - gRPC's name
        return self.put(b"".join([chunk.data async for chunk in chunks]))

    async def GetBlob(self, request: manager_pb2.BlobRef, context: Any) -> AsyncIterator[manager_pb2.BlobChunk]:  # noqa: N802 - gRPC's name
        self.blob_gets += 1
        yield manager_pb2.BlobChunk(ref=request, data=self.blobs[request.digest])


@pytest.fixture(name="manager")
async def plain_manager() -> AsyncIterator[PlainManager]:
    """For conftest.py of whoever talks to it."""
    manager = await PlainManager().start()
    yield manager
    await manager.stop()
