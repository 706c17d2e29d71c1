"""Staged deployments on real processes: four replicas, a relay and a manager that is killed in the middle of them."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpt_engine import Client
from ckpt_engine.v1 import manager_pb2
from tests.cluster import eventually
from tests.end_to_end.deployment_world import World, running_fleet

pytestmark = pytest.mark.slow

DOCS = Path(__file__).resolve().parents[2] / "docs"
REPLICAS = ("a", "b", "c", "d")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, bare_model: Path) -> Iterator[World]:
    path = tmp_path_factory.mktemp("deployments")
    with running_fleet(path, bare_model, REPLICAS) as cluster:
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
