"""Copies many tensors into many others: on a CPU as host_copy.py does, to a GPU as device_copy.py does.

Runs in the reader.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from ckpt_engine.copy.host_copy import HostRun, Pair, batches_of, host_work
from ckpt_engine.copy.prepared import Queued

if TYPE_CHECKING:
    from ckpt_engine.copy.device_copy import DeviceCopy


class TensorCopy:
    """PreparedCopy of pairs. Elements of one dtype are copied as integers, so that every bit pattern arrives unchanged;
    other dtypes are cast as torch does it.

    Several threads copy pairs that are on a CPU on both sides. `DeviceCopy` copies to a GPU, and from one to pinned
    memory. The calling thread copies from a GPU to other memory. keep: objects that must live as long as this copy,
    such as the mappings behind sources.
    """

    def __init__(self, pairs: Iterable[Pair], keep: object = None, notes: Iterable[str] = ()) -> None:
        near: list[Pair] = []
        far: list[Pair] = []
        device: list[Pair] = []
        for destination, source in pairs:
            if destination.device.type == "cuda":
                device.append((destination, source))
            elif destination.device.type == source.device.type == "cpu":
                near.append((destination, source))
            elif destination.numel() and destination.is_pinned():
                device.append((destination, source))
            elif destination.numel():
                far.append((destination.detach(), source.detach()))
        self._near = host_work(near)
        self._far = batches_of(far)
        self._device = _device_copy(device) if device else None
        self._keep = keep
        self.bytes = sum(batch.bytes for batch in (*self._near, *self._far))
        self.notes = tuple(notes)
        if self._device is not None:
            self.bytes += self._device.bytes
            self.notes += self._device.notes

    def run(self, on_bytes: Callable[[int], None] | None = None) -> int:
        """Writes every destination; see PreparedCopy. `on_bytes` runs in the calling thread, between its batches."""
        with torch.inference_mode():
            if self._device is not None:
                self._device.run(on_bytes)
            for batch in self._far:
                batch.copy()
                if on_bytes is not None:
                    on_bytes(batch.bytes)
            HostRun(self._near).finish(on_bytes)
        return self.bytes

    def queue(self) -> Queued | None:
        """See QueueableCopy. None if some pair is not copied by a GPU."""
        if self._near or self._far or self._device is None:
            return None
        return self._device.queue()


def _device_copy(pairs: Sequence[Pair]) -> DeviceCopy:
    # Imported here: it loads Triton, which only a process that copies to a GPU needs.
    from ckpt_engine.copy.device_copy import DeviceCopy

    return DeviceCopy(pairs)
