"""Updates in every pause mode and killed replicas, under hundreds of streams: no failed request, no wrong token."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster import Cluster
from tests.gateway.chaos import ENGINE_OPTIONS, play


def start(cluster: Cluster, name: str) -> None:
    cluster.replica(name, "reference", cluster.path / "bare", *ENGINE_OPTIONS)


@pytest.mark.slow
def test_a_minute(tmp_path: Path) -> None:
    play(tmp_path, start, replicas=4, streams=256, seconds=60, crossed=100, late=1)


@pytest.mark.slow
@pytest.mark.hours
def test_ten_minutes(tmp_path: Path) -> None:
    play(tmp_path, start, replicas=4, streams=256, seconds=600, crossed=1000, late=50, rollbacks=True)
