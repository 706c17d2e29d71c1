"""TRL's own trainers, from its own package, with replicas of ours: each step's version served, and its logprobs."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import Cluster

MARK = "ckpt-engine: "
STEPS = 5
CLOSE = 1e-4
"""Nats: float32 logits that another program computes."""


def run(cluster: Cluster, path: Path, *launcher: str, adapters: str = "none") -> list[dict[str, Any]]:
    """What the ranks of a run with GRPOTrainer say."""
    urls = [replica.url for replica in cluster.replicas]
    return say(cluster, path, *launcher, "-m", "tests.frameworks.grpo_run", then=(str(STEPS), adapters, *urls))


def say(cluster: Cluster, path: Path, *arguments: str, then: Sequence[str] = ()) -> list[dict[str, Any]]:
    """What a program says that TRL's Python runs: after `arguments`, manager, model, `path` and what comes `then`."""
    command = [
        os.environ["CKPT_ENGINE_TRL_PYTHON"],
        *arguments,
        cluster.address,
        str(cluster.path / "model"),
        str(path),
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": f"{os.environ['CKPT_ENGINE_OVERLAY']}:{Path(__file__).parents[2]}",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TRL_EXPERIMENTAL_SILENCE": "1",
    }
    ended = subprocess.run([*command, *then], env=environment, capture_output=True, text=True, timeout=600, cwd=path)
    assert ended.returncode == 0, f"{ended.stdout[-3000:]}\n{ended.stderr[-6000:]}"
    return [json.loads(line.partition(MARK)[2]) for line in ended.stdout.splitlines() if MARK in line]


@pytest.mark.parametrize("adapters", ["none", "peft"])
def test_grpo_trains_with_replicas_tokens(replicas: Cluster, tmp_path: Path, adapters: str) -> None:
    """Every step's tokens come from that step's weights, of the model itself or with its adapters merged."""
    *rollouts, end = run(replicas, tmp_path, adapters=adapters)
    assert [each["step"] for each in rollouts] == list(range(STEPS))
    assert [each["version"] for each in rollouts] == list(range(STEPS))
    assert end["updates"] == list(range(STEPS))
    assert all(end["ok"])
    assert len(end["rewards"]) == STEPS
    assert all(each["completions"] == 4 and each["distinct"] > 1 for each in rollouts), "equal prompts, other answers"
    assert max(each["logprob_difference"] for each in rollouts) < CLOSE


def test_two_ranks(replicas: Cluster, tmp_path: Path) -> None:
    """Each asks for its own prompts, and the samples differ by rank."""
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=0", "--rdzv-backend=c10d")
    said = run(replicas, tmp_path, *launcher, "--rdzv-endpoint=127.0.0.1:0")
    ranks = {rank: [each for each in said if each.get("rank") == rank] for rank in (0, 1)}
    for rollouts in ranks.values():
        assert [each["version"] for each in rollouts] == list(range(STEPS))
        assert max(each["logprob_difference"] for each in rollouts) < CLOSE
    assert [each["first"] for each in ranks[0]] != [each["first"] for each in ranks[1]]


def test_the_other_seams(replicas: Cluster, tmp_path: Path) -> None:
    """A weight_transfer has what TRL calls; it and the callback update as they are called."""
    (said,) = say(replicas, tmp_path, "-m", "tests.frameworks.seams_run")
    assert said["have"] == said["wanted"]
    assert said["transfer"] == [0, 1, 2]
    assert said["callback"] == [0, 2, 4]
