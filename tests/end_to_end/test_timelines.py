"""The timeline of a real update: by way of a relay, into a replica whose clock is twenty minutes ahead.

That clock is real where the kernel has time namespaces and this user may make one: agent, engine and workers of that
replica then count monotonic seconds of their own.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from ckpt_engine import Trainer
from ckpt_engine.cli import app_for
from tests.cluster import Cluster, running_cluster
from tests.end_to_end.conftest import PADDED_VOCABULARY
from tests.timeline.trace_format import File, read
from tests.tiny_model import make_tiny_qwen3

pytestmark = pytest.mark.slow

AHEAD = 1200
OTHER_CLOCK = ("unshare", "--time", "--monotonic", str(AHEAD))


def _may_have_another_clock() -> bool:
    try:
        return subprocess.run([*OTHER_CLOCK, "true"], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def trace(cluster: Cluster, version: int, file: Path) -> Result:
    words = ["trace", str(version), "-o", str(file), "--manager", cluster.address]
    return CliRunner().invoke(app_for(words), words, catch_exceptions=False)


def begins(file: File, name: str, process: str) -> list[int]:
    return [each.begin for each in file.named(name, process)]


@pytest.mark.skipif(not _may_have_another_clock(), reason="this user may not make a time namespace")
def test_a_replica_whose_clock_is_minutes_ahead_is_shown_when_it_was(tmp_path: Path, bare_model: Path) -> None:
    with running_cluster(tmp_path / "cluster") as cluster:
        cluster.relay("here", "--memory", "64MiB")
        cluster.replica("near", "reference", bare_model)
        cluster.before = OTHER_CLOCK
        cluster.replica("ahead", "reference", bare_model, "--tensor-parallel", "2")
        cluster.relays[0].registered()
        for replica in cluster.replicas:
            replica.registered()
        model = make_tiny_qwen3(tmp_path / "model", 1, vocabulary=PADDED_VOCABULARY, weights=False)
        with Trainer(cluster.address, lineage="run") as trainer:
            trainer.publish(model, move=True)
            report = trainer.update_weights(version=0, prefetch="always")
        assert report.ok, report
        told = {outcome.replica: outcome.span for outcome in report.message.replicas}
        ahead = told["ahead"].ahead - told["near"].ahead
        assert abs(ahead - AHEAD) <= told["ahead"].error + told["near"].error + 1.0, "both clocks were measured"
        written = trace(cluster, 0, tmp_path / "trace.json")
        assert written.exit_code == 0, written.output
        file = read((tmp_path / "trace.json").read_text())

    edges = [(arrow[2]["source"], arrow[1].process, arrow[2]["bytes"]) for arrow in file.flows]
    reported = [
        ("relay here", f"replica {one.name}", each.bytes) for one in report.replicas for each in one.message.edges
    ]
    reported += [(source, "relay here", count) for source, count in report.relays[0].nbytes_from.items()]
    assert sorted(edges) == sorted(reported)
    assert sum(count for _, process, count in edges if process != "relay here") == report.nbytes

    (sealed,) = begins(file, "digest", "trainer rank 0")
    (filled,) = begins(file, "fill", "relay here")
    assert sealed < filled
    for process in ("replica near", "replica ahead"):
        order = ["install", "quiesce", "workers install", "transfer", "verify", "look at the state words", "resume"]
        firsts = [min(begins(file, name, process)) for name in order]
        assert firsts == sorted(firsts), process
        assert filled < firsts[0]
        assert "round trips" in file.labels[process]
    (installing,) = file.named("installing", "manager")
    for each in file.slices:
        if each.process.startswith("replica "):
            assert installing.begin <= each.begin <= each.end <= installing.end, each
