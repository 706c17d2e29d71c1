"""A probe of a real engine beside the reference engine: both compute alike, a scorer in FP8 computes otherwise, and a
cache that holds what older weights made shows in one of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ckpt_engine import Probe, Trainer
from ckpt_engine.integrations.scoring import model_score
from tests.cluster import Cluster, running_cluster
from tests.tiny_model import make_tiny_qwen3

UNSALTED = """
import importlib.machinery
import importlib.util
import sys

import ckpt_engine.gate.salt

ckpt_engine.gate.salt.CacheSalt.of = lambda self, caller_salt: caller_salt
others = [folder for folder in sys.path if not __file__.startswith(folder + "/")]
spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
if spec is not None:
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
"""
"""A `sitecustomize` before any other. Has each process of a server forget the salt that keeps caches of older weights
from later requests."""

LENGTH = 200
"""Tokens of a sequence: more than a block of the engines' caches, which are of 128 tokens on a CPU."""


@contextmanager
def unsalted_cluster(path: Path, start: Callable[[Cluster, Path, Path], object]) -> Iterator[Cluster]:
    """A reference engine and a server that forgets its salts. start: starts it with a model, and with a folder that
    comes first in its PYTHONPATH."""
    torch.set_num_threads(1)
    make_tiny_qwen3(path / "bare", weights=False)
    (path / "unsalted").mkdir()
    (path / "unsalted" / "sitecustomize.py").write_text(UNSALTED)
    with running_cluster(path) as running:
        running.replica("reference", "reference", path / "bare")
        start(running, path / "bare", path / "unsalted")
        for replica in running.replicas:
            replica.registered(600)
        yield running


def check_probes(cluster: Cluster, path: Path, name: str) -> None:
    """Each cause that can be provoked is named rightly. name: of the replica that is no reference engine."""
    model = make_tiny_qwen3(path / "model", 5, weights=False)
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, 512, (2, LENGTH), generator=generator).tolist()
    eighth = copy.deepcopy(model)

    def in_fp8(sequences: Any) -> Any:
        for ours, theirs in zip(eighth.parameters(), model.parameters(), strict=True):
            ours.data.copy_(theirs.data.to(torch.float8_e4m3fn).to(theirs.dtype))
        return model_score(eighth)(sequences)

    def train(trainer: Trainer, **options: Any) -> Any:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.03 * torch.randn(parameter.shape, generator=generator))
        report = trainer.update_weights(timeout=300, **options)
        assert report.ok, report.details
        return report

    with Trainer(cluster.address, lineage="alike", probe=Probe(tokens, model_score(model))) as trainer:
        trainer.publish(model)
        train(trainer)
        report = train(trainer)
        assert not report.probe, report.details
        for answer in (each.probe for each in report.replicas):
            assert answer is not None
            assert answer.engine.tokens == 2 * (LENGTH - 1)
            assert answer.engine.mean < answer.before.mean, "a step changes more than engines differ"
            assert answer.engine.flips < answer.before.flips

    with Trainer(cluster.address, lineage="quantised", probe=Probe(tokens, in_fp8)) as trainer:
        trainer.publish(model)
        report = train(trainer)
        assert [(each.cause, each.replicas) for each in report.probe] == [("all", ("reference", name))], report.details

    with Trainer(cluster.address, lineage="stale", probe=Probe(tokens, model_score(model))) as trainer:
        trainer.publish(model)
        train(trainer)
        report = train(trainer, pause_mode="in_place")
        assert [(each.cause, each.replicas) for each in report.probe] == [("cache", (name,))], report.details
