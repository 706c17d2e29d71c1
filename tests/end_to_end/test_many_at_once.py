"""Many replicas that start on one host in the same moment."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ckpt_engine import Trainer
from tests.cluster import outcomes, running_cluster
from tests.tiny_model import make_tiny_qwen3, named_weights

REPLICAS = 8


@pytest.mark.slow
def test_eight_replicas_start_at_once_and_are_updated(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    model = make_tiny_qwen3(tmp_path / "model", 3, weights=False)
    with running_cluster(tmp_path / "cluster") as cluster:
        for number in range(REPLICAS):
            cluster.replica(f"replica-{number}", "reference", tmp_path / "model", options=["--startup-timeout", "900"])
        for replica in cluster.replicas:
            replica.registered(900)
        assert len({replica.url for replica in cluster.replicas}) == REPLICAS
        with Trainer(cluster.address, lineage="many") as trainer:
            trainer.publish(named_weights(model))
            report = trainer.update_weights(min_replicas=REPLICAS)
        assert set(outcomes(report).values()) == {"new_serving"}
        assert not any("was taken" in replica.tail() for replica in cluster.replicas)
