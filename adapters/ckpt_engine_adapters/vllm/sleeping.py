"""What vLLM's sleep level 2 needs of us inside a worker: state words that are right, and tensors that vLLM forgets.

`guard_sleep` makes the worker itself say that it holds nothing before its memory goes, in whatever order and from
wherever a call to sleep comes. `Attributes` keeps small tensors that modules hold as plain attributes (scale ranges):
vLLM saves a model's buffers over level 2, and those are none.

Runs in the worker, on its main thread; nothing here raises.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

log = logging.getLogger(__name__)

WORKERS = (("vllm.v1.worker.gpu_worker", "Worker"), ("vllm.v1.worker.cpu_worker", "CPUWorker"))
DISCARDS = 2
LARGEST_BYTES = 1 << 20


def guard_sleep(discard: Callable[[Any], None]) -> None:
    """Has every worker class of vLLM that is loaded in this process call discard(worker) before it discards memory.

    May be called more than once.
    """
    for module, name in WORKERS:
        kind = getattr(sys.modules.get(module), name, None)
        sleep = vars(kind).get("sleep") if kind is not None else None
        if sleep is None or hasattr(sleep, "ckpt_engine"):
            continue
        setattr(kind, "sleep", _guarded(sleep, discard))  # noqa: B010


def _guarded(sleep: Callable[..., Any], discard: Callable[[Any], None]) -> Callable[..., Any]:
    @functools.wraps(sleep)
    def guarded(worker: Any, level: int = 1) -> Any:
        if level >= DISCARDS:
            discard(worker)
        return sleep(worker, level)

    guarded.ckpt_engine = True  # type: ignore[attr-defined]
    return guarded


class Attributes:
    """Tensors of up to 1 MiB that are neither parameters nor buffers but attributes of a model's modules.

    Only those that there are when it is made, which is before the caches are: what is made later may lie in memory
    that is given up at another time.
    """

    def __init__(self, model: nn.Module, device: str) -> None:
        """device: the kind of memory that sleeping gives up, such as "cuda"."""
        self._known = [(module, name, tensor) for module, name, tensor in _attributes(model, device)]
        self._kept: list[tuple[nn.Module, str, Tensor, Tensor]] = []

    def keep(self) -> None:
        """Copies them to the host, unless copies wait to be put back already."""
        if self._kept:
            return
        try:
            self._kept = [
                (module, name, tensor, tensor.to("cpu", copy=True))
                for module, name, tensor in self._known
                if module.__dict__.get(name) is tensor
            ]
        except Exception:
            log.exception("ckpt-engine: attributes of the model cannot be kept over sleep")

    def put_back(self) -> None:
        """Writes what was kept to where it was, if it is still there; does nothing if nothing was kept."""
        kept, self._kept = self._kept, []
        try:
            with torch.inference_mode():
                for module, name, tensor, copy in kept:
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
