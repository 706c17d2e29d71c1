"""The LoadTarget of an SGLang model.

It decides which layers are resident (our copies go straight into the live tensors) and which are staged (the loader's
form exists for a moment, then SGLang's own post-processing makes the kernels' form of it, which is copied to where the
kernels read). It does not decide what is loaded where; the recorded loader does.

A layer is resident if nothing processes it after loading (residency.py): all unquantised ones, on CUDA and on a CPU
without AMX. Results of a model's `post_load_weights` (MLA absorbs its projections) are plain attributes beside its
parameters. They are recomputed after each install; SGLang itself recomputes them only after its own loaders.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from sglang.srt.layers.moe.fused_moe_triton import FusedMoE
from sglang.srt.layers.quantization.base_config import QuantizationConfig
from sglang.srt.layers.utils import PPMissingLayer
from torch import Tensor, nn

from ckpt_engine.core.names import full_name
from ckpt_engine.core.problems import precondition
from ckpt_engine.engine.elsewhere import Elsewhere
from ckpt_engine.engine.kernel_tensors import KernelTensors
from ckpt_engine.engine.stray_tensors import stray_tensors_kept
from ckpt_engine.engine.target import Quantised, StagedLayer, Weights
from ckpt_engine_adapters.sglang.beside import PostLoadTensors, made_while_loading
from ckpt_engine_adapters.sglang.forms import materialized, noted_forms, same_form, storage_address
from ckpt_engine_adapters.sglang.live import LiveLayer
from ckpt_engine_adapters.sglang.residency import UNQUANTISED, processing_method


class SglangTarget:
    """See LoadTarget. Used on the scheduler's main thread."""

    def __init__(
        self,
        model: nn.Module,
        text_config: Any,
        refused: Sequence[str] = (),
        session: Any = None,
        gpus: int = 0,
    ) -> None:
        """text_config: of the checkpoint, from transformers. refused: reasons why this server takes no update; any one
        refuses all. session: begins and ends SGLang's own updates of this model (`WeightUpdater` of newer versions).
        gpus: over which each layer is split; 0: it is not on GPUs."""
        self._model = model
        self._session = session
        self._text_config = text_config
        self._elsewhere = Elsewhere(model, "hf_to_sglang_mapper", (PPMissingLayer,))
        self._layers = {prefix: layer for prefix, layer in model.named_modules() if layer._parameters}
        self._refused = [*refused]
        self._forms: dict[str, Mapping[str, Tensor]] = {}
        self._staged_layers: dict[str, nn.Module] = {}
        noted = noted_forms(model)
        for prefix, layer in self._layers.items():
            form = noted.get(layer) if noted is not None else None
            if processing_method(layer) is None:
                self._refuse_changed(prefix, layer, form)
            elif form is None:
                self._refused.append(f"the layer {prefix} is processed after loading in an unknown way")
            else:
                self._staged_layers[prefix] = layer
                self._forms[prefix] = form
        self._quantised = dict(_quantised(self._staged_layers, self._forms))
        if self._quantised and gpus > 1:
            name, how = next(iter(self._quantised.items()))
            self._refused.append(
                f"{len(self._quantised)} of its layers are quantised ({name} by {how.method}) and split over {gpus} "
                "GPUs, where no test has seen an update yet: start each replica on one GPU, or without quantisation"
            )
        self._results = {layer: KernelTensors(layer, _may_hold_tensors).paths for layer in self._staged_layers.values()}
        self._refuse_shared()
        self._computed = PostLoadTensors(model, made_while_loading(model, {*self._staged_layers.values()}))
        self._derived = dict(_buffers_of_weights(model))
        self._derived |= dict.fromkeys(self._scales(), "made by SGLang when it quantises the layer")
        self._derived |= dict.fromkeys(self._computed.tensors, "computed of loaded weights by SGLang's post-load step")
        self._refuse_post_load()

    def _refuse_changed(self, prefix: str, layer: nn.Module, form: Mapping[str, Tensor] | None) -> None:
        for name, parameter in layer._parameters.items():
            if parameter is None or form is None:
                continue
            if name not in form or not same_form(parameter, form[name]):
                self._refused.append(
                    f"{prefix}.{name} is not in the form of SGLang's loader any more, and what changed it is unknown"
                )

    def _scales(self) -> Iterator[str]:
        """Parameters of layers which SGLang quantises itself that exist before that, and that no loader writes."""
        for prefix, how in self._quantised.items():
            for name, form in self._forms[prefix].items():
                if not how.published and _is_made(name, form):
                    yield full_name(prefix, name)

    def _refuse_post_load(self) -> None:
        if not hasattr(self._model, "post_load_weights"):
            self._refused += [f"nothing recomputes {name} from new weights" for name in self._computed.tensors]
            return
        # The step reads what the loader writes, and a staged layer has that form only while it is loaded.
        for prefix, layer in self._staged_layers.items():
            if not isinstance(layer, FusedMoE):
                self._refused.append(f"{prefix} is quantised, and the model computes more of its weights")

    def _refuse_shared(self) -> None:
        """Refuses a staged layer's parameter that another layer shares: it would be processed in one of them only."""
        owners: dict[int, str] = {}
        for prefix, layer in self._layers.items():
            for parameter in layer._parameters.values():
                other = owners.setdefault(id(parameter), prefix) if parameter is not None else prefix
                if other != prefix and (prefix in self._staged_layers or other in self._staged_layers):
                    self._refused.append(
                        f"the layers {other} and {prefix} share a weight that is processed after loading"
                    )

    @property
    def root(self) -> nn.Module:
        return self._model

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._model.named_parameters()
        yield from self._model.named_buffers()
        yield from self._computed.named()

    def load_weights(self, weights: Weights) -> object:
        with self._without_post_load():
            return self._model.load_weights(weights)  # type: ignore[operator]

    @contextmanager
    def _without_post_load(self) -> Iterator[None]:
        """Skips the model's post-load step, which some loaders end with: it computes on values, and `post_load` runs
        it."""
        holders = [module for module in self._model.modules() if hasattr(module, "post_load_weights")]
        before = [(module, module.__dict__.get("post_load_weights")) for module in holders]
        try:
            for module in holders:
                module.__dict__["post_load_weights"] = _nothing
            yield
        finally:
            for module, own in before:
                del module.__dict__["post_load_weights"]
                if own is not None:
                    module.__dict__["post_load_weights"] = own

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Puts staged layers into the loader's form, as meta tensors; on exit all are as before."""
        if self._refused:
            raise precondition(f"this server can take no update: {'; '.join(self._refused[:4])}")
        live = [LiveLayer(layer) for layer in self._staged_layers.values()]
        try:
            for prefix, layer in self._staged_layers.items():
                _stand_in(layer, self._forms[prefix], torch.device("meta"))
            with stray_tensors_kept(self._model):
                yield
        finally:
            for each in live:
                each.put_back()

    def derived(self) -> Mapping[str, str]:
        return self._derived

    def constant(self) -> Mapping[str, str]:
        reasons = {}
        for prefix, module in self._model.named_modules():
            for name in module._non_persistent_buffers_set:
                buffer_name = full_name(prefix, name)
                if buffer_name not in self._derived and not name.endswith(_OF_WEIGHTS):
                    reasons[buffer_name] = "a buffer that no checkpoint holds"
        return reasons

    def ignored(self, name: str) -> str | None:
        if "rotary_emb." in name:
            return "computed from the configuration"
        if name.startswith("lm_head.") and getattr(self._text_config, "tie_word_embeddings", False):
            return "tied to the embedding"
        return None

    def elsewhere(self, name: str) -> str | None:
        return self._elsewhere.why(name)

    def absent(self, name: str) -> str | None:
        return self._elsewhere.absent(name)

    def staged(self) -> Collection[str]:
        return {full_name(prefix, name) for prefix, form in self._forms.items() for name in form}

    def quantised(self) -> Mapping[str, Quantised]:
        return self._quantised

    def kernel_tensors(self) -> list[Tensor]:
        """What the kernels of staged layers hold beside parameters and buffers."""
        kernels = [KernelTensors(layer, _may_hold_tensors) for layer in self._staged_layers.values()]
        return [tensor for each in kernels for tensor in each.tensors.values()]

    @contextmanager
    def staging(self) -> Iterator[Iterator[StagedLayer]]:
        """Takes layers out of the live form one by one; each returns to it when it is finished. An exception puts the
        others back with old weights, so that the engine survives and a full update can follow."""
        open_layers: dict[str, LiveLayer] = {}
        try:
            yield self._stage(open_layers)
        finally:
            for live in open_layers.values():
                live.put_back()

    def _stage(self, open_layers: dict[str, LiveLayer]) -> Iterator[StagedLayer]:
        for prefix, layer in self._staged_layers.items():
            live = LiveLayer(layer, KernelTensors(layer, _may_hold_tensors, self._results[layer]))
            open_layers[prefix] = live
            parameters = _stand_in(layer, self._forms[prefix], live.device)
            tensors = {full_name(prefix, name): tensor for name, tensor in parameters.items()}
            yield StagedLayer(tensors, partial(self._finish, prefix, open_layers))

    def _finish(self, prefix: str, open_layers: dict[str, LiveLayer]) -> None:
        layer, live = self._staged_layers[prefix], open_layers[prefix]
        with torch.no_grad(), live.device:
            processing_method(layer).process_weights_after_loading(layer)
        live.take_over()
        del open_layers[prefix]

    def reload(self, weights: Weights) -> None:
        """Loads weights as SGLang's own begin, update and end calls do; older versions have only the update."""
        begin: Any = getattr(self._session, "begin_weight_update", None)
        if begin is not None:
            begin()
        self._model.load_weights(weights)  # type: ignore[operator]
        if begin is not None:
            self._session.end_weight_update(run_post_load=False)

    def post_load(self) -> None:
        """Recomputes what the model derives from loaded weights and keeps beside its parameters."""
        compute: Any = getattr(self._model, "post_load_weights", None)
        if compute is not None:
            with torch.no_grad(), next(self._model.parameters()).device:
                self._computed.before()
                compute()
                self._computed.after()


