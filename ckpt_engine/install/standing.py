"""Whether a model's tensors still stand where they stood: asked at every install, while generation is paused.

Walking a model of 400 tensors by name takes 4 ms in vLLM; this looks at each tensor where it was found, and takes a
tenth of that. It decides whether a look by name can be left out, not what follows if something has moved. The engine's
thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

_Seen = tuple[Mapping[str, Any], str, torch.Tensor, int, torch.Size, tuple[int, ...], torch.dtype]


class Standing:
    """Some tensors of a model, each with the modules on the way to it, its address and its layout, as they were when
    this was made. It keeps modules and tensors, so that no other object can take the place of one unnoticed."""

    def __init__(self, model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
        """tensors: by the names that `model` gives its parameters and buffers. One that is not there under its name
        never `holds`."""
        self._ways: dict[tuple[int, str], tuple[Mapping[str, nn.Module | None], str, nn.Module]] = {}
        self._seen: list[_Seen] = []
        self._all = True
        for name, tensor in tensors.items():
            holder = self._holder(model, name)
            if holder is None:
                self._all = False
                return
            last = name.rpartition(".")[2]
            place = tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
            self._seen.append((holder, last, tensor, *place))

    def holds(self) -> bool:
        """Whether all of them are the same objects, under the same names, at the same addresses and laid out alike."""
        if not self._all or any(children.get(name) is not child for children, name, child in self._ways.values()):
            return False
        # vLLM's parameters hand whatever is asked of them through Python, which takes nine tenths of the time.
        with torch._C.DisableTorchFunctionSubclass():
            return all(
                holder.get(name) is tensor
                and tensor.data_ptr() == address
                and tensor.shape == shape
                and tensor.stride() == stride
                and tensor.dtype == dtype
                for holder, name, tensor, address, shape, stride, dtype in self._seen
            )

    def _holder(self, model: nn.Module, name: str) -> Mapping[str, Any] | None:
        """The parameters or buffers of which a tensor is one, once the way there has been noted."""
        *path, last = name.split(".")
        module = model
        for step in path:
            child = module._modules.get(step)
            if child is None:
                return None
            self._ways[id(module), step] = (module._modules, step, child)
            module = child
        return next((each for each in (module._parameters, module._buffers) if each.get(last) is not None), None)
