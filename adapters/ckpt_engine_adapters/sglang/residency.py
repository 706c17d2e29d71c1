"""Decides which layers of an SGLang model are resident: they keep weights as the loader writes them.

Copies go straight into resident layers: no byte is copied twice, and the memory that CUDA graphs have captured stays. A
layer that SGLang processes after loading is staged. A layer counts as resident only if it has no quantisation method,
or one that processes nothing, or one of those below, which do nothing in this case (in 0.5.16 and 0.5.23). Classes are
compared exactly, since a subclass may do more."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.quantization.base_config import QuantizeMethodBase
from sglang.srt.layers.quantization.unquant import (
    UnquantizedEmbeddingMethod,
    UnquantizedFusedMoEMethod,
    UnquantizedLinearMethod,
)
from torch import nn

UNQUANTISED = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod, UnquantizedFusedMoEMethod)
"""Methods that repack weights at most."""


def processing_method(layer: nn.Module) -> Any:
    """The layer's quantisation method if it transforms loaded weights, or may; None: it does not."""
    method: Any = getattr(layer, "quant_method", None)
    process = getattr(type(method), "process_weights_after_loading", None)
    if process is None or process is QuantizeMethodBase.process_weights_after_loading:
        return None
    if type(method) in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod) and not _packed_for_amx(layer):
        return None
    if type(method) is UnquantizedFusedMoEMethod and _leaves_experts(layer, method):
        return None
    return method


def _packed_for_amx(layer: nn.Module) -> bool:
    return bool(getattr(layer, "use_intel_amx_backend", False))


def _leaves_experts(layer: nn.Module, method: Any) -> bool:
    """Whether experts stay as loaded: for the Triton kernels, and on a CPU without AMX."""
    return (
        not _packed_for_amx(layer)
        and not getattr(method, "use_flashinfer_trtllm_moe", False)
        and not getattr(method, "use_flashinfer_cutlass", False)
        and not getattr(method, "w13_swiglu_interleaved", False)
        and torch.version.hip is None
        and layer.get_parameter("w13_weight").device.type in ("cpu", "cuda")
    )
