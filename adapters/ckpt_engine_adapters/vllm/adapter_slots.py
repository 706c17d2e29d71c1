"""vLLM's LoRA slots in one worker, filled from our memory and checked where they lie.

It decides how a version of an adapter becomes a vLLM LoRAModel, what its loader answers, and what a slot must hold.
It does not decide which versions there are (adapter_shelf.py).

vLLM may drop any adapter between two steps (its least recently used, and all of them after an update of the base), and
loads it again in a step, by the path in the request; a path that is not there would end the server. So the loader of
this process answers our paths from the tensors that were verified, and refuses all others: the slots are ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.lora.layers import BaseLayerWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest
from vllm.lora.worker_manager import WorkerLoRAManager

from ckpt_engine.core.adapters import AdapterFacts, factor_name, factor_of, integer_id, served_name
from ckpt_engine.core.names import some
from ckpt_engine.core.problems import data_loss, invalid, precondition
from ckpt_engine.v1 import weights_pb2
from ckpt_engine_adapters.vllm.adapter_names import path_of

_LINEAR = frozenset(
    {
        "ReplicatedLinearWithLoRA",
        "ColumnParallelLinearWithLoRA",
        "MergedColumnParallelLinearWithLoRA",
        "QKVParallelLinearWithLoRA",
        "MergedQKVParallelLinearWithLoRA",
        "RowParallelLinearWithLoRA",
    }
)
"""vLLM's layers with slots that are filled and checked here. Those of experts, embeddings and heads are not."""


@dataclass(frozen=True)
class AdapterVersion:
    """A verified version in this worker's memory."""

    identity: weights_pb2.Identity
    facts: AdapterFacts
    tensors: Mapping[str, Tensor]  # A [rank, inputs] and B [outputs, rank] by name, in the slots' dtype, on the host

    @property
    def number(self) -> int:
        """vLLM's id of it."""
        return integer_id(self.identity)

    @property
    def rank(self) -> int:
        """The highest rank of its modules."""
        return max(self.tensors[factor_name(module, "A")].shape[0] for module in self.facts.scaling)


