"""Asks a server that always answers 503, breaks off, or nests JSON without end, through the actor's own class, while
others say that it serves.

The manager's word and other requests that find the URL again are faked: in truth they come at a moment that nobody can
choose. Prints the error.
"""

from __future__ import annotations

import asyncio

from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.integrations.verl import asking
from ckpt_engine.integrations.verl.options import Options

URL: list[str] = []
asking.POLL_SECONDS = 0.01


class Found(asking.ReplicaActor):
    """Another request has always just found the URL again."""

    @property  # type: ignore[override]
    def _url(self) -> str:
        return URL[0]

    @_url.setter
    def _url(self, value: str | None) -> None:
        """Nobody keeps it."""


async def ask(said: bytes) -> None:
    """One request, to a server that says this to each."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(said)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    URL[:] = [f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"]
    actor = Found(Options("127.0.0.1:1", ["one"], model="m", held_seconds=0.5), "one", 8, 8, {})
    try:
        async with asyncio.timeout(20):
            await actor.generate([1], {}, "a")
    except (CkptEngineError, TimeoutError) as error:
        print(f"{type(error).__name__}: {error}")
    server.close()


if __name__ == "__main__":
    deep = b"data: " + b"[" * 100_000 + b"\n\n"
    for answer in (
        b"HTTP/1.1 503 Busy\r\nContent-Length: 4\r\nConnection: close\r\n\r\nbusy",
        b"",
        b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s" % (len(deep), deep),
    ):
        asyncio.run(ask(answer))
