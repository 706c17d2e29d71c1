"""A probe of vLLM beside the reference engine: engines that compute alike, a scorer in FP8, and a cache that holds what
older weights made."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_engine import Probe, Trainer
from ckpt_engine.integrations.scoring import model_score
from tests.cluster import Cluster, running_cluster
from tests.engines.vllm_server import OVERLAY, needs_vllm, start_vllm
from tests.tiny_model import make_tiny_qwen3

pytestmark = needs_vllm

UNSALTED = """
import ckpt_engine.gate.salt

ckpt_engine.gate.salt.CacheSalt.of = lambda self, caller_salt: caller_salt
"""
"""Has each process of the server forget the salt that keeps caches of older weights from later requests."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    path = tmp_path_factory.mktemp("probe")
    torch.set_num_threads(1)
    make_tiny_qwen3(path / "bare", weights=False)
    (path / "unsalted").mkdir()
    (path / "unsalted" / "sitecustomize.py").write_text(UNSALTED)
    with running_cluster(path) as running:
        running.replica("reference", "reference", path / "bare")
        environment = {"PYTHONPATH": f"{path / 'unsalted'}:{OVERLAY}"}
        start_vllm(running, "vllm", path / "bare", environment=environment)
        for replica in running.replicas:
            replica.registered(600)
        yield running


def trained(model: Any, trainer: Trainer, **options: Any) -> Any:
    """The report of an update, after what a large step of an optimizer does."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.05)
    report = trainer.update_weights(timeout=300, **options)
    assert report.ok, report.details
    return report


def test_figures_and_causes(cluster: Cluster, tmp_path: Path) -> None:
    model = make_tiny_qwen3(tmp_path / "model", 5, weights=False)
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, 512, (2, 200), generator=generator).tolist()  # longer than a block of vLLM's on a CPU
    eighth = copy.deepcopy(model)

    def in_fp8(sequences: Any) -> Any:
        for ours, theirs in zip(eighth.parameters(), model.parameters(), strict=True):
            ours.data.copy_(theirs.data.to(torch.float8_e4m3fn).to(theirs.dtype))
        return model_score(eighth)(sequences)

    with Trainer(cluster.address, lineage="alike", probe=Probe(tokens, model_score(model))) as trainer:
        trainer.publish(model)
        trained(model, trainer)
        report = trained(model, trainer)
        answers = {each.name: each.probe for each in report.replicas}
        print(report.details)
        assert not report.probe, report.details
        for answer in answers.values():
            assert answer.engine.tokens == 398
            assert answer.engine.HasField("flips")
            assert answer.engine.mean < answer.before.mean, "the step changed more than engines differ"
            assert answer.cached.HasField("flips")

    with Trainer(cluster.address, lineage="quantised", probe=Probe(tokens, in_fp8)) as trainer:
        trainer.publish(model)
        report = trained(model, trainer)
        print(report.details)
        (finding,) = report.probe
        assert (finding.cause, finding.replicas) == ("all", ("reference", "vllm"))

    with Trainer(cluster.address, lineage="stale", probe=Probe(tokens, model_score(model))) as trainer:
        trainer.publish(model)
        trained(model, trainer)
        report = trained(model, trainer, pause_mode="in_place")
        print(report.details)
        (finding,) = report.probe
        assert (finding.cause, finding.replicas) == ("cache", ("vllm",)), report.details
