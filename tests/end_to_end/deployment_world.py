"""Replicas that all read one relay, and a trainer in the test's own process: staged deployments on real processes."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from ckpt_engine import Trainer, UpdateReport
from ckpt_engine.v1 import manager_pb2
from tests.cluster import Cluster, Relay, eventually, running_cluster
from tests.end_to_end.conftest import PADDED_VOCABULARY
from tests.tiny_model import make_tiny_qwen3


def relay(cluster: Cluster) -> Relay:
    """Another process of the only relay."""
    return cluster.relay("host", "--memory", "64MiB")


@contextlib.contextmanager
def running_fleet(path: Path, model: Path, names: Sequence[str], seconds: float = 400.0) -> Iterator[Cluster]:
    """Replicas of the reference engine that all read one relay. seconds: that they have to register."""
    torch.set_num_threads(1)
    with running_cluster(path) as cluster:
        for name in names:
            cluster.replica(name, "reference", model)
        relay(cluster).registered()
        for replica in cluster.replicas:
            replica.registered(seconds)
        yield cluster


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
