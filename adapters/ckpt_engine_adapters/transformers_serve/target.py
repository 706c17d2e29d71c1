"""A transformers model as the place to install weights, and the loader for names of checkpoints and of its own.

transformers has no loader for a model that exists. So this one copies each tensor to where `from_pretrained` would
bring it: names are translated by transformers' own table, and experts, which checkpoints have one by one, go to their
places in the fused tensors. What else a checkpoint would need computed is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    apply_renamings,
    rename_source_key,
)

from ckpt_engine.engine.target import ModuleTarget, Weights


class TransformersTarget(ModuleTarget):
    """The model for ckpt-engine: loaded in place, nothing derived, buffers without a checkpoint constant."""

    def __init__(self, model: Any) -> None:
        """model: a PreTrainedModel."""
        self._loader = CheckpointLoader(model)
        super().__init__(model, self._loader.load, ignored=self._loader.ignored)

    def reload(self, weights: Weights) -> None:
        """Has transformers make a second model of the checkpoint, and copies what it holds."""
        model: Any = self.root
        checkpoint = {name: tensor.clone() for name, tensor in weights}
        other = type(model).from_pretrained(None, config=model.config, state_dict=checkpoint, dtype=model.dtype)
        theirs = dict(other.named_parameters()) | dict(other.named_buffers())
        with torch.no_grad():
            for name, tensor in (*model.named_parameters(), *model.named_buffers()):
                tensor.copy_(theirs[name])


class CheckpointLoader:
    """Copies checkpoint tensors into a model's parameters and persistent buffers."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._kind = type(model).__name__
        self._tensors: dict[str, Tensor] = {}
        self._tied: set[str] = set()
        memory: set[int] = set()
        for name, tensor in model.state_dict(keep_vars=True).items():
            if id(tensor) in memory:
                self._tied.add(name)
            memory.add(id(tensor))
            self._tensors[name] = tensor
        self._left_out = [re.compile(each) for each in model._keys_to_ignore_on_load_unexpected or ()]
        transforms = get_model_conversion_mapping(model)
        self._renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
        self._converters = [each for each in transforms if isinstance(each, WeightConverter)]

    def ignored(self, name: str) -> str | None:
        """Why the loader skips the checkpoint tensor `name`; None: it does not."""
        if self._place(name)[0] in self._tied:
            return "tied to another tensor"
        if name.endswith("rotary_emb.inv_freq"):
            return "rotary frequencies follow from the configuration"
        if any(each.search(name) for each in self._left_out):
            return f"transformers' {self._kind} leaves it out"
        return None

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copies tensors, in any order and any number of calls; what has no tensor does not change.

        Raises ValueError: the model has no such tensor, its shape differs, or values would have to be computed.
        """
        for name, tensor in weights:
            if self.ignored(name) is None:
                self._load(name, tensor)

    def _load(self, name: str, tensor: Tensor) -> None:
        key, pattern = self._place(name)
        if key not in self._tensors:
            raise ValueError(f"{name}: this {self._kind} has no such parameter")
        place = self._tensors[key].data
        if pattern is not None:
            place = self._part(name, key, pattern, tensor)
        if place.shape != tensor.shape:
            raise ValueError(f"{name}: the model's shape is {tuple(place.shape)}, the given one {tuple(tensor.shape)}")
        place.copy_(tensor)

    def _place(self, name: str) -> tuple[str, str | None]:
        """The model's name, and the pattern of the converter that makes it of several; None: it is copied as it is."""
        if name in self._tensors:
            return name, None
        found: tuple[str, str | None] = rename_source_key(
            name, self._renamings, self._converters, self._model.base_model_prefix, self._tensors
        )
        return found

    def _part(self, name: str, key: str, pattern: str, tensor: Tensor) -> Tensor:
        """The part of a fused tensor that the checkpoint's tensor of one expert is."""
        fused = self._tensors[key].data
        converter = next(each for each in self._converters if pattern in each.source_patterns)
        number = re.search(pattern.replace("*", r"(\d+)"), apply_renamings(name, self._renamings))
        match converter.operations:
            case [MergeModulelist(dim=0)]:
                axis = None
            case [MergeModulelist(dim=0), Concatenate(dim=axis)] if axis > 0:
                pass
            case _:
                operations = ", ".join(type(each).__name__ for each in converter.operations)
                raise ValueError(
                    f"{name}: transformers computes {key} of it ({operations}), which no update does: publish {key} "
                    "itself, under the name that the model's state_dict has for it"
                )
        if number is None or int(number[1]) >= len(fused) or fused.dim() != tensor.dim() + 1:
            raise ValueError(f"{name}: {key} of shape {tuple(fused.shape)} has no place for it")
        expert = fused[int(number[1])]
        if axis is None:
            return expert
        legs, size = len(converter.source_patterns), tensor.shape[axis - 1]
        if expert.shape[axis - 1] != legs * size:
            raise ValueError(
                f"{name}: {legs} tensors of shape {tuple(tensor.shape)} do not make {key} of {tuple(fused.shape)}"
            )
        return expert.narrow(axis - 1, converter.source_patterns.index(pattern) * size, size)
