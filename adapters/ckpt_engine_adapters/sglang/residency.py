"""Which layers of an SGLang model keep their weights as the loader writes them, so that copies go straight into them.

Such layers are resident: no byte is copied twice, and what CUDA graphs have captured stays where it is. A layer that
SGLang processes after loading is staged. A layer counts as resident only if nothing is known to touch its weights: it
has no quantisation method, one that processes nothing, or one of those below, whose processing does nothing here (in
0.5.16 and 0.5.23). Kinds are compared exactly, since a subclass may do more.
"""

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


def processing_method(layer: nn.Module) -> Any:
    """The layer's quantisation method if it brings loaded weights into another form, or may; None if not."""
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
    """Experts stay as loaded for the Triton kernels, and on a CPU without AMX."""
    return (
        not _packed_for_amx(layer)
        and not getattr(method, "use_flashinfer_trtllm_moe", False)
        and not getattr(method, "use_flashinfer_cutlass", False)
        and not getattr(method, "w13_swiglu_interleaved", False)
        and torch.version.hip is None
        and layer.get_parameter("w13_weight").device.type in ("cpu", "cuda")
    )
