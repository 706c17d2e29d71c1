"""Memory of GPUs of this host: a worker maps a trainer's allocations, and reads parameters where they lie.

Each allocation is mapped once a process and device, however many tensors and plans read from it, and stays mapped from
plan to plan. It is unmapped when no plan uses it, or when its owner withdraws it or dies. A lease reports that at once
(transport/cuda_ipc/lease.py), also between updates, and without the engine's help. Prepared copies then refuse to run.

Everything is mapped for the device that reads, wherever the memory is, so tensors over it carry that device. The
owner's GPU need not be visible here; GPUs are told apart by their UUIDs. A view is valid until its regions are closed.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from ckpt_engine.copy.copying import TensorCopy
from ckpt_engine.copy.prepared import PreparedCopy, QueueableCopy, Queued
from ckpt_engine.core.dtypes import itemsize
from ckpt_engine.core.problems import CkptEngineError, invalid, unavailable
from ckpt_engine.cuda.arena import device_bytes
from ckpt_engine.cuda.driver import CudaDriverError, driver, library_problem
from ckpt_engine.host.processes import process_start_time
from ckpt_engine.torch_dtypes import torch_dtype
from ckpt_engine.transport.base import OPEN_SECONDS, Availability, CannotOpenError, Move
from ckpt_engine.transport.cuda_ipc.kind import NAME
from ckpt_engine.transport.cuda_ipc.lease import Lease
from ckpt_engine.transport.cuda_ipc.memory import Imported, UnmappableError
from ckpt_engine.transport.mapped import check_destination, span_of
from ckpt_engine.v1.weights_pb2 import CudaIpcLocator, Region

log = logging.getLogger(__name__)


class _LendingProcess:
    """Another process, and its memory that is mapped in this one."""

    def __init__(self, locator: CudaIpcLocator, on_end: Callable[[], None]) -> None:
        self.pid = locator.pid
        self.started = locator.started
        self.name = locator.lease
        self.lost = False
        self.mapped: dict[tuple[bytes, int], _MappedRegion] = {}
        self.lease = Lease(locator.lease, on_end)

    def check(self) -> None:
        """Raises UNAVAILABLE if it died or withdrew."""
        if self.lost or process_start_time(self.pid) != self.started:
            raise unavailable(
                f"the trainer process {self.pid}, whose GPU memory was mapped, has died or withdrawn it; publish again"
            )


class _MappedRegion:
    """A region, mapped for one device. users: OpenedRegions that use it. memory: may belong to other regions too; None
    once it is unmapped."""

    def __init__(self, key: tuple[bytes, int], owner: _LendingProcess, memory: Imported) -> None:
        self.key = key
        self.owner = owner
        self.memory: Imported | None = memory
        memory.users += 1
        self.size = memory.size
        self.users = 0
        self._base = device_bytes(memory.pointer, memory.size, memory.device)

    def view(self, offset: int, shape: Sequence[int], stride: Sequence[int], dtype: str) -> torch.Tensor:
        """The elements at `offset` bytes as a tensor, without a copy."""
        if self.memory is None:
            raise unavailable("the memory that this plan reads was unmapped; publish again")
        width = itemsize(dtype)
        if not span_of(self.size, offset, shape, stride, width):
            return torch.empty(tuple(shape), dtype=torch_dtype(dtype), device=self._base.device)
        if offset % width:
            raise invalid(f"{dtype} elements cannot lie at {offset} bytes in GPU memory")
        whole = self._base[: self.size - self.size % width].view(torch_dtype(dtype))
        return whole.as_strided(tuple(shape), tuple(stride), offset // width)


class CudaIpcTransport:
    """Reads GPU memory of other processes of this host. One instance a worker; one thread beside the leases' own."""

    name = NAME

    def __init__(self) -> None:
        # Held while anything is copied, mapped or unmapped: a lease that ends waits for the copy that runs.
        self._lock = threading.RLock()
        self._owners: dict[str, _LendingProcess] = {}
        self._handles: dict[tuple[bytes, int], Imported] = {}

    def availability(self) -> Availability:
        """Looks for the driver's library. Does not start CUDA."""
        if torch.version.cuda is None:
            return Availability(False, f"this torch ({torch.__version__}) is built without CUDA")
        if problem := library_problem():
            return Availability(False, problem)
        if torch.cuda.is_initialized():
            return Availability(True, f"{torch.cuda.device_count()} GPUs visible to this process")
        return Availability(True, "an NVIDIA driver is installed")

    def open(self, regions: Sequence[Region], seconds: float = OPEN_SECONDS) -> CudaRegions:
        """Maps the regions for the current device; costs nothing for those that are mapped already.

        Raises UNAVAILABLE if an owner is gone or has withdrawn its memory, CannotOpenError if it cannot be mapped here.
        """
        if not torch.cuda.is_initialized():
            message = "this worker uses no GPU, so it cannot map one's memory; publish with transport='shared_memory'"
            raise CannotOpenError(message, regions[0]) if regions else unavailable(message)
        opened = CudaRegions(self, torch.cuda.current_device())
        try:
            for region in regions:
                opened.add(region, opened.device)
        except BaseException:
            opened.close()
            raise
        return opened

    @property
    def mappings(self) -> int:
        """Regions that are mapped now, counted for each device."""
        with self._lock:
            return sum(len(owner.mapped) for owner in self._owners.values())

    def acquire(self, region: Region, device: int) -> _MappedRegion:
        """Maps a region for `device`, if it is not mapped, and counts one user more."""
        with self._lock:
            key = region.locator, device
            locator = CudaIpcLocator.FromString(region.locator)
            owner = self._owners.get(locator.lease)
            if owner is None:
                owner = _LendingProcess(locator, partial(self._lose, locator.lease))
                self._owners[locator.lease] = owner
            try:
                owner.check()
                mapped = owner.mapped.get(key)
                if mapped is None:
                    mapped = owner.mapped[key] = self._map(key, owner, region, locator)
            finally:
                self._let_go_of_unused(owner)
            mapped.users += 1
            return mapped

    def give_back(self, mapped: Sequence[_MappedRegion]) -> None:
        """Counts one user less of each, and unmaps those without users. Never raises."""
        with self._lock:
            for each in mapped:
                each.users -= 1
            self._unmap([each for each in mapped if each.users == 0])
            for owner in {each.owner.name: each.owner for each in mapped}.values():
                self._let_go_of_unused(owner)

    @contextlib.contextmanager
    def reading(self, mapped: Sequence[_MappedRegion]) -> Iterator[None]:
        """Keeps these regions mapped within the block. Raises UNAVAILABLE if one was unmapped before."""
        with self._lock:
            for each in mapped:
                if each.memory is None:
                    each.owner.check()
                    raise unavailable("the memory that this plan reads was unmapped; publish again")
            yield

    def _map(
        self, key: tuple[bytes, int], owner: _LendingProcess, region: Region, locator: CudaIpcLocator
    ) -> _MappedRegion:
        """Maps a region. A driver opens a handle once, so sources of one process in one allocation share a mapping."""
        handle = locator.parts[0].handle if locator.parts else b""
        memory_of_handle = self._handles.get((handle, key[1])) if handle else None
        if memory_of_handle is not None and memory_of_handle.is_of(locator):
            return _MappedRegion(key, owner, memory_of_handle)
        if memory_of_handle is not None:
            # The owner freed an allocation and got another one under the same handle: the driver would return the old
            # mapping. Plans that still read it are of an older publication.
            every = [each for owner in self._owners.values() for each in owner.mapped.values()]
            self._unmap([each for each in every if each.memory is memory_of_handle])
        try:
            memory = Imported(driver(), key[1], region)
        except UnmappableError as error:
            raise CannotOpenError(error.problem.message, region) from error
        except CudaDriverError as error:
            raise CannotOpenError(f"GPU memory cannot be mapped: {error}", region) from error
        if handle:
            self._handles[handle, key[1]] = memory
        return _MappedRegion(key, owner, memory)

    def _lose(self, name: str) -> None:
        """Unmaps an owner's memory, on the lease's thread: the owner has withdrawn it, or died."""
        with self._lock:
            owner = self._owners.pop(name, None)
            if owner is not None:
                owner.lost = True
                self._unmap(list(owner.mapped.values()))

    def _unmap(self, mapped: Sequence[_MappedRegion]) -> None:
        for device in {each.key[1] for each in mapped}:
            try:
                found = driver()
                with found.beside_captures(), found.on(device):
                    # A copy that was stopped by its deadline may still be on its way.
                    found.synchronize()
                    for each in mapped:
                        if each.key[1] == device:
                            self._unmap_one(each)
            except CudaDriverError:
                log.exception("ckpt-engine: GPU %d cannot let go of a source's memory", device)

    def _unmap_one(self, mapped: _MappedRegion) -> None:
        memory, mapped.memory = mapped.memory, None
        mapped.owner.mapped.pop(mapped.key, None)
        if memory is None:
            return
        memory.users -= 1
        if not memory.users:
            self._handles.pop((memory.handle, memory.device), None)
            try:
                memory.release()
            except CudaDriverError:
                log.exception("ckpt-engine: memory of process %d cannot be unmapped", mapped.owner.pid)

    def _let_go_of_unused(self, owner: _LendingProcess) -> None:
        if not owner.mapped:
            self._owners.pop(owner.name, None)
            owner.lease.close()


