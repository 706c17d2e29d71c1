"""Decides which layers of a vLLM model are resident: they keep weights as the loader writes them.

Copies go straight into resident layers: no byte is copied twice, and the memory that CUDA graphs have captured stays. A
layer that vLLM processes after loading is staged. A layer counts as resident only if it has no quantisation method, or
one of those below on CUDA, where their post-processing does nothing (in 0.26 and 0.32; on a CPU oneDNN repacks the same
layers). Classes are compared exactly, since a subclass may do more.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload import layerwise
from vllm.model_executor.model_loader.reload.utils import get_layer_tensors
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionImplBase

from ckpt_engine_adapters.vllm.versions import is_deferred_attention_layer

UNCHANGED_ON_CUDA = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
"""Methods whose process_weights_after_loading does nothing there."""


def is_processed(layer: nn.Module) -> bool:
    """Whether vLLM changes the form or the place of this layer's weights after its loader."""
    if is_deferred_attention_layer(layer):
        return False
    method: Any = getattr(layer, "quant_method", None)
    if isinstance(method, QuantizeMethodBase) and not _leaves_unchanged(method):
        return True
    tensors = get_layer_tensors(layer)
    if any(getattr(tensor, "_vllm_is_uva_offloaded", False) for tensor in tensors.values()):
        return True
    parameters, buffers = layerwise.get_layerwise_info(layer).restore_metadata
    loader_form = parameters | buffers
    if isinstance(method, QuantizeMethodBase) and any(name not in tensors for name in parameters):
        return True
    return any(name in loader_form and not _same_form(tensor, loader_form[name]) for name, tensor in tensors.items())


def derives(layer: nn.Module) -> bool:
    """Whether an attention layer derives tensors from loaded weights, so that it must be processed after each install.

    Processing ordinary ones would only set scales that no checkpoint has to the values that they have already: four
    kernels a layer, which take a tenth of the time of the model's copy.
    """
    if not is_deferred_attention_layer(layer):
        return False
    kind: Any = type(layer)
    if kind.process_weights_after_loading is not Attention.process_weights_after_loading or hasattr(
        layer, "quant_method"
    ):
        return True
    implementation: Any = type(getattr(layer, "impl", None))
    process = getattr(implementation, "process_weights_after_loading", None)
    return process is not AttentionImplBase.process_weights_after_loading


def _leaves_unchanged(method: QuantizeMethodBase) -> bool:
    return type(method) in UNCHANGED_ON_CUDA and bool(current_platform.is_cuda())


def _same_form(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.stride() == other.stride() and one.dtype == other.dtype
