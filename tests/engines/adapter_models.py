"""PEFT models with adapters that change a tiny model's tokens, for tests of adapters."""

from __future__ import annotations

import copy
from typing import Any

import torch


def with_adapter(base: Any, seed: int, **settings: Any) -> Any:
    """A PeftModel over a copy of `base`, with random A and B. settings: of the LoraConfig."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"], **settings})
    model = get_peft_model(copy.deepcopy(base), config)
    stir(model, seed)
    return model


def stir(model: Any, seed: int) -> None:
    """Gives an adapter other weights, as a training step does."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                parameter.copy_(0.25 * torch.randn(parameter.shape))


def merged(model: Any, dtype: torch.dtype = torch.float32) -> Any:
    """A plain model of base and adapter."""
    return copy.deepcopy(model).to(dtype).merge_and_unload()
