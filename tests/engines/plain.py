"""Servers of engines without us, which load their weights from files: what an update of ours is compared with."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.cluster import eventually
from tests.ports import free_port


@dataclass(frozen=True)
class PlainServer:
    """A server that may be starting still."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def wait(self, seconds: float = 240.0) -> None:
        """Returns when it answers; AssertionError with what it printed if it ends or takes longer."""

        def up() -> bool:
            assert self.process.poll() is None, self.log.read_text(errors="replace")[-4000:]
            with contextlib.suppress(httpx.HTTPError):
                return httpx.get(f"{self.url}/health", timeout=5).status_code == 200
            return False

        eventually(f"a server answers at {self.url}", seconds, up)


@contextlib.contextmanager
def plain_server(command: Sequence[str], log: Path, environment: Mapping[str, str]) -> Iterator[PlainServer]:
    """Starts a command, to which `--host` and `--port` are added. environment: added to ours."""
    port = free_port()
    with log.open("ab") as output:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port)],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            start_new_session=True,
        )
    try:
        yield PlainServer(f"http://127.0.0.1:{port}", process, log)
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(60)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)
