"""A version's probe on real processes: engines that compute as the trainer does, one that does not, and what that does
to a deployment."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_engine import Probe, Trainer
from ckpt_engine.integrations.scoring import model_score
from tests.cluster import Cluster
from tests.command_line import run
from tests.end_to_end.conftest import PADDED_VOCABULARY
from tests.end_to_end.deployment_world import running_fleet
from tests.flipping import write_in
from tests.tiny_model import make_tiny_qwen3

pytestmark = pytest.mark.slow

DOCS = Path(__file__).resolve().parents[2] / "docs"
EXAMPLE, CANARY = re.findall(r"```python\n(.*?)```", (DOCS / "probe.md").read_text(), re.DOTALL)


class World:
    """Two replicas that read one relay, and a model whose weights change with each version."""

    def __init__(self, cluster: Cluster, model: Any) -> None:
        self.cluster, self.model = cluster, model
        generator = torch.Generator().manual_seed(7)
        self.tokens = torch.randint(0, PADDED_VOCABULARY, (3, 40), generator=generator).tolist()

    def train(self) -> None:
        """Changes the weights, as a step of an optimizer does."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.mul_(1.01)

    def tear(self, name: str) -> None:
        """Writes over the frequencies of a replica's rotary embedding, which no update brings."""
        (replica,) = (each for each in self.cluster.replicas if each.name == name)
        frequencies = self.model.model.rotary_emb.inv_freq
        write_in(replica.workers()[0].pid, frequencies, torch.zeros_like(frequencies))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, bare_model: Path) -> Iterator[World]:
    path = tmp_path_factory.mktemp("probe")
    with running_fleet(path, bare_model, ("a", "b")) as cluster:
        yield World(cluster, make_tiny_qwen3(path / "model", 1, vocabulary=PADDED_VOCABULARY, weights=False))


def test_the_example_of_the_documentation(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {"model": world.model.train(), "manager": world.cluster.address}
    exec(compile(EXAMPLE, "docs/probe.md", "exec"), names)
    assert capsys.readouterr().out.splitlines() == ["a 0.000 nats, before 0.000", "b 0.000 nats, before 0.000"]
    assert world.model.training, "the model is in the mode that it was in"
    world.model.eval()


def test_a_torn_replica_is_named_and_brings_its_canary_back(world: World) -> None:
    probe = Probe(world.tokens, model_score(world.model))
    with Trainer(world.cluster.address, lineage="torn", probe=probe) as trainer:
        trainer.publish(world.model)
        world.train()
        first = trainer.update_weights(prefetch="always")
        assert first.ok, first
        assert not first.probe, first.details
        assert {each.name: round(each.probe.engine.mean, 2) for each in first.replicas if each.probe} == {
            "a": 0,
            "b": 0,
        }

        world.train()
        report = trainer.update_weights(strategy="rolling", condition="probe")
        assert report.ok, report.details
        answers = [each.probe for each in report.replicas]
        assert all(answer is not None and answer.before.mean > 0.01 >= answer.engine.mean for answer in answers)

        world.tear("b")
        world.train()
        report = trainer.update_weights()
        assert report.ok, "a probe changes no outcome"
        (finding,) = report.probe
        assert (finding.cause, finding.replicas) == ("replica", ("b",)), finding
        assert "probe (replica): b: a kernel, a device" in str(report)
        shown = " ".join(run("status", "--manager", world.cluster.address).output.split())
        assert re.search(r"b: probe: .*; mean \S+ above 0\.1", shown), shown

        world.train()
        names: dict[str, Any] = {"trainer": trainer}
        # The first canary by name is a, so b breaks the last wave.
        exec(compile(CANARY, "docs/probe.md", "exec"), names)
        report = names["report"]
        assert report.deployment.state == "undone", report.details
        assert re.search(r"replica b: the probe's mean \S+ above 0\.1", report.deployment.reason)
        assert [len(wave) for wave in report.deployment.waves] == [1, 1]
        assert [(each.cause, each.replicas) for each in report.probe] == [("replica", ("b",))]
        served = {each.name: each.identity.version for each in world.cluster.status().replicas if each.serving}
        assert served == {"a": report.version - 1, "b": report.version - 1}
