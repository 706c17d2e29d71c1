"""A stream that lasts longer than every idle limit: limits are on silence, not on length."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cluster import eventually
from tests.gateway.gateways import running_gateway
from tests.ports import free_port


@contextlib.contextmanager
def paced(seconds: float) -> Iterator[str]:
    """The URL of an engine that makes a token each so many seconds."""
    url = f"http://127.0.0.1:{(port := free_port())}"
    command = [sys.executable, "-m", "benchmarks.paced_engine", "--port", str(port), "--token-seconds", str(seconds)]
    engine = subprocess.Popen(command)

    def answers() -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"{url}/health", timeout=5).status_code == 200
        return False

    try:
        eventually("the engine answers", 60, answers)
        yield url
    finally:
        engine.kill()
        engine.wait(60)


async def lines(url: str, body: dict[str, Any]) -> list[str]:
    """Of a stream: data and comments."""
    async with (
        httpx.AsyncClient(timeout=60) as client,
        client.stream("POST", url, json={**body, "stream": True}) as answer,
    ):
        return [line async for line in answer.aiter_lines() if line]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tokens", "apart", "idle"), [(20, 0.5, 4), pytest.param(32, 30.0, 300, marks=pytest.mark.hours)]
)
def test_a_stream_lasts_longer_than_every_idle_limit(tmp_path: Path, tokens: int, apart: float, idle: int) -> None:
    """The long one has the limits as they come, sixteen minutes, and a comment every 15 s while it waits."""
    options = ("--idle-seconds", str(idle), "--queue-seconds", "1", "--drain-seconds", "1")
    with paced(apart) as url, running_gateway(tmp_path / "g.log", "--replica", url, *options) as gateway:
        body = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": tokens}}
        said = asyncio.run(lines(f"{gateway.ready().url}/generate", body))
    *events, done = [line for line in said if line.startswith("data: ")]
    assert done == "data: [DONE]"
    last = json.loads(events[-1].removeprefix("data: "))
    assert last["output_ids"] == list(range(tokens))
    assert last["meta_info"]["ckpt_engine"]["resumes"] == 0
    if apart > 20:
        assert said.count(": waiting") >= tokens - 1
