"""A real vLLM server on a GPU, as a replica and without us."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.cluster import Cluster, Replica
from tests.engines.plain import PlainServer, plain_server
from tests.engines.vllm_server import OVERLAY, PYTHON
from tests.gpu import exact

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
    environment: Mapping[str, str] | None = None,
) -> Replica:
    """A vLLM server with random weights of its own; CUDA graphs are on unless `--enforce-eager`. Not waited for.

    options: to `ckpt-engine agent`. visible: its CUDA_VISIBLE_DEVICES; empty: all. environment: added to what it needs.
    """
    devices = {"CUDA_VISIBLE_DEVICES": visible} if visible else {}
    return cluster.replica(
        name,
        "vllm",
        model,
        *(PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--load-format", "dummy"),
        *vllm_arguments(tensor_parallel=tensor_parallel),
        *arguments,
        options=options,
        environment={**ENVIRONMENT, **devices, **(environment or {})},
    )


def plain_vllm(
    model: Path, log: Path, *arguments: str, environment: Mapping[str, str] | None = None
) -> AbstractContextManager[PlainServer]:
    """A vLLM server without us that loads its weights from `model`."""
    command = [PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    return plain_server([*command, *vllm_arguments(), *arguments], log, {**ENVIRONMENT, **(environment or {})})
