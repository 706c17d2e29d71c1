"""A real vLLM server on two workers: each reads its slices, one that fails fails the replica; sleep, wake and hybrid
updates have right tokens, the right order, and a gate that closes first. And a judge, whose weights are its own.

On a CPU vLLM's sleep moves no memory; tests/gpu has the same with memory that is really given up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from ckpt_engine import Trainer
from ckpt_engine.channel import ManagerStub
from ckpt_engine.gate.directory import EngineDirectory
from ckpt_engine.v1 import manager_pb2
from tests.cluster import Cluster, Replica, corrupt_after_sealing, outcomes, running_cluster
from tests.conformance.weights import load
from tests.engines.serving import model_of, publish
from tests.engines.vllm_server import (
    TOKENS,
    assert_closed,
    assert_serves,
    complete,
    needs_vllm,
    start_vllm,
    tokens,
    wait_until_open,
)
from tests.tiny_model import DECISIVE_GAP, decisive_prompts, make_tiny_qwen3, named_weights, reference_tokens

pytestmark = needs_vllm

NONE, CLEAN = manager_pb2.WORKER_STATE_NONE, manager_pb2.WORKER_STATE_CLEAN


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One hybrid server on two workers."""
    path = tmp_path_factory.mktemp("vllm-sleep")
    torch.set_num_threads(1)
    make_tiny_qwen3(path / "bare", weights=False)
    with running_cluster(path) as running:
        start_vllm(running, "vllm", path / "bare", tensor_parallel=2, options=("--mode", "hybrid")).registered(600)
        yield running


@pytest.fixture
def replica(cluster: Cluster) -> Replica:
    return cluster.replicas[0]


def sleep(cluster: Cluster, level: int) -> str:
    """What is wrong; empty if it sleeps."""
    stub = ManagerStub(cluster.channel)
    request = manager_pb2.SleepRequest(level=level, timeout_seconds=120)
    return _problem(stub.Sleep(request, timeout=130).results)


def wake(cluster: Cluster, *tags: str) -> str:
    """What is wrong; empty if they are awake."""
    stub = ManagerStub(cluster.channel)
    request = manager_pb2.WakeRequest(tags=tags, timeout_seconds=120)
    return _problem(stub.Wake(request, timeout=130).results)


def _problem(results: Sequence[manager_pb2.SleepWakeResult]) -> str:
    (result,) = results
    return result.problem.message if result.HasField("problem") else ""


def states(replica: Replica) -> list[manager_pb2.WorkerState]:
    """As the agent told last; it tells changes at once."""
    status = replica.status
    assert status is not None
    return [worker.state for worker in status.workers]


def why_closed(replica: Replica) -> str:
    response = complete(replica, [1, 2, 3], 2)
    assert response.status_code == 503, response.text
    detail: str = response.json()["detail"]
    return detail


def test_updates_of_slices(cluster: Cluster, replica: Replica, tmp_path: Path) -> None:
    assert_closed(replica)
    live = model_of(tmp_path, 99)
    total = sum(tensor.nbytes for _, tensor in named_weights(live))
    with Trainer(cluster.address, lineage="slices") as trainer:
        trainer.publish(live, move=True)
        for version in range(8):
            model = model_of(tmp_path, version)
            load(live, model)
            report = trainer.update_weights(version=version)
            assert report.ok, f"{report}\n{replica.tail()}"
            workers = report.replicas[0].message.workers
            assert [worker.rank for worker in workers] == [0, 1]
            assert all(worker.bytes < 0.6 * total for worker in workers), "slices only"
            assert_serves(replica, model, version)


def test_a_slice_that_is_wrong_on_one_rank_only_fails_the_replica(
    cluster: Cluster, replica: Replica, tmp_path: Path
) -> None:
    """Every HTTP call answers 200, and one rank of two is right."""
    model = model_of(tmp_path, 40)
    with Trainer(cluster.address, lineage="one rank") as trainer:
        trainer.publish(model, move=True)
        gate = dict(model.named_parameters())["model.layers.0.mlp.gate_proj.weight"]
        restore = corrupt_after_sealing(trainer, gate, gate.nbytes - 2)  # the last row: rank 1's
        report = trainer.update_weights(version=1)
        restore()
        assert outcomes(report) == {"vllm": "quarantined"}
        assert [bool(worker.problem.message) for worker in report.replicas[0].message.workers] == [False, True]
        assert_closed(replica)
        assert trainer.update_weights(version=2).ok
        assert_serves(replica, model, 2)


