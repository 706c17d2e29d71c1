"""GPU memory between processes: regions that its owner offers, and their mappings in a reader.

It knows allocations and no tensors. The owner's side finds the driver's allocations in which tensors lie, and describes
them as regions; the reader's side maps such a region for one device. When a process may read is decided by its lease
(transport/cuda_ipc/lease.py). No torch here: a probing process loads this alone.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ckpt_engine.core.problems import CkptEngineError, invalid, unavailable
from ckpt_engine.cuda.driver import NOT_FOUND, OUT_OF_MEMORY, Allocation, CudaDriverError, Driver
from ckpt_engine.cuda.elsewhere import forget_elsewhere, note_elsewhere
from ckpt_engine.host.processes import process_start_time
from ckpt_engine.transport.cuda_ipc.kind import NAME
from ckpt_engine.transport.cuda_ipc.lease import BATCH, fetch_descriptors
from ckpt_engine.v1.weights_pb2 import CudaIpcLocator, Region

Kind = CudaIpcLocator.Kind
NOT_SHAREABLE, LEGACY, PIECES = (
    CudaIpcLocator.KIND_UNSPECIFIED,
    CudaIpcLocator.KIND_LEGACY,
    CudaIpcLocator.KIND_PIECES,
)

Look = Callable[[int], tuple[Allocation, Kind]]
"""Finds the allocation in which an address lies, and how that can be shared."""


@dataclass(frozen=True, slots=True)
class AllocationRun:
    """Memory that becomes one region: one allocation, or several end to end that only descriptors can share."""

    kind: Kind
    parts: tuple[Allocation, ...]

    @property
    def pointer(self) -> int:
        """The first address."""
        return self.parts[0].pointer

    @property
    def stop(self) -> int:
        """The address after its last byte."""
        return self.parts[-1].pointer + self.parts[-1].size

    @property
    def size(self) -> int:
        """Bytes."""
        return self.stop - self.pointer


def runs_of(spans: Iterable[tuple[int, int]], look: Look) -> list[AllocationRun]:
    """The allocations in which `spans` (first address, address after the last) lie, by address, each once."""
    found: dict[int, tuple[Allocation, Kind]] = {}
    for start, stop in sorted(spans):
        at = start
        while at < stop:
            allocation, kind = look(at)
            if not allocation.pointer <= at < allocation.pointer + allocation.size:
                raise invalid(f"the driver says that address {at:#x} lies in {allocation}, which it does not")
            found[allocation.pointer] = allocation, kind
            at = allocation.pointer + allocation.size
    runs: list[AllocationRun] = []
    for pointer in sorted(found):
        allocation, kind = found[pointer]
        if runs and kind == PIECES == runs[-1].kind and runs[-1].stop == pointer:
            runs[-1] = AllocationRun(kind, (*runs[-1].parts, allocation))
        else:
            runs.append(AllocationRun(kind, (allocation,)))
    return runs


def run_at(runs: Sequence[AllocationRun], start: int, stop: int) -> int | None:
    """The index of the run (of `runs_of`) that holds all of these addresses; None: no run does."""
    index = bisect_right(runs, start, key=lambda run: run.pointer) - 1
    return index if index >= 0 and stop <= runs[index].stop else None


def look(driver: Driver, pointer: int) -> tuple[Allocation, Kind]:
    """A Look at this process's memory. Raises CudaDriverError."""
    if driver.legacy_capable(pointer):
        return driver.allocation(pointer), LEGACY
    return driver.allocation(pointer), PIECES if driver.descriptor_capable(pointer) else NOT_SHAREABLE


def region_of(driver: Driver, run: AllocationRun, id: int, lease: str) -> Region:
    """The region with which other processes map a run, as long as the office `lease` is open. Owner's side; in the
    context of the memory's device. Raises CudaDriverError if the driver gives no handle of it."""
    locator = CudaIpcLocator(
        kind=run.kind,
        pointer=run.pointer,
        gpu_uuid=driver.uuid(driver.device_of(run.pointer)),
        pid=os.getpid(),
        started=process_start_time(os.getpid()),
        lease=lease,
    )
    for part in run.parts:
        handle = driver.ipc_handle(part.pointer) if run.kind == LEGACY else b""
        locator.parts.add(size=part.size, handle=handle, generation=driver.generation(part.pointer))
    return Region(id=id, transport=NAME, size=run.size, locator=locator.SerializeToString(deterministic=True))


def unchanged(driver: Driver, region: Region) -> bool:
    """Whether the owner still holds the allocations of a region. Owner's side, in the device's context."""
    locator = CudaIpcLocator.FromString(region.locator)
    at = locator.pointer
    for part in locator.parts:
        try:
            if driver.allocation(at) != (at, part.size) or driver.generation(at) != part.generation:
                return False
        except CudaDriverError:
            return False
        at += part.size
    return True


