"""Tensors that SGLang computes from weights while it loads a model, and keeps beside parameters and buffers.

No loader writes them, so no recording has them. MLA's absorbed projections are such tensors: plain attributes of the
attention layers, which the model recomputes in `post_load_weights`. One trial proves that it does so for each of them,
in the same memory: they are filled with NaN before, and no NaN may remain.

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
    """Tensors, by name, that the model got while it was loaded and that are not views of a parameter's memory.

    apart: layers to skip, since their tensors are made again with their weights.
    """
    memory = {storage_address(tensor) for tensor in (*model.parameters(), *model.buffers())}
    tensors = {}
    for prefix, layer in model.named_modules():
        for name, tensor in vars(layer).items():
            if layer in apart or not isinstance(tensor, Tensor) or was_there(model, layer, name):
                continue
            if _may_be_of_weights(tensor) and storage_address(tensor) not in memory:
                tensors[full_name(prefix, name)] = tensor
    return tensors


def _may_be_of_weights(tensor: Tensor) -> bool:
    """Whether a tensor's dtype may be of weights; that of indices and masks is not."""
    return bool(tensor.numel()) and (tensor.is_floating_point() or tensor.dtype in (torch.int8, torch.uint8))


class PostLoadTensors:
    """The tensors that a model's post-load step makes, and the check that it makes them."""

    def __init__(self, model: nn.Module, tensors: dict[str, Tensor]) -> None:
        self._model = model
        self.tensors = tensors
        self._tried = False

    def named(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.tensors.items()

    def before(self) -> None:
        """Prepares the check; called before the step."""
        if not self._tried:
            for tensor in self.tensors.values():
                tensor.fill_(torch.nan if tensor.is_floating_point() else 0)

    def after(self) -> None:
        """Checks the tensors after the step. Raises INTERNAL if it did not write one, or made it in other memory."""
        modules = dict(self._model.named_modules())
        for name, tensor in self.tensors.items():
            prefix, _, attribute = name.rpartition(".")
            now = vars(modules[prefix]).get(attribute)
            if now is not tensor:
                raise internal(f"SGLang's post-load step has made {name} somewhere else than at start", [name])
            if not self._tried and tensor.is_floating_point() and tensor.float().isnan().any():
                raise internal(f"SGLang's post-load step does not recompute {name}", [name])
        self._tried = True
