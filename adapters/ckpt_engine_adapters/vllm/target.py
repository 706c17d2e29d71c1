"""The LoadTarget of a vLLM model.

It decides which layers are resident (our copies go straight into the live tensors) and which are staged (the loader's
form exists for a moment, then vLLM's own post-processing brings it to its kernels), with vLLM's layerwise reloading
(`vllm.model_executor.model_loader.reload`) as the tool: that module remembers each layer in the loader's form as meta
tensors. It does not decide what is loaded where; the recorded loader does.

A layer is resident if nothing processes it after loading (residency.py): on CUDA all unquantised ones but experts.
Linear layers on a CPU are staged: oneDNN repacks them and leaves empty parameters. A layer that shares another one's
parameter (a tied output head) is neither: its bytes arrive through the owner, and its packed copy is made again.

Quantised layers are staged: the bytes are verified in the loader's form, then vLLM's method quantises or repacks them
as at start, and what it makes is copied to where kernels and captured graphs read. That the addresses are those of
before is checked. vLLM's online methods process a layer as soon as their loaders have all of it; the loaders that we
record and run are those below that.

Buffers that no checkpoint has are constant, unless they are made of weights: those that vLLM has left out of the
loader's form because they were views of a parameter, and those with names of weights. They are kept right where it is
known how (the convolution of Mamba); any other refuses an update.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import ModelConfig
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.reload import layerwise
from vllm.model_executor.model_loader.reload.meta import SKIP_TENSORS, materialize_layer, restore_layer_on_meta
from vllm.model_executor.model_loader.reload.utils import (
    get_layer_params_buffers,
    get_layer_size,
    get_layer_tensors,
)
from vllm.model_executor.models.utils import PPMissingLayer, StageMissingLayer
from vllm.platforms import current_platform

from ckpt_engine.core.names import full_name
from ckpt_engine.core.problems import internal, precondition
from ckpt_engine.engine.elsewhere import Elsewhere
from ckpt_engine.engine.kernel_tensors import KernelTensors, address, parts
from ckpt_engine.engine.stray_tensors import stray_tensors_kept
from ckpt_engine.engine.target import Quantised, StagedLayer, Weights
from ckpt_engine_adapters.vllm.input_norms import input_norms
from ckpt_engine_adapters.vllm.quantised import may_hold_tensors, quantised_layers, without_own_reload
from ckpt_engine_adapters.vllm.residency import UNCHANGED_ON_CUDA, derives, is_processed
from ckpt_engine_adapters.vllm.versions import is_deferred_attention_layer

_Tensors = tuple[dict[str, Any], dict[str, Tensor | None], set[str]]


class VllmTarget:
    """One worker's model in vLLM, for installs (LoadTarget). Used on the worker's main thread, in vLLM's config
    context."""

    def __init__(
        self,
        model: nn.Module,
        model_config: ModelConfig,
        shared: str = "",
        refused: str = "",
        apart: Collection[nn.Module] = (),
    ) -> None:
        """shared: how workers share layers, if they do ("tensor parallelism of 2"); it refuses updates of quantised
        layers on GPUs. refused: why this server can take no update; empty: it can. apart: modules of another model of
        this worker. Layers that this one shares with it are that one's."""
        self._model = model
        self._why_refused = refused
        self._elsewhere = Elsewhere(model, "hf_to_vllm_mapper", (PPMissingLayer,), _left_out)
        self._model_config = model_config
        others = frozenset(apart)
        self._layers: dict[str, nn.Module] = {
            prefix: layer for prefix, layer in model.named_modules() if get_layer_tensors(layer) and layer not in others
        }
        self._tied = _tied_tensors(self._layers.values())
        tied_layers = {layer for layer, *_ in self._tied}
        self._staged_layers = {
            prefix: layer for prefix, layer in self._layers.items() if layer not in tied_layers and is_processed(layer)
        }
        self._quantised = dict(quantised_layers(self._staged_layers))
        self._refused = self._refusals(shared)
        self._kernels: dict[nn.Module, KernelTensors] = {}
        self._results: dict[nn.Module, Collection[str]] = {}
        self._results |= {layer: self._kernels_of(layer).paths for layer in self._staged_layers.values()}
        self._deriving = [layer for layer in model.modules() if derives(layer) and layer not in others]
        self._made_of_weights = set(_buffers_of_weights(self._layers))
        self._mirrors: dict[nn.Module, list[tuple[nn.Module, str]]] = {}
        self._derived: dict[str, str] = {}
        for prefix, name in self._made_of_weights:
            self._follow(self._layers[prefix], name, full_name(prefix, name))
        self._input_norms = set(input_norms(model))
        for prefix, layer in self._layers.items():
            if layer in self._deriving:
                loaded = layerwise.get_layerwise_info(layer).restore_metadata[0]
                for name in layer._parameters.keys() - loaded.keys():
                    self._derived[f"{prefix}.{name}"] = "made of other layers' weights by this attention layer"

    def _kernels_of(self, layer: nn.Module) -> KernelTensors:
        return KernelTensors(layer, may_hold_tensors, self._results.get(layer))

    def _refusals(self, shared: str) -> list[str]:
        """Why this server can take no update."""
        found = [self._why_refused] if self._why_refused else []
        if shared and self._quantised and current_platform.is_cuda():
            name, how = next(iter(self._quantised.items()))
            found.append(
                f"{len(self._quantised)} of its layers are quantised ({name} by {how.method}) under {shared} on GPUs, "
                "where processing may be a collective of the workers, and no test has seen that yet: start each "
                "replica on one GPU, or without quantisation"
            )
        for layer, *_ in self._tied:
            method = getattr(layer, "quant_method", None)
            if isinstance(method, QuantizeMethodBase) and type(method) not in UNCHANGED_ON_CUDA:
                found.append(
                    f"a layer whose weight another one shares is quantised ({type(method).__name__}), which no update "
                    "can follow: untie them"
                )
        return found

    def _follow(self, layer: nn.Module, name: str, full: str) -> None:
        """Finds how a buffer that is made of weights is kept right, if that is known."""
        buffer = layer._buffers[name]
        assert buffer is not None
        shared = [owner for owner, each in layer.named_parameters() if _share(each, buffer)]
        convolution: Any = getattr(layer, "conv1d", None)
        if shared:
            self._derived[full] = f"shows the memory of {shared[0]}"
        elif name == "conv_weights" and convolution in self._staged_layers.values():
            self._mirrors.setdefault(convolution, []).append((layer, name))
            self._derived[full] = "a copy of conv1d.weight as it is loaded"

    @property
    def root(self) -> nn.Module:
        return self._model

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._model.named_parameters()
        yield from self._model.named_buffers()

    def load_weights(self, weights: Weights) -> object:
        with without_own_reload(self._model):
            return self._model.load_weights(weights)  # type: ignore[operator]

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Puts staged layers into the loader's form, as meta tensors; on exit all are as before."""
        if self._refused:
            raise precondition("; ".join(self._refused))
        live_tensors = {prefix: _take(layer) for prefix, layer in self._layers.items()}
        try:
            for layer in self._staged_layers.values():
                _to_loader_form(layer)
            for layer, name, owner, owner_name in self._tied:
                layer._parameters[name] = owner._parameters[owner_name]
            with stray_tensors_kept(self._model):
                yield
        finally:
            for prefix, tensors in live_tensors.items():
                _put(self._layers[prefix], tensors)

    def derived(self) -> Mapping[str, str]:
        return self._derived

    def constant(self) -> Mapping[str, str]:
        reasons = {}
        for prefix, layer in self._model.named_modules():
            names = {name for name in layer._non_persistent_buffers_set if (prefix, name) not in self._made_of_weights}
            if is_deferred_attention_layer(layer):
                names |= {name for name in get_layer_tensors(layer) if name.endswith("_scale")}
            for name in names:
                reasons[full_name(prefix, name)] = "a buffer that no checkpoint holds"
            if layer in self._input_norms:
                for name in layer._buffers:
                    reasons[full_name(prefix, name)] = "computed from the processor's configuration"
        return reasons

    def ignored(self, name: str) -> str | None:
        config = self._model_config.hf_text_config
        if name.endswith("rotary_emb.inv_freq"):
            return "computed from the configuration"
        if name.startswith("lm_head.") and getattr(config, "tie_word_embeddings", False):
            return "tied to the embedding"
        return None

    def elsewhere(self, name: str) -> str | None:
        return self._elsewhere.why(name)

    def absent(self, name: str) -> str | None:
        return self._elsewhere.absent(name)

    def staged(self) -> Collection[str]:
        """The names in the form of the loader and in that of the kernels: a method may leave out, add and rename
        tensors."""
        return {
            full_name(prefix, name)
            for prefix, layer in self._staged_layers.items()
            for name in (*get_layer_tensors(layer), *_loader_form(layer))
        }

    def quantised(self) -> Mapping[str, Quantised]:
        return self._quantised

    def kernel_tensors(self) -> list[Tensor]:
        """What the kernels of staged layers hold beside parameters and buffers."""
        kernels = [self._kernels_of(layer) for layer in self._staged_layers.values()]
        return [tensor for each in kernels for tensor in each.tensors.values()]

    @contextmanager
    def staging(self) -> Iterator[Iterator[StagedLayer]]:
        """Takes all staged layers out of the live form; they return to it one by one. An exception puts the rest back,
        with old or torn weights, so that the engine survives and a full update can follow."""
        try:
            for layer in self._staged_layers.values():
                self._kernels[layer] = self._kernels_of(layer)
                _begin(layer)
            yield self._stage()
        finally:
            for layer in self._staged_layers.values():
                info = layerwise.get_layerwise_info(layer)
                if info.can_load():
                    layerwise._place_kernel_tensors(layer, info)
                    info.reset()
                if layer in self._kernels:
                    self._kernels.pop(layer).put_back()

    def _stage(self) -> Iterator[StagedLayer]:
        for prefix, layer in self._staged_layers.items():
            info = layerwise.get_layerwise_info(layer)
            materialize_layer(layer, info)
            tensors = {full_name(prefix, name): tensor for name, tensor in get_layer_tensors(layer).items()}
            yield StagedLayer(tensors, partial(self._finish, layer))

    def _finish(self, layer: nn.Module) -> None:
        for holder, name in self._mirrors.get(layer, ()):
            buffer, weight = holder._buffers[name], layer.get_parameter("weight")
            assert buffer is not None
            with torch.inference_mode():
                buffer.copy_(weight.view(buffer.shape))
        before = _addresses(layerwise.get_layerwise_info(layer).kernel_tensors)
        with _default_dtype(self._model_config.dtype):  # as while vLLM loads
            _finish(layer)
        if layer in self._kernels:
            self._kernels.pop(layer).take_over()
        after = _addresses(get_layer_params_buffers(layer))
        if moved := sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name)):
            raise internal(
                f"vLLM has made {', '.join(moved)} of a {type(layer).__name__} in other memory than its kernels and "
                "CUDA graphs read",
                moved,
            )

    def reload(self, weights: Weights) -> None:
        """Loads weights as vLLM's `reload_weights` does with an iterator. Makes kernels again, as an install does."""
        kernels = [self._kernels_of(layer) for layer in self._staged_layers.values()]
        layerwise.initialize_layerwise_reload(self._model)
        try:
            self._model.load_weights(weights)  # type: ignore[operator]
        finally:
            layerwise.finalize_layerwise_reload(self._model, self._model_config)
            for each in kernels:
                each.take_over()

    def post_load(self) -> None:
        """Makes what depends on other layers' weights: a tied output head's packed copy, then attention layers (MLA
        absorbs its projections), which come last in vLLM too."""
        for layer in dict.fromkeys(layer for layer, *_ in self._tied):
            method: Any = getattr(layer, "quant_method", None)
            if isinstance(method, QuantizeMethodBase):
                method.process_weights_after_loading(layer)
        # On the device on which vLLM loads: some layers make tensors without naming one.
        with next(self._model.parameters()).device:
            for attention in self._deriving:
                process: Any = attention.process_weights_after_loading
                process(self._model_config.dtype)