@pytest.mark.parametrize("level", [1, 2])
def test_an_update_wakes_a_hybrid_replica_with_the_right_tokens(
    cluster: Cluster, replica: Replica, tmp_path: Path, level: int
) -> None:
    """The same prompt is asked before and after: a prefix cache that survived would answer with the old weights'."""
    model = model_of(tmp_path, 40)
    with Trainer(cluster.address, lineage=f"hybrid-{level}") as trainer:
        publish(trainer, model)
        assert trainer.update_weights(version=0).ok
        for version in (1, 2):
            prompt = decisive_prompts(model, 1, TOKENS, length=48)[0]
            before = reference_tokens(model, prompt, TOKENS)
            for _ in range(2):  # the second one comes from the prefix cache
                assert tokens(complete(replica, prompt)) == before.tokens
            assert sleep(cluster, level) == ""
            assert ("discarded" if level == 2 else "kept on the host") in why_closed(replica)
            assert_closed(replica)
            status = replica.status
            assert status is not None
            assert status.asleep
            assert status.mode == manager_pb2.MODE_HYBRID
            assert states(replica) == [NONE if level == 2 else CLEAN] * 2
            model = model_of(tmp_path, 40 + version)
            publish(trainer, model)
            report = trainer.update_weights(version=version)
            assert report.ok, f"{report}\n{replica.tail()}"
            after = reference_tokens(model, prompt, TOKENS)
            assert after.tokens != before.tokens
            if after.gap > DECISIVE_GAP:
                assert tokens(complete(replica, prompt)) == after.tokens
            assert_serves(replica, model, version)


def test_discarded_weights_are_not_served_by_waking(cluster: Cluster, replica: Replica, tmp_path: Path) -> None:
    model = model_of(tmp_path, 51)
    with Trainer(cluster.address, lineage="discarded") as trainer:
        trainer.publish(model, move=True)  # read where it lies: nothing stays sealed, so nothing comes back by itself
        assert trainer.update_weights(version=1).ok
        assert sleep(cluster, 2) == ""
        assert wake(cluster) == ""
        assert_closed(replica)
        assert states(replica) == [NONE, NONE]
        assert sleep(cluster, 2) == "", "from half awake back to sleep"
        assert "discarded" in why_closed(replica)
        assert wake(cluster, "weights") == ""
        report = trainer.update_weights(version=2)
        assert report.ok, f"{report}\n{replica.tail()}"
        assert_serves(replica, model, 2)


def test_a_worker_says_that_it_holds_nothing_whoever_makes_it_discard(
    cluster: Cluster, replica: Replica, tmp_path: Path
) -> None:
    """A call of vLLM's own route past the agent, as a leaked token would allow."""
    model = model_of(tmp_path, 52)
    with Trainer(cluster.address, lineage="past the agent") as trainer:
        trainer.publish(model, move=True)  # read where it lies: nobody brings it back before the next update
        assert trainer.update_weights(version=1).ok
        directory = Path(httpx.get(f"{replica.url}/ckpt_engine/info", timeout=30).json()["directory"])
        headers = {"x-ckpt-engine-token": EngineDirectory(directory).token()}
        assert httpx.post(f"{replica.url}/sleep?level=2", timeout=60).status_code == 403
        assert httpx.post(f"{replica.url}/sleep?level=2", headers=headers, timeout=60).status_code == 200
        assert "holds no weights" in why_closed(replica)
        assert httpx.post(f"{replica.url}/wake_up", headers=headers, timeout=60).status_code == 200
        assert_closed(replica)
        report = trainer.update_weights(version=2)
        assert report.ok, f"{report}\n{replica.tail()}"
        assert_serves(replica, model, 2)


def test_a_colocated_judge_serves_its_own_weights_and_no_update_touches_it(tmp_path: Path) -> None:
    judge_model = make_tiny_qwen3(tmp_path / "judge", 70)
    prompt = decisive_prompts(judge_model, 1, TOKENS)[0]
    expected = reference_tokens(judge_model, prompt, TOKENS)
    assert expected.gap > DECISIVE_GAP
    with running_cluster(tmp_path / "cluster") as running:
        judge = start_vllm(
            running, "judge", tmp_path / "judge", "--load-format", "auto", options=("--mode", "colocated")
        ).registered(600)
        wait_until_open(judge, 60)
        assert tokens(complete(judge, prompt)) == expected.tokens
        with Trainer(running.address, lineage="policy") as trainer:
            publish(trainer, model_of(tmp_path, 71))
            report: Any = trainer.update_weights(version=1, min_replicas=0)
            assert outcomes(report) == {}
        assert "discards" in sleep(running, 2)
        assert tokens(complete(judge, prompt)) == expected.tokens
        assert sleep(running, 1) == ""
        assert "asleep" in why_closed(judge)
        assert wake(running, "weights") == ""
        assert wake(running, "kv_cache") == ""
        answer = complete(judge, prompt)
        assert tokens(answer) == expected.tokens
        assert "x-ckpt-engine-admitted-version" not in answer.headers
        assert states(judge) == [NONE]
