"""What is particular about quantised models in vLLM: which layers are, where kernels keep tensors, made-up scales.

It says which side quantised a layer, and which objects are looked into for tensors; the target stages the layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn
from vllm.model_executor.layers.attention.attention import set_default_quant_scales
from vllm.model_executor.layers.fused_moe import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod
from vllm.model_executor.model_loader.reload import layerwise

from ckpt_engine.engine.target import Quantised
from ckpt_engine_adapters.vllm.residency import UNCHANGED_ON_CUDA

_UNQUANTISED = (*UNCHANGED_ON_CUDA, UnquantizedFusedMoEMethod)
_NOT_OF_KERNELS = ("vllm.config", "vllm.distributed")


def quantised_layers(staged: Mapping[str, nn.Module]) -> Iterator[tuple[str, Quantised]]:
    """The quantised ones of the staged layers, by name."""
    for prefix, layer in staged.items():
        method: Any = getattr(layer, "quant_method", None)
        if isinstance(method, QuantizeMethodBase) and not isinstance(method, _UNQUANTISED):
            parameters, _ = layerwise.get_layerwise_info(layer).restore_metadata
            published = any(parameter.dtype.itemsize == 1 for parameter in parameters.values())
            yield prefix, Quantised(published, type(method).__name__)


def may_hold_tensors(value: object) -> bool:
    """Whether a kernel may keep tensors in this object: one of vLLM's own, but no configuration and no group of
    workers."""
    module = type(value).__module__
    if not module.startswith("vllm.") or module.startswith(_NOT_OF_KERNELS):
        return False
    return not isinstance(value, QuantizationConfig)


def reset_made_up_scales(model: nn.Module) -> None:
    """Gives attention layers the scales of caches that a checkpoint without such scales has.

    For a model with made-up weights (`--load-format dummy`): of a quantised checkpoint vLLM makes the scales up, too,
    and keeps them.
    """
    for layer in model.modules():
        if isinstance(getattr(layer, "quant_method", None), BaseKVCacheMethod):
            set_default_quant_scales(layer)


@contextmanager
def without_own_reload(model: nn.Module) -> Iterator[None]:
    """Keeps vLLM's loader of a torchao model from beginning a reload of its own, as it does once the model is loaded:
    that would take layers out of the form in which they are recorded or staged."""
    modules: list[dict[str, Any]] = [vars(module) for module in model.modules()]
    reloading = [attributes for attributes in modules if attributes.get("_do_torchao_reload")]
    try:
        for attributes in reloading:
            attributes["_do_torchao_reload"] = False
        yield
    finally:
        for attributes in reloading:
            attributes["_do_torchao_reload"] = True
