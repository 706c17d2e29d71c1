"""Real routers in front of replicas, started as docs/routers.md says, for the tests marked `engine`."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cluster import eventually
from tests.ports import free_port

PYTHON = os.environ.get("CKPT_ENGINE_ROUTERS_PYTHON", "")

needs_routers = [
    pytest.mark.engine,
    pytest.mark.skipif(not PYTHON, reason="CKPT_ENGINE_ROUTERS_PYTHON is not set; `make test-engines` sets it"),
]

MODULES = {"sglang": "sglang_router.launch_router", "vllm": "vllm_router.launch_router"}

FLAGS = (
    "--disable-circuit-breaker",
    *("--health-check-endpoint", "/ckpt_engine/ready"),
    *("--health-check-interval-secs", "1", "--health-failure-threshold", "1", "--health-success-threshold", "1"),
)
"""What docs/routers.md tells users to give both routers."""


@dataclass(frozen=True)
class Router:
    """A router that runs. kind: of MODULES."""

    kind: str
    url: str
    log: Path

    def healthy(self) -> set[str]:
        """The URLs of the replicas that it would send requests to."""
        workers = httpx.get(f"{self.url}/workers", timeout=60).json()["workers"]
        return {worker["url"] for worker in workers if worker["is_healthy"]}

    def tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-40:])


@contextlib.contextmanager
def running_router(
    kind: str, replicas: Sequence[str], log: Path, *arguments: str, policy: str = "round_robin"
) -> Iterator[Router]:
    """Starts a router; waits until it answers, not until it has found its replicas. replicas: their URLs."""
    port, metrics = free_port(), free_port()
    command = [PYTHON, "-m", MODULES[kind], "--host", "127.0.0.1", "--port", str(port), "--policy", policy]
    command += ["--log-level", "error"]
    command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics)]
    router = Router(kind, f"http://127.0.0.1:{port}", log)
    with log.open("ab") as output:
        process = subprocess.Popen(
            [*command, "--worker-urls", *replicas, *arguments], stdout=output, stderr=subprocess.STDOUT
        )
    try:

        def answers() -> bool:
            assert process.poll() is None, router.tail()
            with contextlib.suppress(httpx.TransportError):
                return httpx.get(f"{router.url}/liveness", timeout=5).status_code == 200
            return False

        eventually(f"{kind}-router answers", 60, answers)
        yield router
    finally:
        process.kill()
        process.wait(60)


def ask(router: Router, prompt: Sequence[int], count: int = 4, seconds: float = 60.0, **options: Any) -> httpx.Response:
    """One greedy request in SGLang's form, which both routers pass on."""
    body = {"input_ids": list(prompt), "sampling_params": {"max_new_tokens": count, "temperature": 0}, **options}
    return httpx.post(f"{router.url}/generate", json=body, timeout=seconds)
