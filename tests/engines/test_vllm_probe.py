"""A probe of vLLM: its figures, and the causes that it names."""

from __future__ import annotations

from pathlib import Path

from tests.cluster import Cluster, Replica
from tests.engines.probing import check_probes, unsalted_cluster
from tests.engines.vllm_server import OVERLAY, needs_vllm, start_vllm

pytestmark = needs_vllm


def start(cluster: Cluster, model: Path, first: Path) -> Replica:
    return start_vllm(cluster, "vllm", model, environment={"PYTHONPATH": f"{first}:{OVERLAY}"})


def test_a_probe_names_what_differs(tmp_path: Path) -> None:
    with unsalted_cluster(tmp_path, start) as cluster:
        check_probes(cluster, tmp_path, "vllm")