def _left_out(module: nn.Module) -> str | None:
    """The module that a worker's model was made without and that `module` stands for ("vision tower"), if it does:
    vLLM leaves towers out of a server that sees no pictures, and also out of later pipeline stages."""
    return module.stage_name.replace("_", " ") if isinstance(module, StageMissingLayer) else None


def _buffers_of_weights(layers: Mapping[str, nn.Module]) -> Iterator[tuple[str, str]]:
    """(layer's name, buffer's name) of buffers that no checkpoint has and that are not constant.

    vLLM notes the loader's form of every buffer before it loads, except of views of a parameter.
    """
    for prefix, layer in layers.items():
        noted = layerwise.get_layerwise_info(layer).restore_metadata[1]
        for name in layer._non_persistent_buffers_set:
            buffer = layer._buffers.get(name)
            if buffer is None or not buffer.is_floating_point() or name in SKIP_TENSORS:
                continue
            if name not in noted or "weight" in name:
                yield prefix, name


def _share(one: Tensor, other: Tensor) -> bool:
    if not one.numel() or not other.numel() or one.is_mkldnn or other.is_mkldnn:
        return False
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _tied_tensors(layers: Iterable[nn.Module]) -> list[tuple[nn.Module, str, nn.Module, str]]:
    """(layer, name, owner, owner's name) of each parameter that an earlier layer has too, such as a tied lm_head's."""
    owners: dict[int, tuple[nn.Module, str]] = {}
    tied = []
    for layer in layers:
        for name, parameter in layer._parameters.items():
            if parameter is None:
                continue
            owner, owner_name = owners.setdefault(id(parameter), (layer, name))
            if owner is not layer:
                tied.append((layer, name, owner, owner_name))
    return tied


