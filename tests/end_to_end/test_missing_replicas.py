"""Replicas that an update cannot reach, or that cannot take it: what `update`, `status` and the metrics say of them."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import httpx
import pytest
import torch
from click.testing import Result

from ckpt_engine.core.deadlines import ENVIRONMENT
from tests.cluster import Cluster, Replica, eventually, running_cluster
from tests.command_line import run
from tests.end_to_end.conftest import PADDED_VOCABULARY
from tests.ports import free_address
from tests.reference.engine_process import engine
from tests.tiny_model import make_tiny_qwen3

pytestmark = pytest.mark.slow


def served(url: str) -> tuple[int, str]:
    """What the engine answers to a prompt: its status, and the version in its headers."""
    answer = httpx.post(f"{url}/generate", json={"input_ids": [1, 2], "max_tokens": 2}, timeout=60)
    return answer.status_code, json.dumps({name: value for name, value in answer.headers.items() if "version" in name})


def attached(cluster: Cluster, name: str, url: str) -> Replica:
    command = [sys.executable, "-m", "ckpt_engine", "agent", "--manager", cluster.address, "--engine", "reference"]
    replica = Replica(cluster, name, [*command, "--name", name, "--url", url], {})
    cluster.replicas.append(replica)
    return replica


def updates_by_outcome(http: str) -> dict[str, float]:
    lines = httpx.get(f"http://{http}/metrics", timeout=60).text.splitlines()
    found = (line.split() for line in lines if line.startswith("ckpt_engine_updates_total{"))
    return {name.split('"')[1]: float(value) for name, value in found}


def test_a_replica_that_is_away_counts_and_a_misfit_is_left_out(
    tmp_path: Path, bare_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replica beside a running engine, one that was launched, and one with another model."""
    monkeypatch.setenv(ENVIRONMENT, "lease=10")
    torch.set_num_threads(1)
    http = free_address()
    make_tiny_qwen3(tmp_path / "other", vocabulary=300, weights=False)
    with (
        running_cluster(tmp_path / "cluster", http=http) as cluster,
        engine(bare_model, tmp_path / "engine.log") as server,
    ):
        beside = attached(cluster, "beside", server.url)
        launched = cluster.replica("launched", "reference", bare_model)
        misfit = cluster.replica("misfit", "reference", tmp_path / "other")
        for replica in (beside, launched, misfit):
            replica.registered()

        def update(seed: int, *arguments: str) -> Result:
            directory = tmp_path / f"checkpoint {seed}"
            if not directory.exists():
                make_tiny_qwen3(directory, seed, vocabulary=PADDED_VOCABULARY)
            return run("update", "--manager", cluster.address, "--checkpoint", str(directory), *arguments)

        # The misfit is left out and named, and the others are updated.
        first = update(1)
        assert first.exit_code == 1, first.output
        assert "NOT OK" in first.stdout
        assert "misfit: left out: " in first.stderr
        (reason,) = (line for line in first.stdout.splitlines() if line.startswith("misfit: "))
        assert "the given one (500, 128)" in reason, reason
        beside.serving(0)
        launched.serving(0)
        status = json.loads(run("status", "--manager", cluster.address, "--json").stdout)
        said = {replica["name"]: replica.get("unfit") for replica in status["replicas"]}
        assert said["beside"] is said["launched"] is None
        assert said["misfit"]["code"] == "CODE_INVALID_ARGUMENT"
        assert said["misfit"]["message"] in reason
        printed = " ".join(run("status", "--manager", cluster.address).stdout.split())
        assert "misfit: left out of updates: loading lm_head.weight" in printed
        shown = httpx.get(f"http://{http}/v1/replicas", timeout=60).json()["replicas"]
        assert {replica["name"]: replica.get("unfit") for replica in shown} == said
        again = update(2)
        assert again.exit_code == 0, again.output
        assert "2 of 3 replicas" in again.stdout
        assert "verified, 1 with another model" in again.stdout
        assert "warning: misfit can never load what is published, and does not count" in again.stdout
        refused = update(3, "--min-replicas", "3")
        assert refused.exit_code == 1
        assert "2 replicas can be updated, 3 are required (misfit: " in refused.stderr
        only = update(3, "--replica", "misfit")
        assert only.exit_code == 1
        assert "no replica can take what lineage 'checkpoint' publishes (misfit: " in only.stderr
        assert "can never load" in run("replica", "retry", "misfit", "--manager", cluster.address).stderr
        assert run("replica", "evict", "misfit", "--manager", cluster.address).exit_code == 0

        # An agent is killed, and its engine goes on answering under the version before.
        beside.process.send_signal(signal.SIGKILL)
        beside.process.wait(60)
        eventually("it is known to be away", 60, lambda: (seen := beside.status) and not seen.connected)
        before = served(server.url)
        assert before[0] == 200
        away = update(4)
        assert away.exit_code == 1, away.output
        assert "1 of 2 replicas" in away.stdout
        assert "not reached" in away.stdout
        assert "its agent is not connected" in away.stdout
        assert "its engine may still serve version 1 of lineage 'checkpoint'" in away.stdout
        assert served(server.url) == before
        counted = updates_by_outcome(http)
        assert (counted["ok"], counted["partial"]) == (1.0, 2.0)
        alone = update(4, "--replica", "beside")
        assert alone.exit_code == 1
        assert "beside: its agent is not connected" in alone.stderr
        assert update(5, "--replica", "launched").exit_code == 0
        assert update(6, "--min-replicas", "1").exit_code == 0
        evicted = run("replica", "evict", "beside", "--manager", cluster.address)
        assert "its agent was not connected, so its engine stays as it is" in evicted.stdout
        assert update(7).exit_code == 0
