"""Tensors that SGLang computes of weights while it loads a model, and keeps beside parameters and buffers.

No loader writes them, so no recording sees them. MLA's absorbed projections are such tensors: plain attributes of the
attention layers, which the model computes anew in `post_load_weights`. That it does, for each of them and in the same
memory, is tried once: they are filled with NaN before, and none may be left.

Runs on the scheduler's main thread.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
from torch import Tensor, nn

from ckpt_engine.core.names import full_name
from ckpt_engine.core.problems import internal
from ckpt_engine_adapters.sglang.forms import storage_address, was_there


def made_while_loading(model: nn.Module, apart: Collection[nn.Module]) -> dict[str, Tensor]:
    """Tensors, by name, that the model has had only since it was loaded, and that show no parameter's memory.

    apart: layers that are not looked at, since what they keep is made anew with their weights.
    """
    memory = {storage_address(tensor) for tensor in (*model.parameters(), *model.buffers())}
    found = {}
    for prefix, layer in model.named_modules():
        for name, tensor in vars(layer).items():
            if layer in apart or not isinstance(tensor, Tensor) or was_there(model, layer, name):
                continue
            if _may_be_of_weights(tensor) and storage_address(tensor) not in memory:
                found[full_name(prefix, name)] = tensor
    return found


def _may_be_of_weights(tensor: Tensor) -> bool:
    """Indices and masks are not."""
    return bool(tensor.numel()) and (tensor.is_floating_point() or tensor.dtype in (torch.int8, torch.uint8))


class PostLoadTensors:
    """The tensors that a model's post-load step makes, and whether it does."""

    def __init__(self, model: nn.Module, tensors: dict[str, Tensor]) -> None:
        self._model = model
        self.tensors = tensors
        self._tried = False

    def named(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.tensors.items()

    def before(self) -> None:
        """Called before the step."""
        if not self._tried:
            for tensor in self.tensors.values():
                tensor.fill_(torch.nan if tensor.is_floating_point() else 0)

    def after(self) -> None:
        """Called after the step. Raises INTERNAL: it leaves one of them as it was, or makes it somewhere else."""
        modules = dict(self._model.named_modules())
        for name, tensor in self.tensors.items():
            prefix, _, attribute = name.rpartition(".")
            now = vars(modules[prefix]).get(attribute)
            if now is not tensor:
                raise internal(f"SGLang's post-load step has made {name} somewhere else than at start", [name])
            if not self._tried and tensor.is_floating_point() and tensor.float().isnan().any():
                raise internal(f"SGLang's post-load step does not compute {name} anew", [name])
        self._tried = True
