"""A real vLLM server on the CPU as a replica, for the tests marked `engine`."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cluster import Cluster, Replica
from tests.engines.plain import PlainServer, plain_server
from tests.engines.serving import TOKENS, check_closed, check_serves

PYTHON = os.environ.get("CKPT_ENGINE_VLLM_PYTHON", "")
OVERLAY = os.environ.get("CKPT_ENGINE_OVERLAY", "")

needs_vllm = [
    pytest.mark.engine,
    pytest.mark.skipif(not PYTHON, reason="CKPT_ENGINE_VLLM_PYTHON is not set; `make test-engines` sets it"),
]


_COMMAND = (
    *(PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--served-model-name", "tiny", "--enforce-eager"),
    *(
        "--max-model-len",
        "512",
        "--enable-prompt-tokens-details",
        "--dtype",
        "bfloat16",
        "--skip-tokenizer-init",
        "--gpu-memory-utilization",
        "0.3",
    ),
)
_ENVIRONMENT = {
    "PYTHONPATH": OVERLAY,
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else each worker wants a NUMA node, and all servers the same cores
    "HF_HUB_OFFLINE": "1",
}


_PROGRAM = """
import importlib.metadata

if __name__ == "__main__":
    version_of = importlib.metadata.version
    importlib.metadata.version = lambda name: version_of("vllm-cpu") + "+cpu" if name == "vllm" else version_of(name)
    from vllm.entrypoints.cli.main import main

    main()
"""


def run_in_vllm(module: str, *paths: Path) -> list[dict[str, Any]]:
    """What a module of these tests prints, a JSON object a line, in a process of vLLM's Python.."""
    done = subprocess.run(
        [PYTHON, "-m", module, *map(str, paths)],
        capture_output=True,
        text=True,
        timeout=900,
        env={**os.environ, **_ENVIRONMENT, "PYTHONPATH": f"{OVERLAY}:{Path(__file__).parents[2]}"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"')]


def _program(path: Path) -> Path:
    """vLLM's own program, for a package of another name than `vllm`, whose version that program asks for."""
    program = path / "vllm"
    program.write_text(f"#!{PYTHON}\n{_PROGRAM}")
    program.chmod(0o700)
    return program


def start_vllm(
    cluster: Cluster,
    name: str,
    model: Path,
    *arguments: str,
    tensor_parallel: int = 1,
    serve: bool = False,
    options: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Replica:
    """A vLLM server with random weights of its own, as a replica of `cluster`; not waited for. options: the agent's.
    serve: by `vllm serve`, which alone has several API processes.

    environment: added to what it needs; of the agent too.
    """
    command = (str(_program(cluster.path)), "serve", *_COMMAND[3:]) if serve else _COMMAND
    return cluster.replica(
        name,
        "vllm",
        model,
        *(*command, "--load-format", "dummy", "--tensor-parallel-size", str(tensor_parallel), *arguments),
        options=options,
        environment={**_ENVIRONMENT, **(environment or {})},
    )


def plain_vllm(
    model: Path, log: Path, *arguments: str, environment: Mapping[str, str] | None = None
) -> AbstractContextManager[PlainServer]:
    """A vLLM server without us that loads its weights from `model`."""
    given = {**_ENVIRONMENT, **(environment or {})}
    return plain_server([*_COMMAND, "--model", str(model), *arguments], log, given)


def complete(
    replica: Replica | PlainServer, prompt: Sequence[int], count: int = TOKENS, seconds: float = 120.0
) -> httpx.Response:
    """The answer to one greedy completion of token ids."""
    body = {"model": "tiny", "prompt": list(prompt), "max_tokens": count, "temperature": 0, "ignore_eos": True}
    return httpx.post(
        f"{replica.url}/v1/completions",
        json={**body, "return_token_ids": True, "detokenize": False},
        timeout=seconds,
    )


def tokens(response: httpx.Response) -> list[int]:
    assert response.status_code == 200, response.text
    found: list[int] = response.json()["choices"][0]["token_ids"]
    return found


def assert_serves(replica: Replica, model: Any, version: int) -> None:
    """See check_serves."""
    check_serves(complete, tokens, replica, model, version)


def assert_closed(replica: Replica) -> None:
    """The server lives and answers no request."""
    check_closed(complete, replica)


def wait_until_open(replica: Replica, seconds: float) -> None:
    end = time.monotonic() + seconds
    while complete(replica, [1, 2, 3], 1).status_code == 503:
        assert time.monotonic() < end, replica.tail()
        time.sleep(0.2)
