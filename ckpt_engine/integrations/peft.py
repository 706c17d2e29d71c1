"""PEFT: a model with adapters, published as the merged model that engines serve."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

_WRAPPERS = ("base_model.model.", ".base_layer", ".modules_to_save.default")


def merged(model: Any) -> Callable[[], Iterator[tuple[str, torch.Tensor]]]:
    """What `Trainer.publish` takes for a PeftModel: at each update the adapters are merged into the base weights,
    these are copied under the names of the base model's checkpoint, and the adapters are taken out again.

    The walk ends with the adapters taken out, whatever happens in it. Merging and unmerging round: base weights may
    differ in their last bits afterwards, as after every `merge_adapter` and `unmerge_adapter` of PEFT. Modules that are
    trained whole (`modules_to_save`) take the place of the ones that they replace.
    """

    def walk() -> Iterator[tuple[str, torch.Tensor]]:
        model.merge_adapter()
        try:
            # State dicts, since tied weights stand there once a name, as they do in checkpoints; each memory once.
            yielded: set[tuple[int, tuple[int, ...]]] = set()
            for name, tensor in model.state_dict(keep_vars=True).items():
                key = (tensor.data_ptr(), tuple(tensor.shape))
                if _is_part(name, model.prefix) and not (tensor.numel() and key in yielded):
                    yielded.add(key)
                    yield plain_name(name), tensor
        finally:
            model.unmerge_adapter()

    return walk


def plain_name(name: str) -> str:
    """The base model's name for a tensor of a PeftModel."""
    for part in _WRAPPERS:
        name = name.replace(part, "", 1)
    return name


def _is_part(name: str, prefix: str) -> bool:
    """Whether the merged model has it. prefix: of the adapters' own tensors, as the tuner says ("lora_")."""
    return not any(part.startswith(prefix) for part in name.split(".")) and ".original_module." not in name
