"""What an operator does about one replica: `ckpt-engine replica retry`, `hold`, `release` and `evict`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ckpt_engine import Trainer
from ckpt_engine.commands.agent import EVICTED
from ckpt_engine.core.deadlines import ENVIRONMENT
from tests.cluster import Cluster, eventually, running_cluster
from tests.tiny_model import make_tiny_qwen3

pytestmark = pytest.mark.slow


def operate(cluster: Cluster, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ckpt_engine", "replica", *words, "--manager", cluster.address]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


def as_text(cluster: Cluster, command: str) -> str:
    words = [sys.executable, "-m", "ckpt_engine", command, "--manager", cluster.address]
    return subprocess.run(words, capture_output=True, text=True, timeout=240, check=True).stdout


def test_a_replica_that_could_not_be_brought_is_tried_again_and_an_evicted_one_ends(
    tmp_path: Path, bare_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The snapshot that late replicas read is damaged until the next attempt is far away; then it is whole again."""
    monkeypatch.setenv(ENVIRONMENT, "catch_up_retry=600 catch_up_retry_most=600")
    torch.set_num_threads(1)
    with running_cluster(tmp_path) as cluster, Trainer(cluster.address, lineage="late") as trainer:
        unknown = operate(cluster, "retry", "nobody")
        assert unknown.returncode == 1
        assert "there is no replica 'nobody'" in unknown.stderr
        trainer.publish(make_tiny_qwen3(tmp_path / "model", 7, vocabulary=500, weights=False), snapshot=True)
        assert trainer.update_weights(version=1, min_replicas=0).message.identity.version == 1
        source = trainer._sealer._source
        damaged = source._sealed[0].view(torch.uint8).view(-1)  # type: ignore[union-attr]
        damaged[3] ^= 1
        late = cluster.replica("late", "reference", bare_model).registered()

        def waits() -> bool:
            """An attempt has ended: it must not find what is made whole below."""
            (replica,) = cluster.status().replicas
            return replica.drift.HasField("next_attempt_seconds")

        eventually("an attempt failed", 120, waits)
        shown = as_text(cluster, "status")
        assert "late: " in shown
        assert "it is to serve version 1 of late: 1 attempt to bring it failed" in shown
        assert "next attempt in" in shown
        assert not late.status.serving  # type: ignore[union-attr]
        damaged[3] ^= 1
        tried = operate(cluster, "retry", "late")
        assert tried.returncode == 0, tried.stderr
        assert "replica late: it is brought to version 1 of lineage 'late'" in tried.stdout
        late.serving(1)
        assert "nothing is to be done: it serves version 1" in operate(cluster, "retry", "late").stdout

        held = operate(cluster, "hold", "late", "--reason", "it is looked at")
        assert held.returncode == 0, held.stderr
        assert "replica late: held by an operator since 20" in held.stdout
        assert "(it is looked at): release it with `ckpt-engine replica release late`" in held.stdout
        cluster.restart_manager()
        late.serving(1)
        assert "late: it is held by an operator since 20" in as_text(cluster, "status")
        assert operate(cluster, "retry", "late").returncode == 0, "it holds what it is to serve"
        refused = operate(cluster, "release", "nobody")
        assert refused.returncode == 1
        assert "there is no replica 'nobody'" in refused.stderr
        assert operate(cluster, "release", "late").stdout == "replica late: released; it holds what it is to serve\n"

        engine = late.workers()[0]
        evicted = operate(cluster, "evict", "late", "--reason", "its host is needed")
        assert evicted.returncode == 0, evicted.stderr
        assert late.process.wait(60) == EVICTED
        assert "was evicted by an operator: its host is needed" in late.tail()
        assert not engine.is_running(), "the engine that it launched must end with it"
        assert [replica.name for replica in cluster.status().replicas] == []
        cluster.replica("late", "reference", bare_model).registered().serving(1)
