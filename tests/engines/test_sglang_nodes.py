"""One SGLang server on two nodes: two agents with runtime directories of their own on this host, over gloo."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from ckpt_engine import Trainer
from tests.cluster import Cluster, eventually, running_cluster
from tests.end_to_end.test_several_nodes import free_address
from tests.engines.sglang_server import assert_closed, assert_serves, model_of, needs_sglang, publish, start_sglang

pytestmark = [*needs_sglang, pytest.mark.timeout(900)]


def start(cluster: Cluster, model: Path) -> None:
    token = cluster.path / "node.token"
    token.write_text("0123456789abcdef" * 4)
    options = ["--nodes", "2", "--leader", free_address(), "--node-token", str(token), "--startup-timeout", "600"]
    for rank, name in enumerate(("wide", "wide-node-1")):
        runtime = cluster.path / f"n{rank}"
        runtime.mkdir(mode=0o700)
        environment = {"XDG_RUNTIME_DIR": str(runtime), "SGLANG_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
        start_sglang(
            cluster,
            name,
            model,
            tensor_parallel=2,
            options=[*options, "--node-rank", str(rank)],
            environment=environment,
        )


def test_a_server_on_two_nodes_is_updated_and_closed_as_a_whole(tmp_path: Path) -> None:
    models = [model_of(tmp_path, seed) for seed in (3, 4)]
    with running_cluster(tmp_path / "cluster") as cluster:
        start(cluster, tmp_path / "3")
        leader, follower = cluster.replicas
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
        eventually("the replica is closed", 120, lambda: (now := leader.status) and not now.serving)
        with pytest.raises((httpx.TransportError, AssertionError)):
            assert httpx.get(f"{url}/ckpt_engine/ready", timeout=5).status_code == 200
