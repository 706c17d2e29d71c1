"""Small models whose matrices FP8 kernels take, of multiples of 128 rows and columns, and their files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ckpt_engine.integrations.block_fp8 import BlockFp8
from tests.engines.test_vllm_models import MIXTURE, SMALL, build

_SIZES: dict[str, Any] = SMALL | {"vocab_size": 512, "hidden_size": 256, "tie_word_embeddings": False}


def dense() -> Any:
    from transformers import Qwen3Config

    return Qwen3Config(**_SIZES, head_dim=64, architectures=["Qwen3ForCausalLM"])


def experts() -> Any:
    from transformers import Qwen3MoeConfig

    sizes = _SIZES | MIXTURE | {"moe_intermediate_size": 128}
    return Qwen3MoeConfig(**sizes, head_dim=64, decoder_sparse_step=1, architectures=["Qwen3MoeForCausalLM"])


def write(config: Any, seed: int, path: Path, *, block_wise: bool) -> dict[str, Tensor]:
    """Writes the files of a random model, and returns its bfloat16 tensors by their names in the checkpoint.
    block_wise: the files are what `BlockFp8` makes of these."""
    from safetensors.torch import save_file

    config.dtype = torch.bfloat16
    _, weights = build(config, seed, path)
    if block_wise:
        recipe = BlockFp8(weights)
        described = json.loads((path / "config.json").read_text())
        described["quantization_config"] = recipe.quantization_config()
        (path / "config.json").write_text(json.dumps(described))
        save_file(dict(recipe()), path / "model.safetensors", metadata={"format": "pt"})
    return weights
