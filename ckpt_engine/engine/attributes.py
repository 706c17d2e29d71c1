"""Saves small tensors over a sleep that an engine would lose with its weights' memory: scale ranges and the like.

Over a sleep that discards weights, engines save a model's buffers, but not tensors in plain attributes of modules.

Runs in the worker, on the engine's thread; nothing here raises.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import torch
from torch import Tensor, nn

log = logging.getLogger(__name__)

LARGEST_BYTES = 1 << 20


class Attributes:
    """Tensors of up to 1 MiB that are plain attributes of a model's modules.

    Only those that exist when this is made, before the engine's caches: later ones may be in memory that is given up at
    another time.
    """

    def __init__(self, model: nn.Module, device: str) -> None:
        """device: the kind of memory that a sleep gives up, such as "cuda"."""
        self._tensors = [(module, name, tensor) for module, name, tensor in _attributes(model, device)]
        self._copies: list[tuple[nn.Module, str, Tensor, Tensor]] = []

    def keep(self) -> None:
        """Copies them to the host, unless there are copies that were not put back yet."""
        if self._copies:
            return
        try:
            self._copies = [
                (module, name, tensor, tensor.to("cpu", copy=True))
                for module, name, tensor in self._tensors
                if module.__dict__.get(name) is tensor
            ]
        except Exception:
            log.exception("ckpt-engine: attributes of the model cannot be kept over sleep")

    def put_back(self) -> None:
        """Writes the copies back to tensors that are still in place; does nothing without copies."""
        copies, self._copies = self._copies, []
        try:
            with torch.inference_mode():
                for module, name, tensor, copy in copies:
                    if module.__dict__.get(name) is tensor:
                        tensor.copy_(copy)
        except Exception:
            log.exception("ckpt-engine: attributes of the model cannot be put back after sleep")


def _attributes(model: nn.Module, device: str) -> Iterator[tuple[nn.Module, str, Tensor]]:
    for module in model.modules():
        for name, tensor in module.__dict__.items():
            if not isinstance(tensor, Tensor) or name == "kv_cache" or tensor.device.type != device:
                continue
            if 0 < tensor.numel() * tensor.itemsize <= LARGEST_BYTES:
                yield module, name, tensor
