"""A real server around an application, in a thread."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

import uvicorn

from tests.waiting import PATIENCE, eventually


@contextlib.contextmanager
def serve(app: Any, root_path: str = "") -> Iterator[str]:
    """Its URL. root_path: as SGLang sets it, on the server."""
    # With the protocol named, asyncio turns Nagle's algorithm off on what it accepts.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", root_path=root_path))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
    thread.start()
    try:
        eventually("the server has started", PATIENCE, lambda: server.started)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(60)
