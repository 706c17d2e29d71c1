"""TRL's GRPOTrainer on two ranks, with the tokens of a real vLLM server on the CPU, in float32."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.cluster import Cluster, running_cluster
from tests.engines.vllm_server import start_vllm
from tests.frameworks.test_trl import STEPS, TWO_RANKS, run
from tests.frameworks.trl_runs import CLOSE
from tests.frameworks.words import tokenizer
from tests.tiny_model import VOCABULARY, make_tiny_qwen3

pytestmark = pytest.mark.skipif(
    "CKPT_ENGINE_VLLM_PYTHON" not in os.environ, reason="CKPT_ENGINE_VLLM_PYTHON names no Python that has vLLM"
)


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    path = tmp_path_factory.mktemp("trl-vllm")
    make_tiny_qwen3(path / "model", dtype=torch.float32)
    # vLLM wants to name the tokens whose logprobs it tells.
    tokenizer(VOCABULARY).save_pretrained(path / "model")
    with running_cluster(path) as cluster:
        start_vllm(cluster, "one", path / "model", "--dtype", "float32", "--no-skip-tokenizer-init").registered(600)
        yield cluster


def test_two_ranks_train_with_vllms_tokens(vllm: Cluster, tmp_path: Path) -> None:
    said = run(vllm, tmp_path, *TWO_RANKS)
    for rank in (0, 1):
        rollouts = [each for each in said if each.get("rank") == rank]
        assert [each["version"] for each in rollouts] == list(range(STEPS))
        assert max(each["logprob_difference"] for each in rollouts) < CLOSE
        assert all(each["distinct"] > 1 for each in rollouts), "equal prompts, other answers"
