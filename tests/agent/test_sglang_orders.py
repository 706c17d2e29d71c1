"""When SGLang's driver makes its orders, which loads torch: over a real connection, to a server that answers as SGLang.

The server is a fake, since what must not happen is seen in the agent alone.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from ckpt_engine.engine.adapter import AdapterSettings
from ckpt_engine_adapters.sglang import driver
from ckpt_engine_adapters.sglang.instruction import Instruction, encode

SECONDS = 60.0
STATE = {"paused": False, "released": [], "routes": []}


class Handler(BaseHTTPRequestHandler):
    asked: list[str]

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("content-length", 0)))
        self.asked.append(self.path)
        body = json.dumps(STATE).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET  # noqa: N815

    def log_message(self, format: str, *arguments: object) -> None:
        """Nothing."""


@pytest.fixture
def asked() -> Iterator[tuple[str, list[str]]]:
    """The server's URL, and the routes that it was asked for."""
    handler = type("Asked", (Handler,), {"asked": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}", handler.asked
        server.shutdown()
        thread.join(SECONDS)


async def test_an_order_is_made_before_the_engine_is_paused_and_not_on_the_loops_thread(
    asked: tuple[str, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, routes = asked
    made: list[tuple[bool, bool]] = []

    def noted(order: Instruction) -> Any:
        made.append(("/pause_generation" in routes, threading.current_thread() is threading.main_thread()))
        return encode(order)

    monkeypatch.setattr(driver, "encode", noted)
    adapter = driver.create_adapter(AdapterSettings(url, tmp_path, "token"))
    try:
        await adapter.prepare(SECONDS)
    finally:
        await adapter.close()
    assert made == [(False, False)]
    assert routes[1:] == ["/pause_generation", "/update_weights_from_tensor", "/continue_generation"]
