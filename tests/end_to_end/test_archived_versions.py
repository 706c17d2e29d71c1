"""Versions on a relay's disk, on real processes: everything is restarted, and any of them is served again."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import Result

from ckpt_engine import CkptEngineError, Client, Trainer
from tests.cluster import Cluster, Relay, generate, running_cluster
from tests.command_line import run
from tests.conformance.weights import load
from tests.end_to_end.conftest import PADDED_VOCABULARY
from tests.tiny_model import make_tiny_qwen3, reference_tokens
from tests.waiting import eventually

PROMPT = [3, 1, 4, 1, 5]
VERSIONS = 4


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with running_cluster(tmp_path / "cluster") as found:
        yield found


def relay(cluster: Cluster, name: str, archive: Path) -> Relay:
    return cluster.relay(name, "--memory", "64MB", "--archive", str(archive), "--keep", "10").registered()


def archived(cluster: Cluster) -> list[int]:
    held = [each.version for holder in cluster.status().holders if holder.kind == "archive" for each in holder.held]
    return sorted(held)


def rot(file: Path, at: int) -> None:
    """Flips a bit as a disk does, which tells nothing of it."""
    times = os.stat(file)
    with file.open("r+b") as opened:
        opened.seek(at)
        (byte,) = opened.read(1)
        opened.seek(at)
        opened.write(bytes([byte ^ 1]))
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))


def test_any_version_is_served_again_after_everything_was_restarted(
    tmp_path: Path, bare_model: Path, cluster: Cluster
) -> None:
    archive = tmp_path / "archive"
    models = [
        make_tiny_qwen3(tmp_path / "model", n, vocabulary=PADDED_VOCABULARY, weights=False) for n in range(VERSIONS)
    ]
    live = make_tiny_qwen3(tmp_path / "model", 9, vocabulary=PADDED_VOCABULARY, weights=False)
    tokens = [reference_tokens(model, PROMPT, 8).tokens for model in models]
    first = relay(cluster, "first", archive)
    replica = cluster.replica("one", "reference", bare_model).registered()
    roots = []
    with Trainer(cluster.address, lineage="kept") as trainer:
        trainer.publish(live, move=True)
        for version, model in enumerate(models):
            load(live, model)
            report = trainer.update_weights(version, prefetch="always")
            assert report.ok, report.details
            roots.append(report.root)
            wanted = list(range(version + 1))
            eventually(f"{wanted} are archived", 120, lambda wanted=wanted: archived(cluster) == wanted)
    assert generate(replica, PROMPT, 8) == tokens[-1]
    replica.stop()
    cluster.replicas.remove(replica)
    assert first.end() == 0
    cluster.restart_manager()

    second = relay(cluster, "second", archive)
    replica = cluster.replica("two", "reference", bare_model).registered()
    replica.serving(VERSIONS - 1)  # which nothing held but the disk
    assert generate(replica, PROMPT, 8) == tokens[-1]
    with Client(cluster.address) as client:
        report = client.rollback(1)
        assert (report.ok, report.verified, report.root) == (True, True, roots[1]), report.details
        assert generate(replica, PROMPT, 8) == tokens[1]

        (folder,) = archive.glob("0-*")
        rot(folder / "weights", (folder / "weights").stat().st_size // 2)
        try:
            report = client.rollback(0)
            assert not report.ok, report.details
        except CkptEngineError as error:
            refused = error.problem.message
            print(refused)
        assert generate(replica, PROMPT, 8) == tokens[1], "it serves what it did"
        eventually("it is offered no more", 60, lambda: archived(cluster) == [1, 2, 3])
        assert "has other bytes than were sealed" in second.said
        assert not list(archive.glob("0-*"))

        found = judged(cluster, tokens[:3], "--good", "0", "--bad", "3", "--json")
        assert found.exit_code == 0, found.output
        result = json.loads(found.stdout)
        assert (result["good"], result["bad"], result["asked"]) == (2, 3, [2]), result
        assert generate(replica, PROMPT, 8) == tokens[1], "it serves what it did before"
        refused = judged(cluster, [], "--good", "3", "--bad", "1")
        assert (refused.exit_code != 0, "--good 3 is not before --bad 1" in refused.output) == (True, True)


JUDGE = """
import os, sys, httpx
body = {"input_ids": %s, "max_tokens": 8, "temperature": 0}
tokens = httpx.post(os.environ["CKPT_ENGINE_URL"] + "/generate", json=body, timeout=60).json()["output_ids"]
sys.exit(tokens not in %s)
"""


def judged(cluster: Cluster, good: list[list[int]], *options: str) -> Result:
    """What a search says whose command takes these tokens for good."""
    command = (sys.executable, "-c", JUDGE % (PROMPT, good))
    return run("version", "bisect", "--manager", cluster.address, *options, "--", *command)
