"""A gateway as users run it, for tests: a process of the command line."""

from __future__ import annotations

import contextlib
import json
import signal
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx

from tests.cluster import eventually
from tests.ports import free_port


class GatewayProcess:
    """`ckpt-engine gateway`. Use `running_gateway`. It is ready however long replicas take to start. verify: whom a
    caller over TLS trusts."""

    def __init__(self, log: Path, *options: str) -> None:
        self.url = f"http://127.0.0.1:{free_port()}"
        self.verify: ssl.SSLContext | bool = True
        self.log = log
        self._output = log.open("ab")
        command = [sys.executable, "-m", "ckpt_engine", "gateway", "--listen", self.url.removeprefix("http://")]
        command += ["--unready-after", "3600"]
        self.process = subprocess.Popen([*command, *options], stdout=self._output, stderr=subprocess.STDOUT)

    def ready(self, seconds: float = 180.0) -> GatewayProcess:
        """Waits until /readyz says so."""

        def look() -> bool:
            assert self.process.poll() is None, self.tail()
            with contextlib.suppress(httpx.HTTPError):
                return httpx.get(f"{self.url}/readyz", timeout=5, verify=self.verify).status_code == 200
            return False

        eventually("the gateway is ready", seconds, look)
        return self

    def post(
        self, route: str, body: dict[str, Any], timeout: float | httpx.Timeout = 120.0, **headers: str
    ) -> httpx.Response:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return httpx.post(f"{self.url}{route}", json=body, timeout=timeout, headers=named, verify=self.verify)

    def tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-60:])

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        finally:
            self._output.close()


@contextlib.contextmanager
def running_gateway(log: Path, *options: str) -> Iterator[GatewayProcess]:
    """Ends it with SIGTERM."""
    gateway = GatewayProcess(log, *options)
    try:
        yield gateway
    finally:
        gateway.stop()


async def events(client: httpx.AsyncClient, url: str, body: dict[str, Any], **headers: str) -> AsyncIterator[Any]:
    """Of a stream: objects, then the word "[DONE]". Comments are left out."""
    async with client.stream("POST", url, json={**body, "stream": True}, headers=headers) as answer:
        assert answer.status_code == 200, (await answer.aread()).decode()
        async for line in answer.aiter_lines():
            if line.startswith("data: "):
                content = line.removeprefix("data: ")
                yield content if content == "[DONE]" else json.loads(content)
