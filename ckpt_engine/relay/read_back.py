"""Digests by a GPU of bytes that it has brought into pinned memory of this host: it reads them back over its link.

A digest of what was sent would prove nothing. The bytes are read back into memory of the GPU, one batch at a time.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Sequence
from typing import Protocol

import torch

from ckpt_engine.digest.factors import SEED
from ckpt_engine.digest.host import HostDigests

log = logging.getLogger("ckpt_engine.relay")

_ALIGNMENT = 256

Boxes = list[tuple[torch.Tensor, Sequence[int]]]
"""Memory, with the coordinates of its first element in its tensor."""


class Digests(Protocol):
    """Prepared digests of some memory, which may run many times."""

    def run(self) -> list[int]:
        """A value for each box."""
        ...


def digests_by_gpu(boxes: Boxes, gpu: int, stage_bytes: int) -> Digests:
    """Digests of pinned memory by a GPU, which takes `stage_bytes` of its memory; by processors if it cannot."""
    try:
        return _ReadBack(boxes, gpu, stage_bytes)
    except Exception as error:  # no compiler, no memory: processors do it, slower and not wrong
        log.warning("GPU %d cannot digest what it brought: %s: %s", gpu, type(error).__name__, error)
        return HostDigests(boxes)


class _ReadBackMemory:
    """Memory of a GPU for bytes that are read back, one batch at a time, and the stream on which that happens."""

    def __init__(self, gpu: int) -> None:
        self.gpu = gpu
        self.lock = threading.Lock()
        self.stream = torch.cuda.Stream(gpu)
        self._memory = torch.empty(0, dtype=torch.uint8, device=torch.device("cuda", gpu))

    def memory(self, size: int) -> torch.Tensor:
        """The first `size` bytes of it; allocates other memory if it has fewer."""
        if size > self._memory.numel():
            self._memory = torch.empty(size, dtype=torch.uint8, device=self._memory.device)
        return self._memory[:size]


_stages: weakref.WeakValueDictionary[int, _ReadBackMemory] = weakref.WeakValueDictionary()
"""The stages of this process, by GPU; fillings of both slots share one."""


def _stage(gpu: int) -> _ReadBackMemory:
    found = _stages.get(gpu)
    if found is None:
        found = _stages[gpu] = _ReadBackMemory(gpu)
    return found


def staged_bytes(view: torch.Tensor) -> int:
    """Bytes that a view takes of a stage."""
    return -(-view.nbytes // _ALIGNMENT) * _ALIGNMENT


class _ReadBack:
    """Digests of pinned memory of this host by a GPU: copied to its memory by its copy engines and digested there. A
    kernel that reads the host's memory itself would slow down copies that arrive."""

    def __init__(self, boxes: Boxes, gpu: int, stage_bytes: int) -> None:
        # Imported here: it loads Triton, which only a relay that reads GPUs needs.
        from ckpt_engine.digest.cuda import CudaDigests, missing

        if why := missing():
            raise RuntimeError(why)
        self._stage = _stage(gpu)
        memory = self._stage.memory(stage_bytes)
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        first = 0
        for view, _ in boxes:
            self._copies.append((memory[first : first + view.nbytes].view(view.dtype).view(view.shape), view))
            first += staged_bytes(view)
        with torch.cuda.stream(self._stage.stream):
            stage_boxes = [
                (stage_view, tuple(start), stage_view.dtype)
                for (stage_view, _), (_, start) in zip(self._copies, boxes, strict=True)
            ]
            self._digests = CudaDigests(stage_boxes, SEED)
            self._stage.stream.synchronize()  # tables were copied, and the kernel compiled

    def run(self) -> list[int]:
        with self._stage.lock, torch.inference_mode(), torch.cuda.stream(self._stage.stream):
            for stage_view, view in self._copies:
                stage_view.copy_(view, non_blocking=True)
            return self._digests.run()
