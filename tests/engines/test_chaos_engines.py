"""Streams through a gateway before real engines while weights change and engines are killed: three minutes each."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster import Cluster
from tests.engines.sglang_server import needs_sglang, start_sglang
from tests.engines.vllm_server import needs_vllm, start_vllm
from tests.gateway.chaos import MODES, play
from tests.tiny_model import make_tiny_qwen3

APART = 6.0
"""Seconds from one update to the next: what two replicas on two processors sustain, and tokens between."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "route"),
    [
        pytest.param("vllm", "/inference/v1/generate", marks=needs_vllm),
        pytest.param("sglang", "/generate", marks=needs_sglang),
    ],
)
def test_three_minutes(tmp_path: Path, engine: str, route: str) -> None:
    def start(cluster: Cluster, name: str) -> None:
        bare = cluster.path / "bare"
        if engine == "vllm":
            start_vllm(cluster, name, bare, "--enable-scale-out")
        else:
            start_sglang(cluster, name, bare)

    modes = MODES if engine == "vllm" else tuple(mode for mode in MODES if mode != "wait")
    play(tmp_path, start, 2, 16, 180, crossed=5, late=0, route=route, apart=APART, make=make_tiny_qwen3, modes=modes)
