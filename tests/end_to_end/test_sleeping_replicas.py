"""Modes, sleep and wake on real processes: who is woken by an update, who is left alone, and what crashes leave."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from ckpt_engine import CkptEngineError, Trainer
from ckpt_engine.v1 import manager_pb2
from tests.cluster import Cluster, Replica, eventually, generate, outcomes, running_cluster
from tests.end_to_end.conftest import PADDED_VOCABULARY
from tests.reference.engine_process import engine
from tests.tiny_model import decisive_prompts, make_tiny_qwen3, reference_tokens

pytestmark = pytest.mark.slow

TOKENS = 16


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, bare_model: Path) -> Iterator[Cluster]:
    """A hybrid replica of two workers, a standalone one, and a colocated judge with weights of its own."""
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("sleep")
    make_tiny_qwen3(path / "judge", 5)
    with running_cluster(path / "cluster") as running:
        running.replica("hybrid", "reference", bare_model, "--tensor-parallel", "2", options=("--mode", "hybrid"))
        running.replica("alone", "reference", bare_model)
        running.replica("judge", "reference", path / "judge", options=("--mode", "colocated"))
        for replica in running.replicas:
            replica.registered()
        yield running


def model_of(path: Path, seed: int) -> Any:
    return make_tiny_qwen3(path / str(seed), seed, vocabulary=PADDED_VOCABULARY, weights=False)


def named(cluster: Cluster, name: str) -> Replica:
    return next(replica for replica in cluster.replicas if replica.name == name)


def assert_serves(replica: Replica, model: Any) -> None:
    prompt = decisive_prompts(model, 1, TOKENS)[0]
    assert generate(replica, prompt, TOKENS) == reference_tokens(model, prompt, TOKENS).tokens


def why_closed(url: str) -> str:
    response = httpx.post(f"{url}/generate", json={"input_ids": [1, 2], "max_tokens": 2}, timeout=60)
    assert response.status_code == 503, response.text
    detail: str = response.json()["detail"]
    return detail


def memory(url: str) -> list[str]:
    """What of its memory the engine itself says is given up."""
    given_up: list[str] = httpx.get(f"{url}/info", timeout=60).json()["asleep"]
    return given_up


@pytest.mark.parametrize("level", [pytest.param(1, marks=pytest.mark.hours), 2])  # 1: in the conformance suite
def test_a_hybrid_replica_sleeps_while_the_trainer_trains_and_is_woken_by_its_update(
    cluster: Cluster, tmp_path: Path, level: int
) -> None:
    hybrid, alone = named(cluster, "hybrid"), named(cluster, "alone")
    first, second = model_of(tmp_path, 1), model_of(tmp_path, 2)
    with Trainer(cluster.address, lineage=f"hybrid-{level}") as trainer:
        trainer.publish(first, move=True)
        assert trainer.update_weights().ok
        trainer.sleep(level)  # the hybrid ones, if none are named
        assert ("discarded" if level == 2 else "kept on the host") in why_closed(hybrid.url)
        assert memory(hybrid.url) == ["kv_cache", "weights"]
        assert_serves(alone, first)
        trainer.publish(second, move=True)
        report = trainer.update_weights()
        assert outcomes(report) == {"hybrid": "new_serving", "alone": "new_serving"}, report
        assert memory(hybrid.url) == []
        assert_serves(hybrid, second)


def test_a_standalone_replica_stays_asleep_until_somebody_wakes_it(cluster: Cluster, tmp_path: Path) -> None:
    alone, model = named(cluster, "alone"), model_of(tmp_path, 3)
    with Trainer(cluster.address, lineage="alone") as trainer:
        trainer.publish(model, move=True)
        assert trainer.update_weights().ok
        trainer.sleep(replicas=["alone"])
        report = trainer.update_weights(replicas=["alone"])
        assert outcomes(report) == {"alone": "quarantined"}
        assert "--mode hybrid" in report.replicas[0].problem
        with pytest.raises(CkptEngineError, match="before kv_cache"):
            trainer.wake(["kv_cache"], replicas=["alone"])
        trainer.wake(["weights"], replicas=["alone"])
        assert "not woken yet" in why_closed(alone.url)
        trainer.wake(["kv_cache"], replicas=["alone"])
        assert_serves(alone, model)


def test_no_update_touches_a_colocated_judge(cluster: Cluster, tmp_path: Path) -> None:
    judge, model = named(cluster, "judge"), make_tiny_qwen3(tmp_path / "judge", 5, weights=False)
    eventually("the judge serves", 60, lambda: (status := judge.status) and status.serving)
    assert_serves(judge, model)
    with Trainer(cluster.address, lineage="policy") as trainer:
        trainer.publish(model_of(tmp_path, 4), move=True)
        assert sorted(outcomes(trainer.update_weights())) == ["alone", "hybrid"]
        with pytest.raises(CkptEngineError, match="colocated"):
            trainer.update_weights(replicas=["judge"])
    assert_serves(judge, model)
    told = operate(cluster, "replica", "sleep", "judge", "--level", "2")
    assert told.returncode == 1
    assert "discards" in told.stderr
    told = operate(cluster, "replica", "sleep", "judge")
    assert (told.returncode, told.stdout) == (0, "replica judge: asleep\n")
    assert "asleep" in why_closed(judge.url)
    assert operate(cluster, "replica", "wake", "judge", "--tag", "weights").returncode == 0
    assert "asleep" in why_closed(judge.url)
    assert operate(cluster, "replica", "wake", "judge").returncode == 0
    assert_serves(judge, model)
    status = judge.status
    assert status is not None
    assert status.mode == manager_pb2.MODE_COLOCATED
    assert [worker.state for worker in status.workers] == [manager_pb2.WORKER_STATE_NONE]


def test_sleep_outlives_the_agent(tmp_path: Path, bare_model: Path) -> None:
    """An engine that runs beside its agent: killed while the engine sleeps, the agent's successor finds it asleep, and
    the update wakes it."""
    with running_cluster(tmp_path / "cluster") as running, engine(bare_model, tmp_path / "engine.log") as server:
        first = attach(running, "first", server.url)
        with Trainer(running.address, lineage="kept") as trainer:
            trainer.publish(model_of(tmp_path, 6), move=True)
            assert trainer.update_weights().ok
            trainer.sleep(2)
            first.process.kill()
            first.process.wait(60)
            assert "discarded" in why_closed(server.url)
            second = attach(running, "second", server.url)
            eventually("it is told to be asleep", 60, lambda: (status := second.status) and status.asleep)
            assert memory(server.url) == ["kv_cache", "weights"]
            assert "discarded" in why_closed(server.url)
            model = model_of(tmp_path, 7)
            trainer.publish(model, move=True)
            report = trainer.update_weights()
            assert outcomes(report) == {"beside": "new_serving"}, f"{report}\n{second.tail()}"
            assert memory(server.url) == []
            assert_serves(second, model)


def attach(cluster: Cluster, log: str, url: str) -> Replica:
    """One agent after the other for the same engine, under one name."""
    command = [sys.executable, "-m", "ckpt_engine", "agent", "--manager", cluster.address, "--engine", "reference"]
    replica = Replica(cluster, log, [*command, "--name", "beside", "--mode", "hybrid", "--url", url], {})
    replica.name = "beside"
    cluster.replicas.append(replica)
    eventually("it is connected", 240, lambda: (status := replica.status) and status.connected and status.workers)
    return replica


def operate(cluster: Cluster, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ckpt_engine", *arguments, "--manager", cluster.address]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
