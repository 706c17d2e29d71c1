"""A worker of one replica is stopped (SIGSTOP), so bringing that one up hangs: the others get their next update."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch

from ckpt_engine import Trainer
from ckpt_engine.core.deadlines import ENVIRONMENT
from tests.cluster import eventually, outcomes, running_cluster
from tests.end_to_end.conftest import PADDED_VOCABULARY
from tests.tiny_model import make_tiny_qwen3

pytestmark = pytest.mark.slow


def test_an_update_does_not_wait_for_a_late_replica_with_a_stopped_worker(
    tmp_path: Path, bare_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next update has 30 s, and whoever is brought up may take 300."""
    monkeypatch.setenv(ENVIRONMENT, "resume=3")
    torch.set_num_threads(1)
    models = [
        make_tiny_qwen3(tmp_path / f"{seed}", seed, vocabulary=PADDED_VOCABULARY, weights=False) for seed in (1, 2)
    ]
    with running_cluster(tmp_path / "cluster") as cluster, Trainer(cluster.address, lineage="run") as trainer:
        well = cluster.replica("well", "reference", bare_model)
        hung = cluster.replica("hung", "reference", bare_model, "--tensor-parallel", "2")
        for replica in (well, hung):
            replica.registered()
        trainer.publish(models[0], snapshot=True)
        assert trainer.update_weights(version=0).ok
        trainer.publish(models[1], snapshot=True)  # plans that no worker has ready yet
        worker = hung.workers()[1]
        worker.send_signal(signal.SIGSTOP)
        try:
            first = trainer.update_weights(version=1, timeout=60.0)
            assert outcomes(first)["well"] == "new_serving"
            assert outcomes(first)["hung"] != "new_serving"
            eventually("it is brought up", 60, lambda: "bringing up hung" in cluster.status().phase)
            second = trainer.update_weights(version=2, timeout=30.0)
            assert outcomes(second)["well"] == "new_serving"
            assert outcomes(second)["hung"] != "new_serving"
        finally:
            worker.send_signal(signal.SIGCONT)
        hung.serving(2)
