"""Streams through a gateway before real engines while weights change and engines are killed: three minutes each."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster import Cluster
from tests.engines.sglang_server import needs_sglang, start_sglang
from tests.engines.vllm_server import needs_vllm, start_vllm
from tests.gateway.chaos import play, relay_folder
from tests.tiny_model import make_tiny_qwen3

APART = 6.0
"""Seconds from one update to the next: what two replicas on two processors sustain, and tokens between."""


@needs_vllm
@pytest.mark.slow
def test_vllm(tmp_path: Path) -> None:
    def start(cluster: Cluster, name: str) -> None:
        own = relay_folder(cluster.path)
        start_vllm(cluster, name, cluster.path / "bare", "--enable-scale-out", environment=own)

    route = "/inference/v1/generate"
    play(tmp_path, start, 2, 16, 180, crossed=5, late=0, route=route, apart=APART, make=make_tiny_qwen3)


@needs_sglang
@pytest.mark.slow
def test_sglang(tmp_path: Path) -> None:
    def start(cluster: Cluster, name: str) -> None:
        start_sglang(cluster, name, cluster.path / "bare", environment=relay_folder(cluster.path))

    play(tmp_path, start, 2, 16, 180, crossed=5, late=0, route="/generate", apart=APART, make=make_tiny_qwen3)
