"""The owner's side: GPU memory of this process, lent to processes of its host.

Whether memory can be shared is tried out by mapping it in another process, once for each GPU and kind of memory.
Readers hold leases (transport/cuda_ipc/lease.py), so the owner knows when its memory is free again. Any thread; nothing
here starts CUDA.
"""

from __future__ import annotations

import logging
import os

from ckpt_engine.core.problems import CkptEngineError, unavailable
from ckpt_engine.cuda.driver import CudaDriverError, driver
from ckpt_engine.transport.base import GpuMemory, Memory
from ckpt_engine.transport.cuda_ipc.lease import LeaseOffice
from ckpt_engine.transport.cuda_ipc.memory import NOT_SHAREABLE, export_parts, region_of, unchanged
from ckpt_engine.transport.cuda_ipc.probe import probe
from ckpt_engine.v1.weights_pb2 import CudaIpcLocator, Region

log = logging.getLogger(__name__)

_probed: dict[tuple[int, int, CudaIpcLocator.Kind], str] = {}
"""By process, device and kind: why such memory cannot be mapped by others, empty if it can."""


class CudaIpcLender:
    """Lends runs of allocations. Raises UNAVAILABLE without sockets."""

    def __init__(self) -> None:
        self._regions: dict[int, tuple[int, Region]] = {}  # by id: device and region
        self._office = LeaseOffice(self._export)

    def offer(self, id: int, memory: Memory) -> Region:
        """The region of a run. Raises UNAVAILABLE if others cannot map such memory, and CudaDriverError."""
        if not isinstance(memory, GpuMemory):
            raise unavailable(f"{memory.kind} is not on a GPU")
        device, run = memory.device, memory.run
        if run.kind == NOT_SHAREABLE:
            raise unavailable(f"memory of cuda:{device} that torch took from a pool cannot be shared between processes")
        with driver().on(device):
            region = region_of(driver(), run, id, self._office.name)
        self._regions[id] = device, region
        key = os.getpid(), device, run.kind
        if key not in _probed:
            _probed[key] = probe(region)
        if _probed[key]:
            del self._regions[id]
            raise unavailable(f"memory of cuda:{device} cannot be mapped by another process: {_probed[key]}")
        return region

    def unchanged(self) -> bool:
        """Whether this process still holds the allocations that it offered."""
        try:
            for device, region in self._regions.values():
                with driver().on(device):
                    if not unchanged(driver(), region):
                        return False
        except CudaDriverError:
            return False
        return True

    def withdraw(self, seconds: float) -> None:
        """Takes the memory back, and returns when no reader maps it any more. Raises DEADLINE_EXCEEDED; see
        LeaseOffice."""
        self._office.withdraw(seconds)

    def close(self) -> None:
        """Asks readers to unmap the memory, and does not wait for them."""
        try:
            self._office.withdraw(0)
        except CkptEngineError:
            log.debug("ckpt-engine: readers are still unmapping GPU memory that is closed")

    def _export(self, region: int, first: int) -> list[int]:
        """Exports descriptors, on the office's thread."""
        device, found = self._regions[region]
        return export_parts(driver(), device, found, first)
