"""A checkpoint directory that trainer and replica both have, on two hosts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import plain_replica
import pytest
import torch
from plain_replica import PlainReplica
from safetensors.torch import save_file

from ckpt_engine import Trainer
from ckpt_engine.host.facts import this_host
from ckpt_engine.v1.weights_pb2 import Host


def elsewhere() -> Host:
    """Another host: nothing of the trainer's is reached from it but the files."""
    found = this_host()
    found.boot_id, found.name = "another", "h2"
    return found


def test_an_update_over_a_directory_that_two_hosts_have(
    manager: str, replica: Callable[..., PlainReplica], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plain_replica, "this_host", elsewhere)
    reader = replica()
    weights = {"a.weight": torch.randn(64, 48).to(torch.bfloat16), "b.bias": torch.randn(5)}
    save_file(weights, tmp_path / "model.safetensors")
    with Trainer(manager, lineage="files") as trainer:
        trainer.publish(tmp_path)
        trainer.wait_for_replicas(timeout=60)
        report = trainer.update_weights()
        assert report.ok
        (edge,) = report.replicas[0].message.edges
        assert edge.transport == "file"
        assert "a directory that both have" in edge.reason
        assert all(torch.equal(reader.weights[name], weight) for name, weight in weights.items())
