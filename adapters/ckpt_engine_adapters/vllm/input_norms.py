"""Finds the layers with which a vision model of vLLM normalises pixels on its device, and puts right what is in them.

Their two buffers are made of the processor's configuration and are in no checkpoint, and vLLM's dummy loader, with
which replicas start, overwrites them with random values. It knows what belongs in them only for models that have vLLM
make the layers of that configuration; others name the values in their code: their layers are left alone, and an update
says that nothing fills them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch
from torch import nn
from vllm.config import ModelConfig

from ckpt_engine_adapters.vllm.versions import FusedMMInputNorm, build_mm_input_norm


def input_norms(model: nn.Module) -> Iterator[nn.Module]:
    """The layers that vLLM has made of the processor's configuration."""
    modules = [sys.modules.get(each.__module__) for each in type(model).__mro__]
    if build_mm_input_norm is None or all(
        getattr(module, "build_mm_input_norm", None) is not build_mm_input_norm for module in modules
    ):
        return
    for layer in model.modules():
        if isinstance(layer, FusedMMInputNorm):
            yield layer


def reset_input_norms(model: nn.Module, config: ModelConfig) -> None:
    """Gives them the values of the configuration. To be called in vLLM's config context, before a target is made."""
    for layer in input_norms(model):
        with torch.device("cpu"):
            norm = build_mm_input_norm(config)
        with torch.inference_mode():
            for name, buffer in norm.named_buffers():
                layer.get_buffer(name).copy_(buffer)
