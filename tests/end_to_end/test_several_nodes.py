"""One reference server on two nodes: two agents with runtime directories of their own, real processes all of them."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
import torch

from ckpt_engine import Trainer
from ckpt_engine.v1 import manager_pb2
from tests.cluster import Cluster, Replica, eventually, generate, outcomes, running_cluster
from tests.tiny_model import decisive_prompts, make_tiny_qwen3, named_weights, reference_tokens

TOKENS = 8


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


class TwoNodes:
    """The agents of one replica. Both processes are Replicas of the cluster, so that it ends them."""

    def __init__(self, cluster: Cluster, model: Path, *, kind: str = "reference") -> None:
        token = cluster.path / "node.token"
        token.write_text("0123456789abcdef" * 4)
        self.cluster, self.model, self.kind = cluster, model, kind
        self.options = ["--nodes", "2", "--leader", free_address(), "--node-token", str(token)]
        self.leader = self.start(0)
        self.follower = self.start(1)

    def start(self, rank: int) -> Replica:
        runtime = self.cluster.path / f"n{rank}"
        runtime.mkdir(exist_ok=True, mode=0o700)
        name = "wide" if rank == 0 else "wide-node-1"
        return self.cluster.replica(
            name,
            self.kind,
            self.model,
            *("--tensor-parallel", "2"),
            options=[*self.options, "--node-rank", str(rank)],
            environment={"XDG_RUNTIME_DIR": str(runtime)},
        )

    def worker(self, node: int) -> psutil.Process:
        """The worker process of a node's part."""
        agent = psutil.Process((self.leader, self.follower)[node].process.pid)
        (found,) = [each for each in agent.children(recursive=True) if "reference.worker" in " ".join(each.cmdline())]
        return found


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory, bare_model: Path) -> Iterator[TwoNodes]:
    torch.set_num_threads(1)
    with running_cluster(tmp_path_factory.mktemp("nodes")) as cluster:
        pair = TwoNodes(cluster, bare_model)
        pair.leader.registered()
        yield pair


@pytest.fixture(scope="module")
def trainer(nodes: TwoNodes) -> Iterator[Trainer]:
    with Trainer(nodes.cluster.address, lineage="nodes") as found:
        yield found


def model_of(tmp_path: Path, seed: int) -> object:
    return make_tiny_qwen3(tmp_path / str(seed), seed, vocabulary=500, weights=False)


def check_serves(nodes: TwoNodes, model: object) -> None:
    prompt = decisive_prompts(model, 1, TOKENS)[0]
    assert generate(nodes.leader, prompt, TOKENS) == reference_tokens(model, prompt, TOKENS).tokens


def test_one_replica_of_two_nodes_is_updated(nodes: TwoNodes, trainer: Trainer, tmp_path: Path) -> None:
    status = nodes.leader.status
    assert status is not None
    assert [worker.rank for worker in status.workers] == [0, 1]
    assert len(nodes.cluster.status().replicas) == 1, "the follower is no replica of its own"
    for version, seed in enumerate((3, 4)):
        model = model_of(tmp_path, seed)
        trainer.publish(named_weights(model))
        report = trainer.update_weights(version=version)
        assert report.ok, report
        (told,) = report.message.replicas
        assert len(told.workers) == 2
        check_serves(nodes, model)
