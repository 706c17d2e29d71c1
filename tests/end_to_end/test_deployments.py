"""Staged deployments on real processes: four replicas, a relay and a manager that is killed in the middle of them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_engine import Client, Trainer, UpdateReport
from ckpt_engine.v1 import manager_pb2
from tests.cluster import Cluster, eventually, running_cluster
from tests.end_to_end.conftest import PADDED_VOCABULARY
from tests.tiny_model import make_tiny_qwen3

pytestmark = pytest.mark.slow

DOCS = Path(__file__).resolve().parents[2] / "docs"
REPLICAS = ("a", "b", "c", "d")


class World:
    """A cluster whose replicas all read one relay, and a trainer whose weights change with each version."""

    def __init__(self, cluster: Cluster, path: Path) -> None:
        self.cluster = cluster
        self.model = make_tiny_qwen3(path / "model", 1, vocabulary=PADDED_VOCABULARY, weights=False)
        self.trainer = Trainer(cluster.address, lineage="run")
        self.trainer.publish(self.model)

    def train(self) -> None:
        """Changes the weights, as a step of an optimizer does."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(0.001)

    def begin(self, **options: Any) -> Callable[[], UpdateReport]:
        """Trains and calls on a thread of its own. Returns what waits for the report."""
        self.train()
        found: list[UpdateReport | BaseException] = []

        def call() -> None:
            try:
                found.append(self.trainer.update_weights(**options))
            except Exception as error:
                found.append(error)

        thread = threading.Thread(target=call)
        thread.start()

        def report() -> UpdateReport:
            thread.join(240)
            assert found, "the call has no end"
            if isinstance(found[0], BaseException):
                raise found[0]
            return found[0]

        return report

    def serve(self) -> dict[str, int]:
        """The version that each replica serves, by name; -1: it does not serve."""
        replicas = self.cluster.status().replicas
        return {each.name: each.identity.version if each.serving else -1 for each in replicas}

    def until(self, what: str, served: Callable[[list[int]], bool]) -> None:
        """Waits until what the replicas serve, sorted, is so."""
        eventually(what, 240, lambda: served(sorted(self.serve().values())))

    @property
    def undecided(self) -> manager_pb2.Deployment:
        """The only deployment that is undecided."""
        state = manager_pb2.Deployment.STATE_UNDECIDED
        (row,) = (each for each in self.cluster.status().deployments if each.state == state)
        return row

    def deploy(self, *words: str) -> str:
        """What `ckpt-engine deploy` prints."""
        command = [sys.executable, "-m", "ckpt_engine", "deploy", *words, "--manager", self.cluster.address]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, bare_model: Path) -> Iterator[World]:
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("deployments")
    with running_cluster(path) as cluster:
        for name in REPLICAS:
            cluster.replica(name, "reference", bare_model)
        cluster.relay("host", "--memory", "64MiB").registered()
        for replica in cluster.replicas:
            replica.registered()
        world = World(cluster, path)
        with world.trainer:
            first = world.trainer.update_weights(strategy="rolling")
            assert first.ok, first
            assert first.deployment is None, "a first version is brought to all at once"
            yield world


def test_rolling_leaves_the_rest_serving(world: World) -> None:
    world.train()
    report = world.trainer.update_weights(strategy="rolling", wave=0.5)
    assert report.ok, report
    assert report.verified
    assert report.deployment is not None
    assert report.deployment.state == "deployed"
    assert [len(wave) for wave in report.deployment.waves] == [2, 2]
    assert set(world.serve().values()) == {report.version}
    spans = {each.name: each.message.span for each in report.replicas}
    first, second = report.deployment.waves
    ends = [spans[name].begin + spans[name].seconds - spans[name].ahead for name in first]
    begins = [spans[name].begin - spans[name].ahead for name in second]
    assert max(ends) <= min(begins), "the second wave begins when the first one serves"
    assert f"version {report.version} of run over {report.version - 1}, rolling: deployed" in world.deploy("status")


def test_a_canary_that_outlives_its_manager_in_each_wave(world: World) -> None:
    before = max(world.serve().values())
    canary = world.begin(strategy="canary", wave=1, until="first_wave")
    first = canary()
    assert first.held
    assert first.deployment is not None
    assert first.deployment.state == "undecided"
    world.cluster.restart_manager()
    world.until("all are back, and as they were", lambda served: served == [before] * 3 + [before + 1])
    eventually("it waits for a person", 120, lambda: "deploy approve" in world.undecided.waits_for)
    assert world.undecided.number == first.deployment.number
    (slow,) = (each for each in world.cluster.replicas if each.name == "d")
    slow.process.send_signal(signal.SIGSTOP)  # so that the second wave does not end before the manager
    assert f"deployment {first.deployment.number}" in world.deploy("approve")
    eventually("the second wave is told", 120, lambda: len(world.undecided.waves) == 2)
    world.cluster.restart_manager()
    slow.process.send_signal(signal.SIGCONT)
    world.until("the rest follows", lambda served: served == [before + 1] * 4)
    with Client(world.cluster.address) as client:
        deployed = manager_pb2.Deployment.STATE_DEPLOYED
        eventually("it is decided", 240, lambda: [each.state for each in client.status().deployments] == [deployed])
        record = client.find_update(before + 1, lineage="run")
    assert record.report.deployment.state == manager_pb2.Deployment.STATE_DEPLOYED
    assert record.report.ok


def test_the_example_of_the_documentation(world: World) -> None:
    before = max(world.serve().values())
    (example,) = re.findall(r"```python\n(.*?)```", (DOCS / "deployments.md").read_text(), re.DOTALL)[:1]
    world.train()
    os.environ["CKPT_ENGINE_MANAGER"] = world.cluster.address
    try:
        exec(compile(example, "docs/deployments.md", "exec"), {"trainer": world.trainer})
    finally:
        del os.environ["CKPT_ENGINE_MANAGER"]
    world.until("it was undone", lambda served: served == [before] * 4)
    world.train()
    report = world.trainer.update_weights(strategy="all_or_none")
    assert report.ok, report
    assert report.version == before + 2, "an undone number stays used"
