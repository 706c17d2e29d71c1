"""What the gate costs a request: the same trivial ASGI application with and without it, on one event loop.

The state words are read at every request; every 50 ms it is also asked whether the workers live. The body is read for
the field that asks for versions, which it does not have.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from pathlib import Path
from typing import Any

import pytest

from ckpt_engine.gate.directory import ENVIRONMENT, EngineDirectory
from ckpt_engine.gate.page import EnginePage
from ckpt_engine.gate.salt import CacheSalt
from ckpt_engine.v1 import weights_pb2
from ckpt_engine_adapters.vllm.gate import VllmGate

REQUESTS = 2000
BODY = b'{"model": "m", "prompt": [' + b", ".join(b"%d" % token for token in range(1000)) + b"]}"


async def application(scope: Any, receive: Any, send: Any) -> None:
    await receive()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]})
    await send({"type": "http.response.body", "body": b"token"})


async def ask(app: Any, count: int) -> None:
    names = (b"host", b"accept", b"accept-encoding", b"connection", b"user-agent", b"content-length", b"content-type")
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [(name, b"x") for name in names]}

    async def receive() -> Any:
        return {"type": "http.request", "body": BODY, "more_body": False}

    async def send(message: Any) -> None:
        return None

    for _ in range(count):
        await app(scope, receive, send)


@pytest.mark.parametrize("workers", [1, 8])
def test_gate_per_request(benchmark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int) -> None:
    directory = EngineDirectory.create(tmp_path)
    monkeypatch.setenv(ENVIRONMENT, str(directory.path))
    identity = weights_pb2.Identity(lineage="run", version=1, root=bytes(32))
    page = EnginePage(directory.page)
    for rank in range(workers):
        page.claim(rank, workers).clean(1, identity)
    gate = VllmGate(application)
    bare = []
    for _ in range(20):
        started = time.perf_counter()
        asyncio.run(ask(application, REQUESTS))
        bare.append((time.perf_counter() - started) / REQUESTS)
    benchmark.pedantic(lambda: asyncio.run(ask(gate, REQUESTS)), rounds=20, warmup_rounds=2)
    through = benchmark.stats.stats.median / REQUESTS
    benchmark.extra_info["bare_microseconds"] = statistics.median(bare) * 1e6
    benchmark.extra_info["gate_microseconds"] = through * 1e6
    benchmark.extra_info["added_microseconds"] = (through - statistics.median(bare)) * 1e6


@pytest.mark.parametrize("kept", [0, 1])
def test_salt_per_request(benchmark: Any, tmp_path: Path, kept: int) -> None:
    """Before an engine's first update in place, and after it."""
    page = EnginePage(tmp_path / "page")
    for rank in range(8):
        page.claim(rank, 8)
    for _ in range(kept):
        page.keep_caches()
    salt = CacheSalt(page)

    def salt_requests() -> None:
        for _ in range(REQUESTS):
            salt.of("a caller's own")

    benchmark.pedantic(salt_requests, rounds=20, warmup_rounds=2)
    benchmark.extra_info["salt_microseconds"] = benchmark.stats.stats.median / REQUESTS * 1e6
