"""Updates in every pause mode and killed replicas, under hundreds of streams: no failed request, no wrong token."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ckpt_engine import Trainer
from tests.cluster import running_cluster
from tests.gateway.chaos import Killer, Streams, Tally, judge, reasons, update_for
from tests.gateway.gateways import running_gateway
from tests.tiny_model import make_tiny_qwen3

WEIGHTS = 5


def play(path: Path, replicas: int, streams: int, seconds: float, kills_apart: float, first_kill: float) -> Tally:
    """Runs it for so long, and judges what came out."""
    torch.set_num_threads(1)
    models = [make_tiny_qwen3(path / f"weights-{number}", number) for number in range(WEIGHTS)]
    model = make_tiny_qwen3(path / "model", 0)
    make_tiny_qwen3(path / "bare", weights=False)
    with running_cluster(path) as cluster:
        for number in range(replicas):
            cluster.replica(f"r{number}", "reference", path / "bare")
        for replica in cluster.replicas:
            replica.registered()
        options = ("--manager", cluster.address, "--workers", "2")
        with Trainer(cluster.address, lineage="run") as trainer, running_gateway(path / "g.log", *options) as gateway:
            trainer.publish(model)
            assert trainer.update_weights(version=0).ok
            gateway.ready()
            killer = Killer(cluster, kills_apart, first_kill)
            callers = Streams(gateway.url, streams, seed=1)
            try:
                versions = update_for(trainer, model, models, seconds, apart=1.0)
            finally:
                killer.end()
                answers = callers.end()
            tally = judge(answers, models, most=400 if seconds < 100 else 4000)
            print(f"{tally} versions={versions} kills={killer.kills}")
            assert not tally.failures, f"{reasons(tally)}\n{gateway.tail()}"
            assert killer.kills
    assert tally.judged
    assert tally.from_zero == 0
    return tally


@pytest.mark.slow
def test_a_short_while(tmp_path: Path) -> None:
    tally = play(tmp_path, replicas=2, streams=24, seconds=8, kills_apart=30, first_kill=3)
    assert tally.crossed
    assert tally.resumed


@pytest.mark.slow
@pytest.mark.hours
def test_ten_minutes(tmp_path: Path) -> None:
    tally = play(tmp_path, replicas=4, streams=256, seconds=600, kills_apart=10, first_kill=10)
    assert tally.crossed >= 1000
    assert tally.kills_late >= 50
