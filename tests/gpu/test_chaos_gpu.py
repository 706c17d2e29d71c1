"""Streams through a gateway while weights change and engines are killed: two replicas and their trainer on one GPU.

tests/gateway/chaos.py plays it, as for the reference engine and for engines on a CPU. An engine takes less than 240 s
where it starts within 60.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster import Cluster
from tests.gateway.chaos import MODES, play
from tests.gpu.exact import DEVICE
from tests.gpu.gpu_server import needs_gpu_vllm, start_gpu_vllm
from tests.gpu.sglang_fleet import EAGER, needs_gpu_sglang, start_gpu_sglang
from tests.tiny_model import make_tiny_qwen3

APART = 0.5
"""Seconds from one update to the next. Kills come ten times as seldom, or as soon as the last one's engine is back."""

JUDGED = 6000
"""So many answers are compared with the weights, evenly drawn from all of them: transformers takes 4 ms for one."""


@pytest.mark.timeout(480)
@pytest.mark.parametrize(
    ("engine", "route"),
    [
        pytest.param("vllm", "/inference/v1/generate", marks=needs_gpu_vllm),
        pytest.param("sglang", "/generate", marks=needs_gpu_sglang),
    ],
)
def test_two_minutes(tmp_path: Path, engine: str, route: str) -> None:
    def start(cluster: Cluster, name: str) -> None:
        bare = cluster.path / "bare"
        if engine == "vllm":
            start_gpu_vllm(cluster, name, bare, "--enforce-eager", "--enable-scale-out", visible="0")
        else:
            start_gpu_sglang(cluster, name, bare, *EAGER, visible="0")

    modes = MODES if engine == "vllm" else tuple(mode for mode in MODES if mode != "wait")
    play(
        tmp_path,
        start,
        replicas=2,
        streams=32,
        seconds=120,
        crossed=20,
        late=0,
        route=route,
        apart=APART,
        make=make_tiny_qwen3,
        modes=modes,
        device=DEVICE,
        judged=JUDGED,
    )