_OF_WEIGHTS = ("weight", "weights")


def _nothing(*_: object, **__: object) -> None:
    """Stands in for a post-load step."""


def _stand_in(layer: nn.Module, form: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Replaces the layer's parameters by new ones in the loader's form, on `device`."""
    parameters = {name: materialized(tensor, device) for name, tensor in form.items()}
    for name, tensor in parameters.items():
        if _is_made(name, tensor):
            tensor.data.fill_(1)  # as SGLang makes it
    layer._parameters.clear()
    layer._parameters.update(parameters)  # type: ignore[arg-type]
    return parameters


def _is_made(name: str, form: Tensor) -> bool:
    """Whether a parameter is a scale that no loader writes."""
    return name.endswith("_scale") and not hasattr(form, "weight_loader")


def _may_hold_tensors(value: object) -> bool:
    """Whether a kernel may keep tensors in this object: one of SGLang's layers' own, but no configuration."""
    return type(value).__module__.startswith("sglang.srt.layers.") and not isinstance(value, QuantizationConfig)


def _quantised(
    layers: Mapping[str, nn.Module], forms: Mapping[str, Mapping[str, Tensor]]
) -> Iterator[tuple[str, Quantised]]:
    for prefix, layer in layers.items():
        method = processing_method(layer)
        if not isinstance(method, UNQUANTISED):
            published = any(form.dtype.itemsize == 1 for form in forms[prefix].values())
            yield prefix, Quantised(published, type(method).__name__)


def _buffers_of_weights(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Buffers that no checkpoint has and that are views of one of their layer's parameters."""
    for prefix, layer in model.named_modules():
        for name in layer._non_persistent_buffers_set:
            buffer = layer._buffers.get(name)
            if buffer is None or not buffer.numel():
                continue
            for owner, parameter in layer.named_parameters():
                if storage_address(parameter) == storage_address(buffer) != 0:
                    yield full_name(prefix, name), f"shows the memory of {owner}"
                    break
