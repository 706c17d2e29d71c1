"""One layer of a running model while its loader's form stands in for it.

Kernels and CUDA graphs have the addresses of the layer's tensors. So the results of post-processing new weights are
copied into the old tensors, whether these are parameters, buffers or plain attributes.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ckpt_engine.core.problems import internal
from ckpt_engine.engine.kernel_tensors import KernelTensors
from ckpt_engine_adapters.sglang.forms import same_form


class LiveLayer:
    """A layer's tensors at the time of creation. Used on the engine's thread."""

    def __init__(self, layer: nn.Module, kernels: KernelTensors | None = None) -> None:
        """kernels: what its kernels hold beside these; None: it is not processed meanwhile."""
        self._layer, self._kernels = layer, kernels
        self._parameters = dict(layer._parameters)
        self._buffers = dict(layer._buffers)
        self._non_persistent = set(layer._non_persistent_buffers_set)
        self._attributes = {name: value for name, value in vars(layer).items() if isinstance(value, Tensor)}
        self.device = next(tensor.device for tensor in self._parameters.values() if tensor is not None)

    def put_back(self) -> None:
        """Puts the layer's own tensors back into it, with their values."""
        layer = self._layer
        if self._kernels is not None:
            self._kernels.put_back()
        for name in [name for name, value in vars(layer).items() if isinstance(value, Tensor)]:
            del layer.__dict__[name]
        layer.__dict__.update(self._attributes)
        layer._parameters.clear()
        layer._parameters.update(self._parameters)
        layer._buffers.clear()
        layer._buffers.update(self._buffers)
        layer._non_persistent_buffers_set.clear()
        layer._non_persistent_buffers_set.update(self._non_persistent)

    def take_over(self) -> None:
        """Copies the layer's present values into its own tensors, and puts these back into it.

        Raises INTERNAL if the layer has other tensors than before, or of another form; nothing is copied then.
        """
        if self._kernels is not None:
            self._kernels.take_over()
        pairs: list[tuple[Tensor, Tensor]] = []
        for own, new in (
            (_tensors(self._parameters), _tensors(self._layer._parameters)),
            (_tensors(self._buffers), _tensors(self._layer._buffers)),
            (self._attributes, _tensors(vars(self._layer))),
        ):
            for name in sorted(own.keys() | new.keys()):
                if name not in own or name not in new or not same_form(own[name], new[name]):
                    raise internal(
                        f"SGLang has made {_text(new.get(name))} of the new weights where it had made "
                        f"{_text(own.get(name))} at start: tensor {name} of a {type(self._layer).__name__}",
                        [name],
                    )
                pairs.append((own[name], new[name]))
        with torch.no_grad():
            for own_tensor, new_tensor in pairs:
                if own_tensor is not new_tensor:
                    own_tensor.data.copy_(new_tensor.data)
        self.put_back()


def _tensors(by_name: object) -> dict[str, Tensor]:
    assert isinstance(by_name, dict)
    return {name: value for name, value in by_name.items() if isinstance(value, Tensor)}


def _text(tensor: Tensor | None) -> str:
    return "nothing" if tensor is None else f"{tensor.dtype} {tuple(tensor.shape)} with strides {tensor.stride()}"
