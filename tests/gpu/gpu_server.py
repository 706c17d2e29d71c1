"""A real vLLM server on a GPU, as a replica and without us."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from tests.cluster import Cluster, Replica, eventually
from tests.engines.vllm_server import OVERLAY, PYTHON
from tests.gpu import exact
from tests.ports import free_port

KV_BYTES = 2 << 30

ENVIRONMENT = {**exact.ENVIRONMENT, "PYTHONPATH": OVERLAY, "VLLM_USE_FLASHINFER_SAMPLER": "0"}

needs_gpu_vllm = [
    pytest.mark.gpu,
    pytest.mark.engine,
    pytest.mark.skipif(not PYTHON, reason="CKPT_ENGINE_VLLM_PYTHON is not set; docs/engines/vllm.md says how"),
]


def vllm_arguments(kv_bytes: int = KV_BYTES, tensor_parallel: int = 1) -> tuple[str, ...]:
    """What all servers share. The cache's size is given: servers that start at once would measure each other."""
    return (
        *("--served-model-name", "tiny", "--max-model-len", "256", "--dtype", "bfloat16", "--skip-tokenizer-init"),
        *("--gpu-memory-utilization", "0.05", "--kv-cache-memory-bytes", str(kv_bytes), "--max-num-seqs", "32"),
        *("--tensor-parallel-size", str(tensor_parallel)),
    )


def start_gpu_vllm(
    cluster: Cluster,
    name: str,
    model: Path,
    *arguments: str,
    options: Sequence[str] = (),
    visible: str = "",
    tensor_parallel: int = 1,
) -> Replica:
    """A vLLM server with random weights of its own; CUDA graphs are on unless `--enforce-eager`. Not waited for.

    options: to `ckpt-engine agent`. visible: its CUDA_VISIBLE_DEVICES; empty: all.
    """
    environment = {**ENVIRONMENT, **({"CUDA_VISIBLE_DEVICES": visible} if visible else {})}
    return cluster.replica(
        name,
        "vllm",
        model,
        *(PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--load-format", "dummy"),
        *vllm_arguments(tensor_parallel=tensor_parallel),
        *arguments,
        options=options,
        environment=environment,
    )


@contextlib.contextmanager
def plain_vllm(model: Path, log: Path, *arguments: str, environment: Mapping[str, str] | None = None) -> Iterator[Any]:
    """A vLLM server without us that loads its weights from `model`; it answers at `.url` after `wait_for_plain`."""
    port = free_port()
    command = [PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--host", "127.0.0.1"]
    with log.open("ab") as output:
        process = subprocess.Popen(
            [*command, "--port", str(port), *vllm_arguments(), *arguments],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **ENVIRONMENT, **(environment or {})},
            start_new_session=True,
        )
    try:
        yield SimpleNamespace(url=f"http://127.0.0.1:{port}", process=process, log=log)
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(30)


def wait_for_plain(server: Any, seconds: float = 240.0) -> None:
    def up() -> bool:
        assert server.process.poll() is None, server.log.read_text(errors="replace")[-4000:]
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"{server.url}/health", timeout=5).status_code == 200
        return False

    eventually(f"vLLM answers at {server.url}", seconds, up)
