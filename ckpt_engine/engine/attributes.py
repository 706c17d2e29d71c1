"""Saves small tensors over a sleep that an engine would lose with its weights' memory: scale ranges and the like.

Over a sleep that discards weights, engines save a model's buffers, but neither tensors in plain attributes of modules
nor those that only the kernels' own objects have.

Runs in the worker, on the engine's thread; nothing here raises.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

log = logging.getLogger(__name__)

LARGEST_BYTES = 1 << 20


class Attributes:
    """Tensors of up to 1 MiB that are plain attributes of a model's modules, or that kernels hold.

    Only those that exist when this is made, before the engine's caches: later ones may be in memory that is given up at
    another time.
    """

    def __init__(self, model: nn.Module, device: str, of_kernels: Iterable[Tensor] = ()) -> None:
        """device: the kind of memory that a sleep gives up, such as "cuda". of_kernels: see kernel_tensors.py."""
        self._tensors = [(module, name, tensor) for module, name, tensor in _attributes(model, device)]
        self._of_kernels = [tensor for tensor in of_kernels if _is_small(tensor, device)]
        self._copies: list[tuple[nn.Module, str, Tensor, Tensor]] = []
        self._copies_of_kernels: list[tuple[Tensor, Tensor]] = []

    def keep(self) -> None:
        """Copies them to the host, unless there are copies that were not put back yet."""
        if self._copies or self._copies_of_kernels:
            return
        try:
            self._copies = [
                (module, name, tensor, tensor.to("cpu", copy=True))
                for module, name, tensor in self._tensors
                if module.__dict__.get(name) is tensor
            ]
            self._copies_of_kernels = [(tensor, tensor.to("cpu", copy=True)) for tensor in self._of_kernels]
        except Exception:
            log.exception("ckpt-engine: attributes of the model cannot be kept over sleep")

    def put_back(self) -> None:
        """Writes the copies back to tensors that are still in place; does nothing without copies."""
        copies, self._copies = self._copies, []
        copies_of_kernels, self._copies_of_kernels = self._copies_of_kernels, []
        try:
            with torch.inference_mode():
                for module, name, tensor, copy in copies:
                    if module.__dict__.get(name) is tensor:
                        tensor.copy_(copy)
                for tensor, copy in copies_of_kernels:
                    tensor.copy_(copy)
        except Exception:
            log.exception("ckpt-engine: attributes of the model cannot be put back after sleep")


def _attributes(model: nn.Module, device: str) -> Iterator[tuple[nn.Module, str, Tensor]]:
    for module in model.modules():
        for name, tensor in module.__dict__.items():
            if isinstance(tensor, Tensor) and name != "kv_cache" and _is_small(tensor, device):
                yield module, name, tensor


def _is_small(tensor: Tensor, device: str) -> bool:
    return tensor.device.type == device and 0 < tensor.numel() * tensor.itemsize <= LARGEST_BYTES
