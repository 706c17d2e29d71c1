"""GPU tensors of this process, offered to other processes: live where they lie, or copied on their GPU at each seal.

It decides, tensor by tensor, which of the two; what it declines (with a reason) its caller copies to shared memory.
What can be shared is tried out by mapping it in another process, once for each GPU and kind of memory. Runs on the
thread that owns the weights. Nothing here starts CUDA: the tensors exist already.
"""

from __future__ import annotations

import logging
import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.source.rehome import byte_range
from ckpt_engine.transport.cuda_arena import ALIGNMENT, CudaArena
from ckpt_engine.transport.cuda_driver import CudaDriverError, driver
from ckpt_engine.transport.cuda_memory import (
    LEGACY,
    NOT_SHAREABLE,
    Run,
    export_parts,
    look,
    region_of,
    run_at,
    runs_of,
    unchanged,
)
from ckpt_engine.transport.cuda_probe import probe
from ckpt_engine.transport.lease import LeaseOffice
from ckpt_engine.v1.weights_pb2 import CudaIpcLocator, Region

log = logging.getLogger(__name__)

_probed: dict[tuple[int, int, CudaIpcLocator.Kind], str] = {}
"""By process, device and kind: why such memory cannot be mapped by others, empty if it can."""


@dataclass(frozen=True, slots=True)
class Offered:
    """Where a tensor is offered. memory: there, of the tensor's shape; its own if it is live."""

    region: int
    offset: int
    memory: torch.Tensor
    live: bool


class DeviceOffer:
    """What a source offers of its GPU tensors. `offered[i]` is None where tensor i was declined; `reasons` say why."""

    def __init__(
        self, tensors: Sequence[torch.Tensor], served: Sequence[torch.dtype], copied: Sequence[bool], first_region: int
    ) -> None:
        """tensors: on GPUs. served: dtype of a copy. copied: those that must be copied.

        Nothing is held if it raises. Raises UNAVAILABLE without sockets.
        """
        self.offered: list[Offered | None] = [None] * len(tensors)
        self.reasons: list[str] = []
        self._regions: dict[int, tuple[int, Region]] = {}  # by id: device and region
        self._arenas: list[CudaArena] = []
        self._next = first_region
        self._office = LeaseOffice(self._export)
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
        live = any(each.live for each in self.offered if each is not None)
        for index, tensor in enumerate(tensors):
            if not tensor.numel() and self._regions:
                self.offered[index] = Offered(next(iter(self._regions)), 0, tensor.detach(), live and not copied[index])
        if not self._regions:
            self._office.withdraw(0)

    @property
    def regions(self) -> list[Region]:
        """Every region that a tensor lies in."""
        return [region for _, region in self._regions.values()]

    @property
    def readers(self) -> int:
        """Processes that map the memory now, or are about to."""
        return self._office.readers

    def unchanged(self) -> bool:
        """Whether this process still holds the very allocations that it published."""
        try:
            for device, region in self._regions.values():
                with driver().on(device):
                    if not unchanged(driver(), region):
                        return False
        except CudaDriverError:
            return False
        return True

    def settle(self) -> None:
        """Waits until the GPUs have done what was asked of them: what they compute may be written by another stream."""
        for device in {device for device, _ in self._regions.values()}:
            torch.cuda.synchronize(device)

    def withdraw(self, seconds: float) -> None:
        """Takes the offer back; returns when no reader maps it any more. Raises DEADLINE_EXCEEDED; see LeaseOffice."""
        self._office.withdraw(seconds)

    def close(self) -> None:
        """Takes the offer back and frees what it holds, without waiting. May be repeated."""
        try:
            self._office.withdraw(0)
        except CkptEngineError:
            log.debug("ckpt-engine: readers are still unmapping GPU memory that is closed")
        self.offered = []
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
            self.reasons.append(f"cuda:{device}: {error}")
            return
        for index, span in live.items():
            found = run_at(runs, *span)
            region = shared[found] if found is not None else None
            if found is None or region is None:
                staged.append(index)
                continue
            offset = tensors[index].data_ptr() - runs[found].pointer
            self.offered[index] = Offered(region.id, offset, tensors[index].detach(), live=True)
        self._stage(device, sorted(staged), tensors, served)

    def _stage(
        self, device: int, indices: Sequence[int], tensors: Sequence[torch.Tensor], served: Sequence[torch.dtype]
    ) -> None:
        """Room for copies on the GPU, if there is enough and it can be shared."""
        offsets, size = [], 0
        for index in indices:
            offsets.append(size)
            size += -(-tensors[index].numel() * served[index].itemsize // ALIGNMENT) * ALIGNMENT
        if not size:
            return
        try:
            arena = CudaArena(device, size)
            with driver().on(device):
                region = self._share(device, Run(LEGACY, (driver().allocation(arena.pointer),)))
        except (CudaDriverError, CkptEngineError) as error:
            self.reasons.append(error.problem.message if isinstance(error, CkptEngineError) else str(error))
            return
        if region is None:
            arena.close()
            return
        self._arenas.append(arena)
        for index, offset in zip(indices, offsets, strict=True):
            memory = arena.tensor(offset, tensors[index].shape, served[index])
            self.offered[index] = Offered(region.id, offset, memory, live=False)

    def _share(self, device: int, run: Run) -> Region | None:
        """The region of a run, in the device's context; None, and a reason, if others cannot map such memory."""
        if run.kind == NOT_SHAREABLE:
            self._say(f"memory of cuda:{device} that torch took from a pool cannot be shared between processes")
            return None
        region = region_of(driver(), run, self._next, self._office.name)
        self._regions[region.id] = device, region
        self._next += 1
        key = os.getpid(), device, run.kind
        if key not in _probed:
            _probed[key] = probe(region)
        if not _probed[key]:
            return region
        del self._regions[region.id]
        self._say(f"memory of cuda:{device} cannot be mapped by another process: {_probed[key]}")
        return None

    def _say(self, reason: str) -> None:
        if reason not in self.reasons:
            self.reasons.append(reason)

    def _export(self, region: int, first: int) -> list[int]:
        """On the office's thread."""
        device, found = self._regions[region]
        return export_parts(driver(), device, found, first)


def span_in_memory(tensor: torch.Tensor) -> tuple[int, int]:
    """The address of a tensor's first element, and the one behind its last."""
    start, stop = byte_range(tensor)
    return tensor.data_ptr(), tensor.data_ptr() + stop - start
