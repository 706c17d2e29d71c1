"""One vLLM server on two nodes: two agents with runtime directories of their own on this host, over gloo."""

from __future__ import annotations

from pathlib import Path

import httpx
import psutil
import pytest

from ckpt_engine import Trainer
from tests.cluster import Replica, eventually, running_cluster
from tests.engines.serving import model_of, publish, start_on_two_nodes
from tests.engines.vllm_server import assert_serves, needs_vllm, start_vllm

pytestmark = needs_vllm


def test_a_server_on_two_nodes_is_updated_and_ends_as_a_whole(tmp_path: Path) -> None:
    first, second = model_of(tmp_path, 3), model_of(tmp_path, 4)
    with running_cluster(tmp_path / "cluster") as cluster:
        leader, follower = start_on_two_nodes(start_vllm, cluster, tmp_path / "3", {"VLLM_HOST_IP": "127.0.0.1"})
        leader.registered(600)
        assert httpx.get(f"{leader.url}/ckpt_engine/ready").status_code == 503
        with Trainer(cluster.address, lineage="nodes") as trainer:
            for version, model in enumerate((first, second)):
                publish(trainer, model)
                report = trainer.update_weights(version=version)
                assert report.ok, report
                (told,) = report.message.replicas
                assert [worker.rank for worker in told.workers] == [0, 1]
                assert_serves(leader, model, version)
            trainer.sleep(level=2, replicas=["wide"])
            status = leader.status
            assert status is not None
            assert [worker.state for worker in status.workers] == [1, 1], "NONE on both nodes before memory goes"
            trainer.wake(replicas=["wide"])
            eventually("it serves again after an update", 180, lambda: trainer.update_weights(version=2).ok)
            assert_serves(leader, second, 2)
            # A worker of the other node dies: the whole server ends, and no request is answered any more.
            near, far = part(leader), part(follower)
            far.kill()
            eventually("the replica is closed", 180, lambda: (now := leader.status) and not now.serving)
            with pytest.raises((httpx.TransportError, AssertionError)):
                assert_serves(leader, second, 2)
            near.wait(120)


def part(replica: Replica) -> psutil.Process:
    """The worker process of one node."""
    children = psutil.Process(replica.process.pid).children(recursive=True)
    (worker,) = [each for each in children if "VLLM::Worker" in (each.cmdline() or [""])[0]]
    return worker
