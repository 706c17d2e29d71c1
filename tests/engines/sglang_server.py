"""A real SGLang server on the CPU as a replica, for the tests marked `engine`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cluster import Cluster, Replica
from tests.engines.plain import PlainServer
from tests.engines.serving import TOKENS, check_closed, check_serves, label_of

PYTHON = os.environ.get("CKPT_ENGINE_SGLANG_PYTHON", "")
OVERLAY = os.environ.get("CKPT_ENGINE_OVERLAY", "")
STUBS = Path(__file__).parents[2] / "engines" / "sglang-stubs"

ENVIRONMENT = {
    "PYTHONPATH": f"{OVERLAY}:{STUBS}",
    "SGLANG_USE_CPU_ENGINE": "1",
    "HF_HUB_OFFLINE": "1",
}

OPTIONS = (
    *("--device", "cpu", "--attention-backend", "torch_native", "--dtype", "bfloat16", "--disable-overlap-schedule"),
    *(
        "--max-total-tokens",
        "4096",
        "--mem-fraction-static",
        "0.3",
        "--disable-cuda-graph",
        "--grammar-backend",
        "none",
    ),
    *("--sampling-backend", "pytorch", "--load-format", "dummy", "--skip-tokenizer-init"),
)
"""What the genuine server needs without a GPU and without SGLang's kernels."""

needs_sglang = [
    pytest.mark.engine,
    pytest.mark.skipif(not PYTHON, reason="CKPT_ENGINE_SGLANG_PYTHON is not set; `make test-engines` sets it"),
]


def start_sglang(
    cluster: Cluster,
    name: str,
    model: Path,
    *arguments: str,
    tensor_parallel: int = 1,
    tokenizer: bool = False,
    options: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Replica:
    """An SGLang server with random weights of its own, as a replica of `cluster`; not waited for.

    tokenizer: whether it has the model's. options: the agent's. environment: added to what the server needs; a
    PYTHONPATH comes first.
    """
    variables = {**ENVIRONMENT, **(environment or {})}
    if environment and "PYTHONPATH" in environment:
        variables["PYTHONPATH"] = f"{environment['PYTHONPATH']}:{ENVIRONMENT['PYTHONPATH']}"
    if tensor_parallel > 1:
        # Otherwise a rank would need a NUMA node of its own.
        variables["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(map(str, range(tensor_parallel)))
    given = [option for option in OPTIONS if not tokenizer or option != "--skip-tokenizer-init"]
    return cluster.replica(
        name,
        "sglang",
        model,
        *(PYTHON, "-m", "sglang.launch_server", *given, "--tensor-parallel-size", str(tensor_parallel), *arguments),
        options=options,
        environment=variables,
    )


def body_of(prompt: Sequence[int], count: int) -> dict[str, Any]:
    """A greedy request for `count` tokens after token ids."""
    return {
        "input_ids": list(prompt),
        "sampling_params": {"max_new_tokens": count, "temperature": 0, "ignore_eos": True},
    }


def complete(
    replica: Replica | PlainServer, prompt: Sequence[int], count: int = TOKENS, seconds: float = 120.0
) -> httpx.Response:
    """The answer to one greedy completion of token ids."""
    return httpx.post(f"{replica.url}/generate", json=body_of(prompt, count), timeout=seconds)


def streamed(replica: Replica, prompt: Sequence[int], count: int, seconds: float = 120.0) -> Iterator[dict[str, Any]]:
    """Each event of one streamed completion; `output_ids` are all tokens so far."""
    body = {**body_of(prompt, count), "stream": True}
    with httpx.stream("POST", f"{replica.url}/generate", json=body, timeout=seconds) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                yield json.loads(line.removeprefix("data: "))


def tokens(response: httpx.Response) -> list[int]:
    assert response.status_code == 200, response.text
    found: list[int] = response.json()["output_ids"]
    return found


def assert_serves(replica: Replica, model: Any, version: int) -> None:
    """See check_serves; here the body tells the version too."""
    response = check_serves(complete, tokens, replica, model, version)
    assert response.json()["meta_info"]["weight_version"] == label_of(replica)


def assert_closed(replica: Replica) -> None:
    """The server lives and answers no request."""
    check_closed(complete, replica)
