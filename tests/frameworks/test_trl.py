"""TRL's own trainers, from its own package, with replicas of ours: each step's version served, and its logprobs."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cluster import Cluster, running_cluster
from tests.engines.vllm_server import start_vllm
from tests.frameworks.trl_runs import CLOSE, say
from tests.frameworks.words import tokenizer
from tests.gateway.gateways import running_gateway
from tests.tiny_model import make_tiny_qwen3

STEPS = 5
TWO_RANKS = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0")


def run(cluster: Cluster, path: Path, *launcher: str, adapters: str = "none") -> list[dict[str, Any]]:
    """What the ranks of a run with GRPOTrainer say."""
    urls = [replica.url for replica in cluster.replicas]
    return say(cluster, path, *launcher, "-m", "tests.frameworks.grpo_run", then=(str(STEPS), adapters, *urls))


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
    said = run(replicas, tmp_path, *TWO_RANKS)
    ranks = {rank: [each for each in said if each.get("rank") == rank] for rank in (0, 1)}
    for rollouts in ranks.values():
        assert [each["version"] for each in rollouts] == list(range(STEPS))
        assert max(each["logprob_difference"] for each in rollouts) < CLOSE
    assert [each["first"] for each in ranks[0]] != [each["first"] for each in ranks[1]]


def test_the_other_seams(replicas: Cluster, tmp_path: Path) -> None:
    """What is used of TRL is there by its name, and a weight_transfer has what TRL calls; it and the callback update as
    they are called."""
    (said,) = say(replicas, tmp_path, "-m", "tests.frameworks.seams_run")
    assert said["missing"] == []
    assert said["have"] == said["wanted"]
    assert said["transfer"] == [1, 2, 3]
    assert said["callback"] == [0, 2, 4]


with_vllm = pytest.mark.skipif(
    "CKPT_ENGINE_VLLM_PYTHON" not in os.environ, reason="CKPT_ENGINE_VLLM_PYTHON names no Python that has vLLM"
)


def asynchronous(cluster: Cluster, path: Path, *options: str) -> list[dict[str, Any]]:
    """What a run with AsyncGRPOTrainer says, with a gateway before the replicas."""
    packages = subprocess.run(
        [os.environ["CKPT_ENGINE_VLLM_PYTHON"], "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    with running_gateway(path / "gateway.log", "--manager", cluster.address) as gateway:
        program = ("-m", "tests.frameworks.async_run")
        return say(cluster, path, *program, then=(str(STEPS), packages, gateway.url, *options))


@with_vllm
def test_grpo_brings_an_adapter_by_itself(tmp_path: Path) -> None:
    """The model below it once, and then the adapter at each step; a second run goes on with the adapter's numbers."""
    model = make_tiny_qwen3(tmp_path / "model", dtype=torch.float32)
    tokenizer(model.config.vocab_size).save_pretrained(tmp_path / "model")
    size = sum(tensor.nbytes for tensor in model.state_dict().values())
    with running_cluster(tmp_path) as cluster:
        slots = ("--enable-lora", "--max-loras", "2", "--max-lora-rank", "8")
        start_vllm(
            *(cluster, "vllm", tmp_path / "model", "--dtype", "float32", "--no-skip-tokenizer-init", *slots),
            options=("--adapter", "policy=2"),
        ).registered(600)
        for first in (0, STEPS):
            *rollouts, end = run(cluster, tmp_path, adapters="alone")
            assert [each["version"] for each in rollouts] == list(range(STEPS))
            assert end["updates"] == list(range(first, first + STEPS)), "numbers of its own"
            assert all(end["ok"])
            assert max(end["bytes"]) < size / 10
            assert max(each["logprob_difference"] for each in rollouts) < 10 * CLOSE, "added, and not merged"


@with_vllm
def test_async_grpo_with_its_own_worker(replicas: Cluster, tmp_path: Path) -> None:
    """TRL's trainer, queue and worker; its requests go to the gateway while versions change."""
    (said,) = asynchronous(replicas, tmp_path)
    assert said["updates"] == list(range(1, STEPS + 2)), "the weights that it begins with, and those of every step"
    assert said["model_version"] == STEPS + 1, "TRL's number is ours"
    assert all(said["ok"])
    assert abs(said["ratios"][0] - 1) < CLOSE, "all samples of the first step are of the weights that are trained"
    assert said["divergences"][0] < CLOSE
    assert len(said["ratios"]) == STEPS


@with_vllm
def test_turns_of_agents_name_their_versions(replicas: Cluster, tmp_path: Path) -> None:
    """Conversations with a tool, while versions change: each turn says which made it; none is older than the last."""
    *conversations, end = asynchronous(replicas, tmp_path, "agents")
    assert all(end["ok"])
    assert len(end["ratios"]) == STEPS
    turns = [each["turns"] for each in conversations]
    assert all(len(each) > 1 for each in turns), turns
    for each in turns:
        versions = [version for turn in each for version in turn]
        assert versions == sorted(versions), each
    assert len({version for each in turns for turn in each for version in turn}) > 1


def test_shards_and_exported_names_of_two_ranks(replicas: Cluster, tmp_path: Path) -> None:
    """FSDP2's shards are published as they lie; what Megatron's bridge would export is gathered as it is walked, and a
    walk that raises midway changes nothing that is served."""
    urls = [replica.url for replica in replicas.replicas]
    (said,) = say(replicas, tmp_path, *TWO_RANKS, "-m", "tests.frameworks.ranks_run", then=urls)
    assert said["versions"] == [0, 1, 2, 0, 1]
    assert len(said["lineages"]) == 2, "each start has its own"
    assert said["copies"] == [1, 1, 1], "each byte has one rank that holds it"
    assert "the bridge has no mapping" in said["raised"]
    assert max(said[name] for name in ("sharded", "exported", "after", "again")) < CLOSE
