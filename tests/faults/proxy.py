"""A TCP proxy on loopback between one member and the manager, whose connections a test can cut.

It knows nothing of what it carries. Runs on a thread and an event loop of its own; its methods are called from tests.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")

_RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # SO_LINGER of no seconds: the peer sees a reset, as from a dead host


class Loop:
    """An event loop on a daemon thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()

    def run(self, work: Coroutine[Any, Any, T], seconds: float = 30.0) -> T:
        """Runs `work` on the loop and waits for its end."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(seconds)


class Proxy:
    """Listens on a free port, or the one that is given, or at `listener`. upstream: host and port; a test may change it
    for later connections. pause: seconds that every 64 KiB wait."""

    def __init__(
        self,
        loop: Loop,
        upstream: tuple[str, int],
        host: str = "127.0.0.1",
        port: int = 0,
        listener: socket.socket | None = None,
    ) -> None:
        self.upstream = upstream
        self.pause = 0.0
        self._host = host
        self._loop = loop
        self._reachable = True
        self._writers: set[asyncio.StreamWriter] = set()
        where = {"host": host, "port": port} if listener is None else {"sock": listener}
        self._server = loop.run(asyncio.start_server(self._carry, **where))
        self.port: int = self._server.sockets[0].getsockname()[1]

    @property
    def address(self) -> str:
        return f"{self._host}:{self.port}"

    @property
    def connected(self) -> bool:
        return bool(self._writers)

    def cut(self, *, reachable: bool = True) -> None:
        """Resets every connection. reachable: whether new ones are let through from now on."""
        self._reachable = reachable
        self._loop.run(self._cut())

    def restore(self) -> None:
        """New connections are let through again."""
        self._reachable = True

    def close(self) -> None:
        self._server.close()
        self.cut(reachable=False)

    async def _cut(self) -> None:
        for writer in list(self._writers):
            reset(writer)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not self._reachable:
            reset(writer)
            return
        try:
            out_reader, out_writer = await asyncio.open_connection(*self.upstream)
        except OSError:
            reset(writer)
            return
        self._writers |= {writer, out_writer}
        try:
            await asyncio.gather(self._pump(reader, out_writer), self._pump(out_reader, writer))
        finally:
            for each in (writer, out_writer):
                self._writers.discard(each)
                reset(each)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carries bytes one way until either end is gone; then the other way has nobody to talk to either."""
        with suppress(OSError):
            while data := await reader.read(1 << 16):
                await asyncio.sleep(self.pause)
                writer.write(data)
                await writer.drain()
        writer.close()


def reset(writer: asyncio.StreamWriter) -> None:
    connection = writer.get_extra_info("socket")
    if connection is not None:
        with suppress(OSError):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
    writer.transport.abort()
