"""A real SGLang server on a GPU, as a replica and without us."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.cluster import Cluster, Replica
from tests.engines.plain import PlainServer, plain_server
from tests.engines.sglang_server import OVERLAY, PYTHON
from tests.gpu import exact

CACHED_TOKENS = 1 << 22

ENVIRONMENT = {**exact.ENVIRONMENT, "PYTHONPATH": OVERLAY}

needs_gpu_sglang = [
    pytest.mark.gpu,
    pytest.mark.engine,
    pytest.mark.skipif(not PYTHON, reason="CKPT_ENGINE_SGLANG_PYTHON is not set; docs/engines/sglang.md says how"),
]

OPTIONS = (
    *("--attention-backend", "triton", "--sampling-backend", "pytorch", "--grammar-backend", "none"),
    *("--load-format", "dummy", "--skip-tokenizer-init", "--dtype", "bfloat16", "--mem-fraction-static", "0.1"),
    *("--max-total-tokens", str(CACHED_TOKENS), "--max-running-requests", "32"),
)
"""Overlapped scheduling is on, as SGLang's default has it. The cache's size is given: servers that start at once would
measure each other."""

EAGER = ("--disable-cuda-graph",)
GRAPHS = ("--cuda-graph-max-bs-decode", "16")


def start_gpu_sglang(
    cluster: Cluster,
    name: str,
    model: Path,
    *arguments: str,
    options: Sequence[str] = (),
    visible: str = "",
    tensor_parallel: int = 1,
    environment: Mapping[str, str] | None = None,
) -> Replica:
    """A server with random weights of its own; not waited for.

    options: to `ckpt-engine agent`. visible: its CUDA_VISIBLE_DEVICES; empty: all. environment: added to what it needs.
    """
    devices = {"CUDA_VISIBLE_DEVICES": visible} if visible else {}
    parallel = ("--tensor-parallel-size", str(tensor_parallel))
    return cluster.replica(
        name,
        "sglang",
        model,
        *(PYTHON, "-m", "sglang.launch_server", *OPTIONS, *parallel, *arguments),
        options=options,
        environment={**ENVIRONMENT, **devices, **(environment or {})},
    )


def plain_sglang(
    model: Path, log: Path, *arguments: str, environment: Mapping[str, str] | None = None
) -> AbstractContextManager[PlainServer]:
    """A server without us on the first GPU, with random weights unless `--load-format auto`."""
    command = [PYTHON, "-m", "sglang.launch_server", "--model-path", str(model), "--skip-server-warmup"]
    given = {**ENVIRONMENT, "CUDA_VISIBLE_DEVICES": "0", **(environment or {})}
    return plain_server([*command, *OPTIONS, *arguments], log, given)