class CudaRegions:
    """OpenedRegions of GPUs. One thread."""

    def __init__(self, transport: CudaIpcTransport, device: int) -> None:
        self._transport = transport
        self.device = device
        self._mapped: dict[tuple[bytes, int], _MappedRegion] = {}

    def add(self, region: Region, device: int) -> _MappedRegion:
        """The region as it is mapped for `device`; maps it if it is not."""
        key = region.locator, device
        if key not in self._mapped:
            self._mapped[key] = self._transport.acquire(region, device)
        return self._mapped[key]

    def prepare(self, moves: Sequence[Move]) -> LeasedCopy:
        """Checks every move and builds its views. Memory that goes to another of this process's GPUs is mapped for that
        one, too. Raises INVALID_ARGUMENT, UNAVAILABLE."""
        pairs = []
        used: dict[tuple[bytes, int], _MappedRegion] = {}
        for move in moves:
            check_destination(move)
            mapped = self._of(move.region, move.destination)
            used[mapped.key] = mapped
            source = mapped.view(move.offset, move.shape, move.stride, move.stored or move.dtype)
            pairs.append((move.destination, source))
        return LeasedCopy(self._transport, list(used.values()), TensorCopy(pairs))

    def check(self) -> None:
        """Raises UNAVAILABLE if an owner has died or withdrawn its memory."""
        for owner in {each.owner.name: each.owner for each in self._mapped.values()}.values():
            owner.check()

    def offered(self) -> bool:
        """Whether every owner lives and has not withdrawn its memory."""
        try:
            self.check()
        except CkptEngineError:
            return False
        return True

    def view(
        self, region: Region, offset: int, shape: Sequence[int], stride: Sequence[int], dtype: str
    ) -> torch.Tensor:
        """The owner's memory as a tensor of the reading device; valid until `close`, or until the owner withdraws."""
        return self._find(region).view(offset, shape, stride, dtype)

    def close(self) -> None:
        """Forgets the regions. May be repeated."""
        mapped, self._mapped = list(self._mapped.values()), {}
        self._transport.give_back(mapped)

    def _find(self, region: Region) -> _MappedRegion:
        mapped = self._mapped.get((region.locator, self.device))
        if mapped is None:
            raise invalid(f"region {region.id} ({region.transport}) was not opened, or was closed")
        return mapped

    def _of(self, region: Region, destination: torch.Tensor) -> _MappedRegion:
        mapped = self._find(region)
        if destination.device.type == "cuda" and destination.device.index != self.device:
            return self.add(region, destination.device.index)
        return mapped


class LeasedCopy:
    """PreparedCopy that refuses to run once its memory was unmapped."""

    def __init__(self, transport: CudaIpcTransport, mapped: Sequence[_MappedRegion], copy: PreparedCopy) -> None:
        self._transport = transport
        self._mapped = tuple(mapped)
        self._copy = copy

    @property
    def bytes(self) -> int:
        """What one run writes, in bytes."""
        return self._copy.bytes

    @property
    def notes(self) -> tuple[str, ...]:
        """See PreparedCopy."""
        return self._copy.notes

    def run(self, on_bytes: Callable[[int], None] | None = None) -> int:
        """See PreparedCopy. Raises UNAVAILABLE if an owner has died or withdrawn its memory before the copy begins. One
        that dies later does no harm: memory stays mapped until the copy ends."""
        with self._transport.reading(self._mapped):
            return self._copy.run(on_bytes)

    def queue(self) -> Queued | None:
        """See QueueableCopy. Raises as `run`. Memory is not unmapped before the GPU has carried out the queued
        copies."""
        if not isinstance(self._copy, QueueableCopy):
            return None
        with self._transport.reading(self._mapped):
            return self._copy.queue()
