"""What drivers of engines with HTTP routes do alike, over a real connection: the health of an engine, and sessions."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from ckpt_engine.agent.http import HttpAdapter
from ckpt_engine.engine.adapter import AdapterSettings, EngineCallError

SECONDS = 60.0


class Server(ThreadingHTTPServer):
    """An engine that has one session: it refuses to begin another one, and to end or use what was not begun."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.open = False
        self.fails = False
        self.asked: list[str] = []

    def answer(self, route: str) -> int:
        self.asked.append(route)
        if route == "/health":
            return 503 if self.fails else 200
        if route == "/use":
            return 500 if self.fails or not self.open else 200
        if self.open == (route == "/begin"):
            return 400
        self.open = route == "/begin"
        return 200


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("content-length", 0)))
        self.send_response(self.server.answer(self.path))
        self.send_header("content-length", "0")
        self.end_headers()

    do_POST = do_GET  # noqa: N815

    def log_message(self, format: str, *arguments: object) -> None:
        """Nothing."""


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


class Adapter(HttpAdapter):
    async def use(self, seconds: float = SECONDS) -> None:
        until = time.monotonic() + seconds
        async with self._session(partial(self._post, "/begin"), partial(self._post, "/end"), until):
            await self._post("/use", SECONDS)


@pytest.fixture
def adapter(server: Server) -> Adapter:
    return Adapter(AdapterSettings(f"http://127.0.0.1:{server.server_port}", Path(), "token"))


async def test_a_session_is_begun_and_ended(adapter: Adapter, server: Server) -> None:
    await adapter.use()
    assert server.asked == ["/begin", "/use", "/end"]
    await adapter.close()


async def test_a_session_that_somebody_left_open_is_ended_first(adapter: Adapter, server: Server) -> None:
    server.open = True
    await adapter.use()
    assert server.asked == ["/begin", "/end", "/begin", "/use", "/end"]
    await adapter.close()


async def test_a_session_is_ended_after_a_failure_too(adapter: Adapter, server: Server) -> None:
    server.fails = True
    with pytest.raises(EngineCallError, match="POST /use: 500"):
        await adapter.use()
    assert not server.open
    await adapter.close()


async def test_a_session_that_gets_no_answer_is_not_begun_again(adapter: Adapter, server: Server) -> None:
    """Nobody knows whether it is open; its caller reads state words first."""
    with pytest.raises(EngineCallError) as failed:
        await adapter.use(seconds=0.0)
    assert not failed.value.answered
    assert "/use" not in server.asked
    assert "/end" not in server.asked
    await adapter.close()


async def test_an_engine_is_healthy_if_its_health_route_says_so(adapter: Adapter, server: Server) -> None:
    assert await adapter.healthy(SECONDS)
    server.fails = True
    assert not await adapter.healthy(SECONDS)
    await adapter.close()
