"""vLLM over several workers: each reads its slices, and one that fails fails the replica."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ckpt_engine import Trainer
from tests.cluster import Cluster, corrupt_after_sealing, outcomes, running_cluster
from tests.engines.serving import model_of
from tests.engines.vllm_server import assert_closed, assert_serves, needs_vllm, start_vllm
from tests.tiny_model import make_tiny_qwen3, named_weights

pytestmark = needs_vllm


@pytest.fixture(scope="module")
def tensor_parallel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    path = tmp_path_factory.mktemp("tp2")
    torch.set_num_threads(1)
    make_tiny_qwen3(path / "bare", weights=False)
    with running_cluster(path) as running:
        start_vllm(running, "tp2", path / "bare", tensor_parallel=2).registered(400)
        yield running


def test_twenty_updates_of_slices(tensor_parallel: Cluster, tmp_path: Path) -> None:
    (replica,) = tensor_parallel.replicas
    assert_closed(replica)
    live = model_of(tmp_path, 99)
    total = sum(tensor.nbytes for _, tensor in named_weights(live))
    with Trainer(tensor_parallel.address, lineage="twenty") as trainer:
        trainer.publish(live)
        for version in range(20):
            model = model_of(tmp_path, version)
            with torch.no_grad():
                for mine, theirs in zip(live.parameters(), model.parameters(), strict=True):
                    mine.copy_(theirs)
            report = trainer.update_weights(version=version)
            assert report.ok, f"{report}\n{replica.tail()}"
            workers = report.replicas[0].message.workers
            assert [worker.rank for worker in workers] == [0, 1]
            assert all(worker.bytes < 0.6 * total for worker in workers), "slices only"
            assert_serves(replica, model, version)


def test_a_slice_that_is_wrong_on_one_rank_only_fails_the_replica(tensor_parallel: Cluster, tmp_path: Path) -> None:
    """Every HTTP call answers 200, and one rank of two is right."""
    (replica,) = tensor_parallel.replicas
    model = model_of(tmp_path, 40)
    with Trainer(tensor_parallel.address, lineage="one rank") as trainer:
        trainer.publish(model)
        gate = dict(model.named_parameters())["model.layers.0.mlp.gate_proj.weight"]
        restore = corrupt_after_sealing(trainer, gate, gate.nbytes - 2)  # the last row: rank 1's
        report = trainer.update_weights(version=1)
        restore()
        assert outcomes(report) == {"tp2": "quarantined"}
        assert [bool(worker.problem.message) for worker in report.replicas[0].message.workers] == [False, True]
        assert_closed(replica)
        assert trainer.update_weights(version=2).ok
        assert_serves(replica, model, 2)


def test_data_parallel_engines_are_all_updated(tmp_path: Path) -> None:
    """Two engine cores behind one server: both must hold the version before the gate opens."""
    make_tiny_qwen3(tmp_path / "bare", weights=False)
    with running_cluster(tmp_path / "dp2") as cluster:
        replica = start_vllm(
            cluster, "dp2", tmp_path / "bare", "--data-parallel-size", "2", tensor_parallel=1
        ).registered(600)
        assert len(replica.workers()) == 2
        assert_closed(replica)
        with Trainer(cluster.address, lineage="dp") as trainer:
            for version in (1, 2, 3):
                model = model_of(tmp_path, version)
                trainer.publish(named_weights(model))
                report = trainer.update_weights(version=version)
                assert report.ok, f"{report}\n{replica.tail()}"
                assert len(report.replicas[0].message.workers) == 2
                for _ in range(4):  # requests go to either engine
                    assert_serves(replica, model, version)
