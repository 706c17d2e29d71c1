"""Lends GPU tensors of this process: live where they are, or as copies on their GPU.

It decides, tensor by tensor, which of the two. What it declines (with a reason, in `Lending.reasons`) its caller copies
to memory of the host. The transports decide how memory is lent. Runs on the thread that owns the weights. Nothing here
starts CUDA: the tensors exist already.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.cuda.arena import ALIGNMENT, CudaArena
from ckpt_engine.cuda.driver import CudaDriverError, driver
from ckpt_engine.source.lending import Lending
from ckpt_engine.source.rehome import byte_range
from ckpt_engine.transport.base import GpuMemory
from ckpt_engine.transport.cuda_ipc.memory import LEGACY, AllocationRun, look, run_at, runs_of


@dataclass(frozen=True, slots=True)
class OfferedTensor:
    """Where a tensor is offered."""

    region: int
    offset: int  # bytes from the region's start
    memory: torch.Tensor  # that memory, with the tensor's shape; the tensor's own if it is live
    live: bool


class DeviceOffer:
    """What a source offers of its GPU tensors. `places[i]` is None where tensor i was declined."""

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        served: Sequence[torch.dtype],
        copied: Sequence[bool],
        first_region: int,
        lending: Lending,
    ) -> None:
        """tensors: on GPUs. served: dtype of each copy. copied: which must be copied. lending: takes the regions, and
        the reasons.

        Holds nothing if it raises. Raises UNAVAILABLE if a transport cannot start.
        """
        self.places: list[OfferedTensor | None] = [None] * len(tensors)
        self._lending = lending
        self._devices: set[int] = set()
        self._arenas: list[CudaArena] = []
        self._first = self._next = first_region
        by_device: dict[int, list[int]] = defaultdict(list)
        for index, tensor in enumerate(tensors):
            if tensor.numel():
                by_device[tensor.device.index].append(index)
        try:
            for device, indices in by_device.items():
                self._offer(device, indices, tensors, served, copied)
        except BaseException:
            self.close()
            raise
        live = any(each.live for each in self.places if each is not None)
        for index, tensor in enumerate(tensors):
            if not tensor.numel() and self._next > self._first:
                self.places[index] = OfferedTensor(self._first, 0, tensor.detach(), live and not copied[index])

    def synchronize(self) -> None:
        """Waits for all work of the GPUs: another stream may still write the weights."""
        for device in self._devices:
            torch.cuda.synchronize(device)

    def close(self) -> None:
        """Frees the copies' memory, which must have been withdrawn before. May be repeated."""
        self.places = []
        arenas, self._arenas = self._arenas, []
        for arena in arenas:
            arena.close()

    def _offer(
        self,
        device: int,
        indices: Sequence[int],
        tensors: Sequence[torch.Tensor],
        served: Sequence[torch.dtype],
        copied: Sequence[bool],
    ) -> None:
        staged = [index for index in indices if copied[index]]
        live = {index: span_in_memory(tensors[index]) for index in indices if not copied[index]}
        try:
            with driver().on(device):
                runs = runs_of(live.values(), lambda pointer: look(driver(), pointer))
                shared = [self._share(device, run) for run in runs]
        except (CudaDriverError, CkptEngineError) as error:
            self._lending.reasons.append(f"cuda:{device}: {error}")
            return
        for index, span in live.items():
            found = run_at(runs, *span)
            region = shared[found] if found is not None else None
            if found is None or region is None:
                staged.append(index)
                continue
            offset = tensors[index].data_ptr() - runs[found].pointer
            self.places[index] = OfferedTensor(region, offset, tensors[index].detach(), live=True)
        self._stage(device, sorted(staged), tensors, served)

    def _stage(
        self, device: int, indices: Sequence[int], tensors: Sequence[torch.Tensor], served: Sequence[torch.dtype]
    ) -> None:
        """Makes room for copies on the GPU, if there is enough and it can be shared."""
        offsets, size = [], 0
        for index in indices:
            offsets.append(size)
            size += -(-tensors[index].numel() * served[index].itemsize // ALIGNMENT) * ALIGNMENT
        if not size:
            return
        try:
            arena = CudaArena(device, size)
            with driver().on(device):
                region = self._share(device, AllocationRun(LEGACY, (driver().allocation(arena.pointer),)))
        except (CudaDriverError, CkptEngineError) as error:
            reason = error.problem.message if isinstance(error, CkptEngineError) else str(error)
            self._lending.reasons.append(reason)
            return
        if region is None:
            arena.close()
            return
        self._arenas.append(arena)
        for index, offset in zip(indices, offsets, strict=True):
            memory = arena.tensor(offset, tensors[index].shape, served[index])
            self.places[index] = OfferedTensor(region, offset, memory, live=False)

    def _share(self, device: int, run: AllocationRun) -> int | None:
        """The region of a run; None if no transport takes such memory."""
        if not self._lending.offer(self._next, GpuMemory(device, run)):
            return None
        self._next += 1
        self._devices.add(device)
        return self._next - 1


def span_in_memory(tensor: torch.Tensor) -> tuple[int, int]:
    """The address of a tensor's first element, and the one behind its last."""
    start, stop = byte_range(tensor)
    return tensor.data_ptr(), tensor.data_ptr() + stop - start
