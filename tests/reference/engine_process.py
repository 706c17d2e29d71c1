"""A reference engine started for tests: a real server with real workers, driven through the real driver."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from ckpt_engine.engine.adapter import AdapterSettings
from ckpt_engine.gate.directory import ENVIRONMENT, EngineDirectory
from ckpt_engine_adapters.reference.driver import ReferenceAdapter, launch_plan
from tests.ports import free_port
from tests.waiting import alive

START_SECONDS = 300.0
CALL_SECONDS = 60.0
_DIE_WITH_US = partial(ctypes.CDLL(None).prctl, 1, signal.SIGKILL)  # PR_SET_PDEATHSIG: also if pytest is killed


class EngineProcess:
    """One running server. `log()` is what it has written so far; `epoch` counts the updates that tests have begun."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, directory: EngineDirectory, log_path: Path) -> None:
        self.process = process
        self.url = url
        self.directory = directory
        self.epoch = 0
        self._log_path = log_path

    def log(self) -> str:
        return self._log_path.read_text()

    def get(self, route: str) -> dict[str, Any]:
        answer = httpx.get(self.url + route, timeout=CALL_SECONDS)
        answer.raise_for_status()
        body: dict[str, Any] = answer.json()
        return body

    def worker_pids(self) -> list[int]:
        pids: list[int] = self.get("/info")["workers"]
        return pids

    def client(self, *, token: bool = False) -> httpx.AsyncClient:
        """For users' requests; with `token`, for development routes too."""
        headers = {"x-ckpt-engine-token": self.directory.token()} if token else {}
        return httpx.AsyncClient(base_url=self.url, timeout=CALL_SECONDS, headers=headers)

    @asynccontextmanager
    async def driven(self) -> AsyncIterator[ReferenceAdapter]:
        """The adapter that an agent would use."""
        adapter = ReferenceAdapter(AdapterSettings(self.url, self.directory.path, self.directory.token()))
        try:
            yield adapter
        finally:
            await adapter.close()


@contextmanager
def engine(model: Path, log_path: Path, *arguments: str) -> Iterator[EngineProcess]:
    """Starts a server the way an agent does and waits until it is healthy. Afterwards sees that SIGTERM ends it."""
    directory = EngineDirectory.create()
    port = free_port()
    plan = launch_plan(arguments, port, str(model))
    environment = {**os.environ, **plan.env, ENVIRONMENT: str(directory.path), "OMP_NUM_THREADS": "1"}
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            plan.argv, env=environment, stdout=log, stderr=log, start_new_session=True, preexec_fn=_DIE_WITH_US
        )
    running = EngineProcess(process, plan.url, directory, log_path)
    try:
        _wait_healthy(running, f"{plan.url}/health")
        yield running
        if process.poll() is None:
            workers = running.worker_pids()
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=60) == 0, running.log()
            assert not any(alive(pid) for pid in workers)
    finally:
        process.kill()
        process.wait(timeout=60)
        directory.remove()


def _wait_healthy(running: EngineProcess, url: str) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        assert running.process.poll() is None, running.log()
        try:
            if httpx.get(url, timeout=1.0).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.05)
    raise AssertionError(f"the engine was not healthy after {START_SECONDS:.0f} s: {running.log()}")


async def generate(client: httpx.AsyncClient, prompt: list[int], count: int, **options: Any) -> dict[str, Any]:
    """Posts one request and returns the answer's body."""
    answer = await client.post("/generate", json={"input_ids": prompt, "max_tokens": count, **options})
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


async def events(
    client: httpx.AsyncClient, prompt: list[int], count: int, **options: Any
) -> AsyncIterator[dict[str, Any]]:
    """Posts one streaming request and yields its events."""
    body = {"input_ids": prompt, "max_tokens": count, "stream": True, **options}
    async with client.stream("POST", "/generate", json=body) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if line:
                yield json.loads(line.removeprefix("data: "))
