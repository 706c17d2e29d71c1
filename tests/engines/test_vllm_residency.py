"""vLLM's own layers without post-processing, as on CUDA: weights go straight into the live tensors, none is staged."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.engines.test_vllm_models import build, deepseek_v2
from tests.engines.vllm_server import needs_vllm, run_in_vllm
from tests.tiny_model import make_tiny_qwen3

pytestmark = needs_vllm


def deepseek() -> Any:
    return deepseek_v2(512, 128, 64, 128, topk_method="greedy", routed_scaling_factor=1.0)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What tests/engines/resident_install.py tells of each kind of model, in one process of vLLM's Python."""
    path = tmp_path_factory.mktemp("resident")
    for kind in ("untied", "tied"):
        make_tiny_qwen3(path / kind, 4, tied=kind == "tied")
    config = deepseek()
    config.dtype = torch.bfloat16
    (path / "latent").mkdir()
    build(config, 1, path / "latent")
    # vLLM makes its groups for the first model, and one for experts only if that has some.
    kinds = ("latent", "untied", "tied")
    found = run_in_vllm("tests.engines.resident_install", *(path / kind for kind in kinds))
    return dict(zip(kinds, found, strict=True))


@pytest.mark.parametrize("kind", ["untied", "tied"])
def test_what_nothing_repacks_is_resident(told: dict[str, Any], kind: str) -> None:
    found = told[kind]
    assert found["problem"] == ""
    assert (found["staged"], found["verified_as_loaded"], found["moved"], found["differ"]) == ([], 0, [], [])
    assert found["verified"] > found["tensors"]
    assert found["deriving"] == 0, "ordinary attention makes nothing of weights"


def test_what_latent_attention_makes_of_weights_is_made_anew(told: dict[str, Any]) -> None:
    found = told["latent"]
    assert found["problem"] == ""
    experts = "model.layers.1.mlp.experts.routed_experts."
    assert found["staged"] == found["differ"] == [experts + "w13_weight", experts + "w2_weight"], "packed for a CPU"
    assert {name.rpartition(".")[2] for name in found["derived"]} == {"W_UV", "W_UK_T"}
    assert (found["deriving"], found["moved"]) == (2, [])
