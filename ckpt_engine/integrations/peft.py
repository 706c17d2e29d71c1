"""PEFT: a model with adapters, published as the merged model that engines serve."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

_WRAPPERS = ("base_model.model.", ".base_layer", ".modules_to_save.default")


def publishable(model: Any, merge: bool = True) -> Any:
    """What to publish of a model: itself; for one with adapters, if they are to be merged, a callable that does so at
    each update."""
    has_adapters = hasattr(model, "merge_adapter") and hasattr(model, "peft_config")
    return merged(model) if merge and has_adapters else model


def merged(model: Any) -> Callable[[], Iterator[tuple[str, torch.Tensor]]]:
    """A callable for `Trainer.publish` of a PeftModel. At each update it merges the adapters into the base weights,
    yields these under the names of the base model's checkpoint, and takes the adapters out again.

    The adapters are taken out also if the walk fails. Merging and unmerging round: base weights may differ in their
    last bits afterwards, as after every `merge_adapter` and `unmerge_adapter` of PEFT. Modules that are trained whole
    (`modules_to_save`) replace the original ones.
    """

    def walk() -> Iterator[tuple[str, torch.Tensor]]:
        model.merge_adapter()
        try:
            yield from _parts(model)
        finally:
            model.unmerge_adapter()

    return walk


def base_weights(model: Any) -> Callable[[], Iterator[tuple[str, torch.Tensor]]]:
    """A callable for `Trainer.publish` of the model below a PeftModel's adapters, under the names of its checkpoint."""

    def walk() -> Iterator[tuple[str, torch.Tensor]]:
        return _parts(model)

    return walk


def _parts(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    # A state dict has tied weights under each name, as checkpoints do; yield each memory once.
    yielded: set[tuple[int, tuple[int, ...]]] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        key = (tensor.data_ptr(), tuple(tensor.shape))
        if _is_part(name, model.prefix) and not (tensor.numel() and key in yielded):
            yielded.add(key)
            yield plain_name(name), tensor


def plain_name(name: str) -> str:
    """The base model's name for a tensor of a PeftModel."""
    for part in _WRAPPERS:
        name = name.replace(part, "", 1)
    return name


def _is_part(name: str, prefix: str) -> bool:
    """Whether a tensor belongs to the merged model. prefix: of the adapters' own tensors, by the tuner ("lora_")."""
    return not any(part.startswith(prefix) for part in name.split(".")) and ".original_module." not in name
