"""A probe of SGLang: its figures, and the causes that it names."""

from __future__ import annotations

from pathlib import Path

from tests.cluster import Cluster, Replica
from tests.engines.probing import check_probes, unsalted_cluster
from tests.engines.sglang_server import needs_sglang, start_sglang

pytestmark = needs_sglang


def start(cluster: Cluster, model: Path, first: Path) -> Replica:
    return start_sglang(cluster, "sglang", model, environment={"PYTHONPATH": str(first)})


def test_a_probe_names_what_differs(tmp_path: Path) -> None:
    with unsalted_cluster(tmp_path, start) as cluster:
        check_probes(cluster, tmp_path, "sglang")
