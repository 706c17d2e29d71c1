"""Real engines that install version after version by what has changed in it, while their processes are killed: every
token is that of the whole version, by transformers' own count.

On a CPU vLLM and SGLang repack their linear layers, which go in full; embeddings and norms go by their changes.
"""

from __future__ import annotations

import contextlib
import random
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from ckpt_engine import Trainer
from tests.cluster import Replica, running_cluster
from tests.conformance.engines import ENGINES, Engine
from tests.conformance.weights import TOKENS, Models
from tests.tiny_model import ROUNDING, regrets
from tests.waiting import eventually

pytestmark = pytest.mark.timeout(1800)  # engines start slowly on a busy machine

MARKS = {"reference": pytest.mark.slow}
VERSIONS = 20
KILLED_AFTER = {"reference": (4, 9, 14)}  # versions; a real engine takes a minute to start again
SHARE = 0.005


def step(live: Any, number: int) -> None:
    """A step of training that changes few elements, each by much."""
    generator = torch.Generator().manual_seed(number)
    with torch.no_grad():
        for parameter in live.parameters():
            chosen = torch.rand(parameter.shape, generator=generator) < SHARE
            chosen.view(-1)[number % parameter.numel()] = True
            factors = torch.where(chosen, 1.5, 1.0).to(parameter.dtype)
            parameter.mul_(factors)


def check_tokens(engine: Engine, replica: Replica, live: Any, number: int) -> None:
    """Whatever the engine answers is what these very weights say, but for ties."""
    prompt = [random.Random(number).randrange(live.config.vocab_size) for _ in range(6)]
    answer = engine.complete(replica, prompt, TOKENS)
    assert len(answer.tokens) == TOKENS, f"{answer}\n{replica.tail()}"
    assert max(regrets(live, prompt, list(answer.tokens))) < ROUNDING


def kill(engine: Engine, replica: Replica, version: int) -> None:
    """Kills the engine, and waits until another one serves the version again."""
    before = {process.pid for process in replica.workers()}
    for process in engine.processes(replica):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()

    def serves() -> bool:
        status = replica.status
        again = status is not None and before.isdisjoint(worker.pid for worker in status.workers)
        return again and status is not None and status.serving and status.identity.version == version

    eventually(f"another engine serves version {version}", engine.start_seconds, serves)


@pytest.mark.parametrize(
    "engine",
    [
        pytest.param(each, id=each.kind, marks=MARKS.get(each.kind, pytest.mark.engine))
        for each in ENGINES
        if each.kind != "sglang"  # its CPU build keeps no tensor as it is served, so all of it goes in full
    ],
)
def test_versions_go_by_changes_and_processes_are_killed_in_between(tmp_path: Path, engine: Engine) -> None:
    if reason := engine.why_not_here():
        pytest.skip(reason)
    torch.set_num_threads(1)
    models = Models(tmp_path / "models")
    by_changes = []
    with running_cluster(tmp_path / "cluster") as cluster, Trainer(cluster.address, lineage="run") as trainer:
        replica = engine.start(cluster, "first", models.bare, (), {})
        relay = cluster.relay("near", "--memory", "64MiB").registered()
        replica.registered(engine.start_seconds)
        live = models.live(0)
        trainer.publish(live, snapshot=True)
        killed = KILLED_AFTER.get(engine.kind, (VERSIONS // 2,))
        for version in range(1, VERSIONS + 1):
            step(live, version)
            report = trainer.update_weights(version=version, prefetch="always")
            assert report.ok, f"{report}\n{replica.tail()}"
            assert report.verified
            (worker,) = report.replicas[0].message.workers
            if worker.by_changes:
                by_changes.append(version)
                assert worker.changed_elements
                assert not worker.in_full
            else:
                assert "holds no version that it has proved" in worker.in_full
                assert version - 1 in (0, *killed), f"{report}\n{relay.said}"
            check_tokens(engine, replica, live, version)
            if version in killed:
                kill(engine, replica, version)
                check_tokens(engine, replica, live, version)
        assert by_changes[-1] == VERSIONS
        assert len(by_changes) >= VERSIONS - 1 - len(killed)
