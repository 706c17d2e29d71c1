"""Two vLLM replicas, one of which is killed in the middle of an update, part by part."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from ckpt_engine import Trainer
from ckpt_engine.v1 import manager_pb2
from tests.cluster import Cluster, Replica, outcomes, running_cluster
from tests.engines.vllm_server import assert_serves, model_of, needs_vllm, start_vllm
from tests.tiny_model import make_tiny_qwen3, named_weights

pytestmark = needs_vllm


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    path = tmp_path_factory.mktemp("crashes")
    torch.set_num_threads(1)
    make_tiny_qwen3(path / "bare", weights=False)
    with running_cluster(path) as running:
        victim = start_vllm(running, "victim", path / "bare")
        other = start_vllm(running, "other", path / "bare")
        for replica in (victim, other):
            replica.registered(400)
        yield running


def api_server(replica: Replica) -> psutil.Process:
    port = int(replica.url.rsplit(":", 1)[1])
    for connection in psutil.net_connections("tcp"):
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
            return psutil.Process(connection.pid)
    raise AssertionError(f"nobody listens at {replica.url}")


@pytest.mark.parametrize("part", ["worker", "API server", "agent"])
def test_the_other_replica_is_unaffected_and_this_one_comes_back(cluster: Cluster, tmp_path: Path, part: str) -> None:
    victim, other = cluster.replicas[-2:] if part != "agent" else cluster.replicas[:2]
    model = model_of(tmp_path, 10)
    killed: list[int] = []

    def kill(progress: Any) -> None:
        if progress.replica == "victim" and progress.stage >= manager_pb2.QUIESCE and not killed:
            process = {
                "worker": lambda: victim.workers()[0],
                "API server": lambda: api_server(victim),
                "agent": lambda: psutil.Process(victim.process.pid),
            }[part]()
            killed.append(process.pid)
            os.kill(process.pid, signal.SIGKILL)

    with Trainer(cluster.address, lineage=f"crash-{part}") as trainer:
        trainer.publish(named_weights(model))
        assert trainer.update_weights(version=1).ok
        report = trainer.update_weights(version=2, timeout=60, on_progress=kill)
        assert killed, "the update was over before anything could be killed"
        assert outcomes(report)["other"] == "new_serving"
        assert_serves(other, model, 2)
        if part == "agent":
            victim = start_vllm(cluster, "victim", cluster.path / "bare")
        # The trainer's snapshot stays sealed, so the replica catches up without another update.
        victim.serving(2, 300)
        assert_serves(victim, model, 2)
