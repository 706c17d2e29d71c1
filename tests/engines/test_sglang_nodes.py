"""One SGLang server on two nodes: two agents with runtime directories of their own on this host, over gloo."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from ckpt_engine import Trainer
from tests.cluster import eventually, running_cluster
from tests.engines.serving import model_of, publish, start_on_two_nodes
from tests.engines.sglang_server import assert_closed, assert_serves, needs_sglang, start_sglang

pytestmark = needs_sglang


def test_a_server_on_two_nodes_is_updated_and_closed_as_a_whole(tmp_path: Path) -> None:
    models = [model_of(tmp_path, seed) for seed in (3, 4)]
    with running_cluster(tmp_path / "cluster") as cluster:
        leader, follower = start_on_two_nodes(start_sglang, cluster, tmp_path / "3", {"SGLANG_HOST_IP": "127.0.0.1"})
        leader.registered(600)
        assert_closed(leader)
        with Trainer(cluster.address, lineage="nodes") as trainer:
            for version, model in enumerate(models):
                publish(trainer, model)
                report = trainer.update_weights(version=version)
                assert report.ok, f"{report}\n{leader.tail()}\n{follower.tail()}"
                (told,) = report.message.replicas
                assert [worker.rank for worker in told.workers] == [0, 1]
                assert_serves(leader, model, version)
        url = leader.url
        follower.stop()
        eventually("the replica is closed", 180, lambda: (now := leader.status) and not now.serving)
        with pytest.raises((httpx.TransportError, AssertionError)):
            assert httpx.get(f"{url}/ckpt_engine/ready", timeout=5).status_code == 200