def _loader_form(layer: nn.Module) -> Mapping[str, Tensor]:
    parameters, buffers = layerwise.get_layerwise_info(layer).restore_metadata
    return {**parameters, **buffers}


def _to_loader_form(layer: nn.Module) -> None:
    """Replaces a layer's tensors by meta tensors in the loader's form, with the loaders that write to them.

    vLLM's online methods wrap the loaders while a layer is made, so that the noted form has wrapped ones: those collect
    what is loaded until a layer is complete, and return at once if it has been processed.
    """
    restore_layer_on_meta(layer, layerwise.get_layerwise_info(layer))
    for tensor in get_layer_tensors(layer).values():
        loader: Any = getattr(tensor, "weight_loader", None)
        while getattr(loader, "__name__", "") == "online_process_loader":
            loader = loader.__wrapped__
            tensor.weight_loader = loader


def _addresses(tensors: Any) -> dict[str, tuple[int, ...]]:
    """Where the memory of parameters and buffers (as vLLM has them, in two dictionaries) lies, by name; a packed one's
    is that of its parts."""
    parameters, buffers = tensors
    return {name: tuple(map(address, parts(tensor))) for name, tensor in {**parameters, **buffers}.items()}


def _begin(layer: nn.Module) -> None:
    info = layerwise.get_layerwise_info(layer)
    info.kernel_tensors = get_layer_params_buffers(layer)
    if hasattr(info, "kernel_non_persistent_buffers"):
        info.kernel_non_persistent_buffers = set(layer._non_persistent_buffers_set)
    _to_loader_form(layer)
    info.load_numel = 0
    info.load_numel_total = get_layer_size(layer)


def _finish(layer: nn.Module) -> None:
    """Runs vLLM's own post-processing of one layer, and copies its tensors back to the memory that kernels use."""
    method: Any = getattr(layer, "quant_method", None)
    if current_platform.is_cpu() and getattr(method, "moe_kernel", None) is not None:
        # If a kernel exists already, vLLM 0.32 skips the packing that experts need on a CPU, and serves nonsense.
        method.moe_kernel = None
    layerwise._layerwise_process(layer, layerwise.get_layerwise_info(layer))


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _take(layer: nn.Module) -> _Tensors:
    return dict(layer._parameters), dict(layer._buffers), set(layer._non_persistent_buffers_set)


def _put(layer: nn.Module, tensors: _Tensors) -> None:
    parameters, buffers, non_persistent = tensors
    for name in get_layer_tensors(layer):
        delattr(layer, name)
    layer._parameters.update(parameters)
    layer._buffers.update(buffers)
    layer._non_persistent_buffers_set = non_persistent
