"""Differences between the versions of vLLM that we drive, 0.26 to 0.32, for our half inside a worker.

Everything else that we import and call is the same in both.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from vllm.model_executor.layers import attention

try:
    from vllm.model_executor.layers.fusion import mm_input_norm
except ImportError:
    mm_input_norm = None

FusedMMInputNorm: Any = getattr(mm_input_norm, "FusedMMInputNorm", ())
build_mm_input_norm: Any = getattr(mm_input_norm, "build_mm_input_norm", None)
"""The layer with which a vision model normalises pixels on its device, and what makes it of the processor's
configuration; (), None: this vLLM has no such layer."""

_KNOWS: Any = getattr(attention, "is_deferred_attention_layer", None)
_DEFERRED = (attention.Attention, attention.MLAAttention, attention.MMEncoderAttention)


def is_deferred_attention_layer(layer: nn.Module) -> bool:
    """Whether vLLM processes this layer after all others, since it derives tensors from their weights.

    vLLM 0.32 reports it; 0.26 names the three kinds of layers in its loader.
    """
    if _KNOWS is not None:
        return bool(_KNOWS(layer))
    return isinstance(layer, _DEFERRED) and callable(getattr(layer, "process_weights_after_loading", None))
