"""Checks at every install, while generation is paused, whether a model's tensors are still where they were.

Walking a model of 400 tensors by name takes 4 ms in vLLM; this looks at each tensor where it was found before, and
takes a tenth of that. It decides whether the walk can be skipped, not what follows if something has moved. Used on the
engine's thread.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from ckpt_engine.core.parts import own_name, part_of

_Entry = tuple[nn.Module, str, str, torch.Tensor, int, torch.Size, tuple[int, ...], torch.dtype]


class Standing:
    """Some tensors of a model, each with the modules on its path, its address and its layout at the time of creation.
    It keeps references to modules and tensors, so that no other object can replace one unnoticed."""

    def __init__(self, models: Mapping[str, nn.Module], tensors: Mapping[str, torch.Tensor]) -> None:
        """models: by part (`core/parts.py`). tensors: by the names that the models give their parameters and buffers,
        each in its part. With one that no model has under its name, `holds` is always false."""
        self._ways: dict[tuple[int, str], tuple[nn.Module, str, nn.Module]] = {}
        self._entries: list[_Entry] = []
        self._all = True
        for full, tensor in tensors.items():
            model, name = models[part_of(full)], own_name(full)
            holder, last = self._holder(model, name), name.rpartition(".")[2]
            kinds = [kind for kind in ("_parameters", "_buffers") if getattr(holder, kind, {}).get(last) is tensor]
            if holder is None or not kinds:
                self._all = False
                return
            place = tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
            self._entries.append((holder, kinds[0], last, tensor, *place))

    def holds(self) -> bool:
        """Whether all are the same objects, with the same names, addresses and layouts."""
        if not self._all or any(parent._modules.get(name) is not child for parent, name, child in self._ways.values()):
            return False
        # Each access to one of vLLM's parameters goes through Python, which would take nine tenths of the time.
        with torch._C.DisableTorchFunctionSubclass():
            return all(
                getattr(holder, kind).get(name) is tensor
                and tensor.data_ptr() == address
                and tensor.shape == shape
                and tensor.stride() == stride
                and tensor.dtype == dtype
                for holder, kind, name, tensor, address, shape, stride, dtype in self._entries
            )

    def _holder(self, model: nn.Module, name: str) -> nn.Module | None:
        """Finds the module that has a parameter or buffer, and notes the path to it; None: there is none."""
        module = model
        for step in name.split(".")[:-1]:
            child = module._modules.get(step)
            if child is None:
                return None
            self._ways[id(module), step] = (module, step, child)
            module = child
        return module