def export_parts(driver: Driver, device: int, region: Region, first: int) -> list[int]:
    """Descriptors of some parts of a region, from part `first` on, for the lease's office. Raises UNAVAILABLE."""
    locator = CudaIpcLocator.FromString(region.locator)
    at = locator.pointer + sum(part.size for part in locator.parts[:first])
    descriptors: list[int] = []
    try:
        with driver.beside_captures(), driver.on(device):
            for part in locator.parts[first : first + BATCH]:
                descriptors.append(driver.export_descriptor(at))
                at += part.size
    except CudaDriverError as error:
        for descriptor in descriptors:
            os.close(descriptor)
        raise unavailable(f"its memory is not what was published any more ({error})") from error
    return descriptors


class UnmappableError(CkptEngineError):
    """The owner lives, and this process's driver does not map its memory. UNAVAILABLE."""


class Imported:
    """Another process's memory, mapped for one device of this one. `release` it exactly once. users: counted by its
    holder."""

    def __init__(self, driver: Driver, device: int, region: Region) -> None:
        """Maps the region. Raises UnmappableError, saying why, if the driver refuses; UNAVAILABLE if the owner is
        gone."""
        self._driver = driver
        self.users = 0
        self.device = device
        self.size = region.size
        self._locator = locator = CudaIpcLocator.FromString(region.locator)
        if region.transport != NAME or sum(part.size for part in locator.parts) != region.size or not region.size:
            raise invalid(f"region {region.id} for {region.transport} is not GPU memory of {region.size} bytes")
        try:
            with driver.beside_captures(), driver.on(device):
                away = driver.uuid(device) != locator.gpu_uuid
                if locator.kind == LEGACY and len(locator.parts) == 1:
                    self.pointer = driver.open_ipc_handle(locator.parts[0].handle)
                elif locator.kind == PIECES:
                    self.pointer = self._map_parts(region.id)
                else:
                    raise invalid(f"region {region.id} is shared in a way that this version does not know")
        except CudaDriverError as error:
            raise self._mapping_error(region, error) from error
        self._span = (self.pointer, self.pointer + self.size) if away else None
        if self._span is not None:
            note_elsewhere(self._span)

    @property
    def handle(self) -> bytes:
        """The raw handle; empty if it is made of pieces."""
        return self._locator.parts[0].handle

    def is_of(self, locator: CudaIpcLocator) -> bool:
        """Whether it is the memory of a locator: the same allocation of the same process, and not a later one."""
        return locator.kind == LEGACY == self._locator.kind and locator.parts[0] == self._locator.parts[0]

    def release(self) -> None:
        """Unmaps the memory, in the device's context. Nothing may use it any more. Raises CudaDriverError."""
        if self._span is not None:
            forget_elsewhere(self._span)
        if self._locator.kind == LEGACY:
            self._driver.close_ipc_handle(self.pointer)
        else:
            self._unmap(self.pointer, len(self._locator.parts))

    def _map_parts(self, id: int) -> int:
        driver, parts = self._driver, self._locator.parts
        pointer = at = driver.reserve(self.size)
        done = 0
        try:
            for descriptor in fetch_descriptors(self._locator.lease, id, len(parts)):
                try:
                    handle = driver.import_descriptor(descriptor)
                finally:
                    os.close(descriptor)
                try:
                    driver.map(at, parts[done].size, handle)
                finally:
                    driver.release_handle(handle)
                at += parts[done].size
                done += 1
            driver.allow(pointer, self.size, self.device)
        except BaseException:
            self._unmap(pointer, done)
            raise
        return pointer

    def _unmap(self, pointer: int, count: int) -> None:
        at = pointer
        for part in self._locator.parts[:count]:
            self._driver.unmap(at, part.size)
            at += part.size
        self._driver.unreserve(pointer, self.size)

    def _mapping_error(self, region: Region, error: CudaDriverError) -> CkptEngineError:
        """The error to raise for a mapping that failed."""
        what = f"GPU memory region {region.id} ({region.size} bytes of process {self._locator.pid}) cannot be mapped"
        if process_start_time(self._locator.pid) != self._locator.started:
            return unavailable(f"{what}: its owner is gone; publish again")
        owner_gpu = self._driver.device_of_uuid(self._locator.gpu_uuid)
        if error.code == OUT_OF_MEMORY:
            advice = "this process's GPU has no room for the mapping"
        elif error.code == NOT_FOUND or owner_gpu == self.device:
            advice = "publish again; if that does not help, publish with transport='shared_memory'"
        else:
            advice = "its GPU may be out of reach of this worker's: publish with transport='shared_memory'"
        return UnmappableError(unavailable(f"{what}: {error}; {advice}").problem)
