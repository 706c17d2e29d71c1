"""One reference server on two nodes: two agents with runtime directories of their own, real processes all of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch

from ckpt_engine import CkptEngineError, Trainer
from ckpt_engine.v1 import manager_pb2
from tests.cluster import (
    Cluster,
    Replica,
    corrupt_after_sealing,
    eventually,
    generate,
    outcomes,
    running_cluster,
)
from tests.faults.proxy import Loop, Proxy
from tests.ports import free_address
from tests.tiny_model import decisive_prompts, make_tiny_qwen3, named_weights, reference_tokens

pytestmark = pytest.mark.slow

TOKENS = 8


class TwoNodes:
    """The agents of one replica. Both processes are Replicas of the cluster, so that it ends them."""

    def __init__(self, cluster: Cluster, model: Path, loop: Loop) -> None:
        token = cluster.path / "node.token"
        token.write_text("0123456789abcdef" * 4)
        self.cluster, self.model = cluster, model
        leader = free_address()
        self.link = Proxy(loop, ("127.0.0.1", int(leader.rpartition(":")[2])))
        self.options = ["--nodes", "2", "--leader", leader, "--node-token", str(token)]
        self.options += [
            "--deadline",
            "engine_restart_first=0.2",
            "--deadline",
            "lease=8",
            "--deadline",
            "unanswered=3",
        ]
        self.leader = self.start(0)
        self.follower = self.start(1)

    def start(self, rank: int) -> Replica:
        runtime = self.cluster.path / f"n{rank}"
        runtime.mkdir(exist_ok=True, mode=0o700)
        name = "wide" if rank == 0 else "wide-node-1"
        dialled = [] if rank == 0 else ["--leader", self.link.address]  # the last one counts
        return self.cluster.replica(
            name,
            "reference",
            self.model,
            *("--tensor-parallel", "2"),
            options=[*self.options, *dialled, "--node-rank", str(rank)],
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
        pair = TwoNodes(cluster, bare_model, Loop())
        try:
            pair.leader.registered()
            yield pair
        finally:
            cluster.close()
            pair.link.close()


@pytest.fixture(scope="module")
def trainer(nodes: TwoNodes) -> Iterator[Trainer]:
    with Trainer(nodes.cluster.address, lineage="nodes") as found:
        yield found


def model_of(tmp_path: Path, seed: int) -> Any:
    return make_tiny_qwen3(tmp_path / str(seed), seed, vocabulary=500, weights=False)


def check_serves(nodes: TwoNodes, model: Any) -> None:
    prompt = decisive_prompts(model, 1, TOKENS)[0]
    assert generate(nodes.leader, prompt, TOKENS) == reference_tokens(model, prompt, TOKENS).tokens


def test_one_replica_of_two_nodes_is_updated(nodes: TwoNodes, trainer: Trainer, tmp_path: Path) -> None:
    status = nodes.leader.status
    assert status is not None
    told = [(worker.rank, worker.node, worker.pid) for worker in status.workers]
    assert told == [(0, 0, nodes.worker(0).pid), (1, 1, nodes.worker(1).pid)]
    assert len(nodes.cluster.status().replicas) == 1, "the follower is no replica of its own"
    for version, seed in enumerate((3, 4)):
        model = model_of(tmp_path, seed)
        trainer.publish(named_weights(model))
        report = trainer.update_weights(version=version)
        assert report.ok, report
        (replica,) = report.message.replicas
        assert len(replica.workers) == 2
        check_serves(nodes, model)


def answer(nodes: TwoNodes) -> httpx.Response:
    """To a request for tokens, whatever it is."""
    return httpx.post(
        f"{nodes.leader.url}/generate", json={"input_ids": [1, 2], "max_tokens": 1, "temperature": 0}, timeout=60
    )


def closed(nodes: TwoNodes) -> bool:
    """Whether the replica says that it does not serve, and answers no request either, if anything is there."""
    status = nodes.leader.status
    if status is None or status.serving:
        return False
    try:
        return answer(nodes).status_code == 503
    except httpx.TransportError:
        return True


def boot_ids(nodes: TwoNodes) -> set[bytes]:
    status = nodes.leader.status
    return {worker.boot_id for worker in status.workers} if status is not None and status.engine.url else set()


def all_new(nodes: TwoNodes, before: set[bytes]) -> bool:
    now = boot_ids(nodes)
    return len(now) == 2 and not now & before


def test_weights_that_are_torn_on_the_other_node_only_close_the_replica(
    nodes: TwoNodes, trainer: Trainer, tmp_path: Path
) -> None:
    model = model_of(tmp_path, 5)
    trainer.publish(model, move=True)
    assert trainer.update_weights(version=10).ok
    weight = model.model.layers[0].mlp.down_proj.weight  # its last input features are rank 1's alone
    restore = corrupt_after_sealing(trainer, weight, weight[0].nbytes - 1)
    try:
        report = trainer.update_weights(version=11)
    finally:
        restore()
    assert outcomes(report) == {"wide": "quarantined"}
    status = nodes.leader.status
    assert status is not None
    assert [worker.state for worker in status.workers] == [
        manager_pb2.WORKER_STATE_CLEAN,
        manager_pb2.WORKER_STATE_DIRTY,
    ]
    refused = answer(nodes)
    assert (refused.status_code, "worker 1" in refused.text) == (503, True)
    with torch.no_grad():
        weight.view(torch.uint8).view(-1)[weight[0].nbytes - 1] ^= 1
    assert trainer.update_weights(version=12).ok
    check_serves(nodes, model)


def test_a_worker_of_the_other_node_that_stands_still_closes_the_replica(
    nodes: TwoNodes, trainer: Trainer, tmp_path: Path
) -> None:
    model = model_of(tmp_path, 6)
    trainer.publish(model, move=True)  # not sealed between updates: nobody tries again by himself
    assert trainer.update_weights(version=20).ok
    before = boot_ids(nodes)
    worker = nodes.worker(1)
    worker.suspend()
    try:
        report = trainer.update_weights(version=21, timeout=10)
        assert outcomes(report) == {"wide": "quarantined"}
        assert closed(nodes)
        # Nobody gets it to answer: its agents replace the engine, on both nodes.
        eventually("another engine", 150, lambda: all_new(nodes, before))
    finally:
        if worker.is_running():
            worker.resume()
    assert closed(nodes)
    assert trainer.update_weights(version=22).ok
    check_serves(nodes, model)


def test_a_worker_of_the_other_node_that_dies_ends_the_whole_engine(
    nodes: TwoNodes, trainer: Trainer, tmp_path: Path
) -> None:
    model = model_of(tmp_path, 7)
    trainer.publish(named_weights(model))
    assert trainer.update_weights(version=30).ok
    before, near = boot_ids(nodes), nodes.worker(0)
    nodes.worker(1).kill()
    eventually("the replica is closed", 60, lambda: closed(nodes))
    near.wait(60)
    eventually("another engine", 150, lambda: all_new(nodes, before))
    eventually("it is closed until it has weights", 60, lambda: closed(nodes))
    eventually("an update", 60, lambda: trainer.update_weights(version=31).ok)
    check_serves(nodes, model)


def test_a_link_that_breaks_for_a_moment_costs_no_engine(nodes: TwoNodes, trainer: Trainer, tmp_path: Path) -> None:
    """Cut again and again while updates run: each ends, nothing torn is served, and the engine is the same one."""
    model = model_of(tmp_path, 9)
    trainer.publish(named_weights(model))
    before = boot_ids(nodes)
    ended = threading.Event()

    def cut() -> None:
        while not ended.wait(2.0):
            if nodes.link.connected:  # each connection has had its moment
                nodes.link.cut()

    cutting = threading.Thread(target=cut)
    cutting.start()
    found: list[str] = []
    try:
        for version in range(35, 45):
            time.sleep(0.3)  # so that cuts fall into different steps
            try:
                found += outcomes(trainer.update_weights(version=version, timeout=30)).values()
            except CkptEngineError as error:
                found.append(str(error))  # refused: no replica could be prepared while it was cut off
    finally:
        ended.set()
        cutting.join(60)
    assert len(found) == 10
    eventually("an update", 60, lambda: trainer.update_weights(version=45).ok)
    check_serves(nodes, model)
    assert boot_ids(nodes) == before


@pytest.mark.parametrize("rank", [0, 1])
def test_an_agent_that_is_killed_takes_the_whole_engine_with_it(
    nodes: TwoNodes, trainer: Trainer, tmp_path: Path, rank: int
) -> None:
    version = 50 + 10 * rank
    model = model_of(tmp_path, 8)
    trainer.publish(named_weights(model))
    assert trainer.update_weights(version=version).ok
    before = boot_ids(nodes)
    workers = [nodes.worker(0), nodes.worker(1)]
    (nodes.leader, nodes.follower)[rank].process.kill()
    _, alive = psutil.wait_procs(workers, 60)
    assert not alive, "both nodes' workers have ended"
    if rank == 0:
        nodes.leader = nodes.start(0)
    else:
        nodes.follower = nodes.start(1)
    eventually("another engine", 150, lambda: all_new(nodes, before))
    eventually("an update", 60, lambda: trainer.update_weights(version=version + 1).ok)
    check_serves(nodes, model)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("token", "leader"),
        pytest.param("nodes", "cannot follow: node 0 has --nodes 2", marks=pytest.mark.slow),
        pytest.param("rank", "has an agent already", marks=pytest.mark.slow),
    ],
)
def test_an_agent_that_does_not_belong_there_is_not_taken_in(
    nodes: TwoNodes, tmp_path: Path, wrong: str, words: str
) -> None:
    """Another token, another number of nodes, a rank that is taken; the engine that runs goes on."""
    before = boot_ids(nodes)
    options = dict(zip(nodes.options[::2], nodes.options[1::2], strict=True)) | {"--node-rank": "1"}
    if wrong == "token":
        options["--node-token"] = str(tmp_path / "other.token")
        (tmp_path / "other.token").write_text("f" * 64)
    if wrong == "nodes":
        options["--nodes"] = "3"
    stranger = nodes.cluster.replica(
        f"stranger-{wrong}",
        "reference",
        nodes.model,
        *("--tensor-parallel", "6"),
        options=[word for option in options.items() for word in option],
        environment={"XDG_RUNTIME_DIR": str(tmp_path)},
    )
    try:
        eventually(words, 120, lambda: words in stranger.tail())
        assert "joined the leader" not in stranger.tail()
    finally:
        stranger.stop()
    assert boot_ids(nodes) == before