class AdapterSlots:
    """All slots of one worker. Used on the engine's thread."""

    def __init__(self, model: Any, versions: int) -> None:
        """model: with vLLM's LoRA layers. versions: how many of one adapter may be in use at a time. Takes over the
        loader of this process. Raises FAILED_PRECONDITION."""
        manager = getattr(model, "lora_manager", None)
        if manager is None:
            raise precondition("the server was started with adapters, but without --enable-lora")
        config = manager.lora_config
        if config.fully_sharded_loras:
            raise precondition(
                "adapters: --fully-sharded-loras cuts A and B in a way that is not verified; leave it out"
            )
        if config.max_loras < versions:
            raise precondition(
                f"adapters: {versions} versions of one may be in use at a time: start vLLM with --max-loras {versions} "
                f"or more, not {config.max_loras}"
            )
        self._manager = manager
        self._model = model
        self._versions: dict[str, AdapterVersion] = {}  # by path
        self._dropped: dict[str, AdapterVersion] = {}  # the last one of each adapter
        self.dtype: torch.dtype = config.lora_dtype
        self.most_rank = int(config.max_lora_rank)
        mapper = getattr(model, "hf_to_vllm_mapper", None)
        self._mapper = None if mapper is None else mapper.get_rename_mapper()
        self._parents = {child: parent for parent, children in manager.packed_modules.items() for child in children}
        _answer_loads(self._load)
        activate = manager.activate_adapter

        def activate_and_check(lora_id: int) -> bool:
            activated = bool(activate(lora_id))
            if activated:
                self._check(lora_id)
            return activated

        manager.activate_adapter = activate_and_check

    def check_module(self, module: str, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raises INVALID_ARGUMENT unless this server can serve an adapter of this module. shapes: of A and B."""
        a, b = shapes.get("A"), shapes.get("B")
        if a is None or b is None or len(a) != 2 or len(b) != 2 or a[0] != b[1]:
            raise invalid(f"{module}: an adapter has A [rank, inputs] and B [outputs, rank], not {a} and {b}", [module])
        if a[0] > self.most_rank:
            raise invalid(
                f"{module}: rank {a[0]}, and this server takes {self.most_rank}: start it with --max-lora-rank",
                [module],
            )
        layer = self._layer(module)
        if layer is None:
            raise invalid(
                f"{module}: this server has no LoRA slots there (--lora-target-modules, or another model)", [module]
            )
        name = type(layer).__name__
        if name not in _LINEAR:
            raise invalid(f"{module}: adapters of a {name} are not supported; train linear layers only", [module])

    def _layer(self, module: str) -> BaseLayerWithLoRA | None:
        name = self._vllm_name(module)
        layer: BaseLayerWithLoRA | None = self._manager.modules.get(self._parents.get(name, name))
        return layer

    def _vllm_name(self, module: str) -> str:
        mapped = module if self._mapper is None else self._mapper._map_name(module)
        return module if mapped is None else str(mapped)

    def add(self, version: AdapterVersion) -> None:
        """Takes a version up: fills a slot and compares it. Raises CkptEngineError, and the version is not there."""
        path = path_of(version.identity)
        if any(each.number == version.number and key != path for key, each in self._versions.items()):
            raise precondition(
                f"{served_name(version.identity)} has the same number as another one here: publish again"
            )
        self._versions[path] = version
        try:
            self._manager.remove_adapter(version.number)
            if len(self._manager) + 1 > self._manager.capacity:
                self._manager.remove_oldest_adapter()
            self._manager.add_adapter(self._model_of(version))
            self._manager.activate_adapter(version.number)
        except BaseException:
            # Not dropped as one that was in use: the tensors of that one stay.
            del self._versions[path]
            self._manager.remove_adapter(version.number)
            raise

    def drop(self, identity: weights_pb2.Identity) -> None:
        """Lets go of a version that no request uses. Its tensors stay until the next one of its adapter is dropped: the
        core may still compute a step for a request whose caller has just gone."""
        path = path_of(identity)
        if (version := self._versions.pop(path, None)) is not None:
            self._dropped[identity.lineage] = version
            self._manager.remove_adapter(version.number)

    def _known(self) -> Iterator[AdapterVersion]:
        yield from self._versions.values()
        yield from self._dropped.values()

    def _load(self, request: LoRARequest) -> LoRAModel:
        version = next((each for each in self._known() if path_of(each.identity) == request.lora_path), None)
        if version is None:
            raise precondition(
                f"the adapter {request.lora_name!r} ({request.lora_path}) is none of ckpt-engine's, which has all slots"
            )
        return self._model_of(version)

    def _model_of(self, version: AdapterVersion) -> LoRAModel:
        """A LoRAModel as vLLM's own loader makes it. vLLM multiplies B by the scaling in place: it gets a copy."""
        tensors = {}
        for name, tensor in version.tensors.items():
            tensors[f"base_model.model.{name}"] = tensor.clone() if factor_of(name)[1] == "B" else tensor
        modules = list(version.facts.scaling)
        helper = PEFTHelper(r=version.rank, lora_alpha=version.rank, target_modules=modules)
        lora = LoRAModel.from_lora_tensors(
            version.number, tensors, helper, device="cpu", dtype=self.dtype, weights_mapper=self._mapper
        )
        for module, scaling in version.facts.scaling.items():
            weights = lora.loras[self._vllm_name(module)]
            weights.scaling = scaling
            weights.rank = version.tensors[factor_name(module, "A")].shape[0]
        return lora

    def _check(self, lora_id: int) -> None:
        """Compares an adapter's slot with what follows from the verified tensors. Raises DATA_LOSS, naming layers."""
        version = next((each for each in self._known() if each.number == lora_id), None)
        if version is None:
            return  # vLLM's own, of its warming up
        slot = self._manager.lora_index_to_id.index(lora_id)
        modules = {self._vllm_name(module): module for module in version.facts.scaling}
        differing = []
        for name, layer in self._manager.modules.items():
            parts = [modules.pop(part, None) for part in self._manager.packed_modules.get(name, [name])]
            if not self._holds(layer, slot, version, parts):
                differing.append(name)
        if differing or modules:
            names = differing or sorted(modules)
            raise data_loss(
                f"{served_name(version.identity)} does not lie in the slots of {some(names)} as sealed", names
            )

    def _holds(self, layer: Any, slot: int, version: AdapterVersion, parts: list[str | None]) -> bool:
        stacks = [getattr(layer, f"{each}_stacked", ()) for each in ("lora_a", "lora_b")]
        if not any(parts):
            tensors = [each for stack in stacks for each in ([stack] if isinstance(stack, Tensor) else stack)]
            return not any(bool(tensor[slot].any()) for tensor in tensors)
        a: list[Tensor | None] = []
        b: list[Tensor | None] = []
        for part in parts:
            if part is None:
                a.append(None)
                b.append(None)
                continue
            a.append(version.tensors[factor_name(part, "A")])
            factor = version.tensors[factor_name(part, "B")]
            scaling = version.facts.scaling[part]
            b.append(factor if scaling == 1 else factor * scaling)
        if len(a) == 1 and layer.n_slices == 1:
            sliced_a, sliced_b = a[0], b[0]
            if layer.tp_size > 1:
                sliced_a, sliced_b = layer.slice_lora_a(sliced_a), layer.slice_lora_b(sliced_b)
            a, b = [sliced_a], [sliced_b]
        else:
            if len(b) != layer.n_slices:
                a, b = layer.expand_packed_lora(a, b)
            if layer.tp_size > 1:
                a, b = layer.slice_lora_a(a), layer.slice_lora_b(b)
        factors = [(stacks[0], a), (stacks[1], b)]
        return all(_lies(stack[index][slot, 0], factor) for stack, each in factors for index, factor in enumerate(each))


def _lies(place: Tensor, factor: Tensor | None) -> bool:
    """Whether a slot holds a factor, bit for bit, and zeros around it."""
    expected = torch.zeros_like(place, device="cpu")
    if factor is not None:
        expected[: factor.shape[0], : factor.shape[1]] = factor
    return torch.equal(place.cpu(), expected)


def _answer_loads(load: Callable[[LoRARequest], LoRAModel]) -> None:
    """Has vLLM's loader of this process ask us, and only us."""

    def answer(_manager: WorkerLoRAManager, request: LoRARequest) -> LoRAModel:
        return load(request)

    WorkerLoRAManager._load_adapter = answer
