"""A relay's memory: one anonymous file with two slots, which the relay writes and others can only read.

The file's size is sealed, and so is writing by processes that get its descriptor (F_SEAL_FUTURE_WRITE): only mappings
made before stay writable. Memory is taken slot by slot, as far as a version needs it, after it was counted; it stays
the relay's until the relay ends. Nothing is left on the disk if a process dies. One other process may map it writable,
if a transport needs that: it maps the memory before it is sealed (`ChunkCarrier`).
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import secrets
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from ckpt_engine.core.problems import CkptEngineError, invalid, unavailable
from ckpt_engine.core.relay_layout import GROUP_BYTES, SLOTS, check_memory, check_room
from ckpt_engine.cuda.pinning import Pin, pin
from ckpt_engine.host.numa import spread
from ckpt_engine.host.room import memory_room
from ckpt_engine.transport.base import ArenaMapping, ArenaMemory, ChunkCarrier

log = logging.getLogger(__name__)

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_FUTURE_WRITE = 0x10  # F_SEAL_FUTURE_WRITE, which Python does not name
_HUGE = 2 << 20
_HUGE_2MB = 21 << 26  # MFD_HUGE_2MB


class Arena:
    """Two slots of equal size. Written by its relay alone; any thread. nodes: NUMA nodes over which its pages are
    spread evenly; fewer than two: pages lie where the thread that takes them runs.

    memory: bytes of both slots together, rounded down; nothing is taken before `reserve`. carriers: makers of processes
    that may write to it too (TransportKind.carrier); none: no other process ever does.

    Raises INVALID_ARGUMENT if memory is too small for two slots, UNAVAILABLE if the kernel refuses it, and what makers
    of carriers raise: UNAVAILABLE, DEADLINE_EXCEEDED.
    """

    def __init__(
        self,
        memory: int,
        huge_pages: Path = Path("/sys/kernel/mm/hugepages/hugepages-2048kB"),
        carriers: Sequence[Callable[[ArenaMapping], ChunkCarrier | None]] = (),
    ) -> None:
        self.slot_bytes = memory // SLOTS // GROUP_BYTES * GROUP_BYTES
        self.size = SLOTS * self.slot_bytes
        if not self.slot_bytes:
            raise invalid(f"a relay needs {SLOTS * GROUP_BYTES} bytes of memory or more, and {memory} were given")
        self.id = secrets.token_bytes(16)
        self._reserved = [0] * SLOTS
        self._pins: dict[int, tuple[int, Pin]] = {}  # by slot: how many bytes are pinned
        reserved = free_huge_pages(huge_pages) * _HUGE >= self.size
        self.pages = "2 MiB pages" if reserved else "pages as the kernel gives them: no 2 MiB pages are reserved for it"
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | ((os.MFD_HUGETLB | _HUGE_2MB) if reserved else 0)
        try:
            self.descriptor = os.memfd_create("ckpt-engine relay", flags)
        except OSError as error:
            raise unavailable(f"no shared memory: memfd_create failed: {error}") from error
        self._closer = weakref.finalize(self, os.close, self.descriptor)
        try:
            os.ftruncate(self.descriptor, self.size)
            self._memory: mmap.mmap | None = mmap.mmap(self.descriptor, self.size, flags=mmap.MAP_SHARED)
            self.carriers = self._make_carriers(self._memory, carriers) if carriers else ()
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, _SEALS | _FUTURE_WRITE)
        except (OSError, ValueError) as error:
            self._closer()
            raise unavailable(f"cannot allocate {self.size} bytes of shared memory: {error}") from error
        except CkptEngineError:
            self._closer()
            raise
        # A child would share the pages, and could write to what was verified.
        self._memory.madvise(mmap.MADV_DONTFORK)
        self.nodes = spread(torch.frombuffer(self._memory, dtype=torch.uint8, count=1).data_ptr(), self.size)
        if not reserved and hasattr(mmap, "MADV_HUGEPAGE"):
            try:
                self._memory.madvise(mmap.MADV_HUGEPAGE)
            except OSError:
                log.info("ckpt-engine: this kernel has no transparent huge pages for shared memory")
        if any(carrier.takes_all for carrier in self.carriers):
            try:
                for slot in range(SLOTS):
                    self.reserve(slot, self.slot_bytes, "a relay whose network cards must have all of its memory")
            except CkptEngineError:
                self.close()
                raise

    def _make_carriers(
        self, memory: mmap.mmap, makers: Sequence[Callable[[ArenaMapping], ChunkCarrier | None]]
    ) -> tuple[ChunkCarrier, ...]:
        address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
        mapping = ArenaMapping(self.descriptor, self.size, address, self.slot_bytes)
        return tuple(carrier for make in makers if (carrier := make(mapping)) is not None)

    def reserve(self, slot: int, size: int, what: str) -> None:
        """Takes memory for the first `size` bytes of a slot, if it has none yet.

        Raises FAILED_PRECONDITION if the slot is smaller, UNAVAILABLE if the host, or this process's cgroup, has no
        room, each naming both numbers and `what`; INVALID_ARGUMENT after `close`.
        """
        if self._memory is None:
            raise invalid("the relay's memory was closed")
        check_memory(size, self.slot_bytes, what)
        more = size - self._reserved[slot]
        if more <= 0:
            return
        check_room(more, memory_room(), what)
        try:
            os.posix_fallocate(self.descriptor, slot * self.slot_bytes + self._reserved[slot], more)
        except OSError as error:
            raise unavailable(f"cannot allocate {more} more bytes of memory for {what}: {error}") from error
        self._reserved[slot] = size
        for carrier in self.carriers:
            carrier.reserved[slot] = size

    def pin(self, slot: int, gpu: int) -> None:
        """Registers the reserved part of a slot with the GPU driver, so that all GPUs write to it at the speed of their
        link. Takes some 0.1 s a GB, once. gpu: the ordinal of a GPU on which CUDA was started. Raises CudaDriverError;
        INVALID_ARGUMENT after `close`."""
        size = -(-self._reserved[slot] // mmap.PAGESIZE) * mmap.PAGESIZE
        pinned = self._pins.get(slot)
        if not size or (pinned is not None and pinned[0] == size):
            return
        address = self.tensor(slot, 0, (1,), torch.uint8).data_ptr()
        if pinned is not None:
            del self._pins[slot]
            pinned[1].release()
        self._pins[slot] = size, pin(self, self._memory, address, size, gpu)

    @property
    def reserved(self) -> int:
        """Bytes that it has taken of the host's memory."""
        return sum(self._reserved)

    def tensor(self, slot: int, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Writable memory of a slot, contiguous, from `offset` bytes of it. Raises INVALID_ARGUMENT if it does not fit
        in the reserved part, or after `close`."""
        count = 1
        for extent in shape:
            count *= extent
        if not count:
            return torch.empty(tuple(shape), dtype=dtype)
        if self._memory is None:
            raise invalid("the relay's memory was closed")
        if offset < 0 or offset % dtype.itemsize or offset + count * dtype.itemsize > self._reserved[slot]:
            raise invalid(
                f"{count * dtype.itemsize} bytes cannot lie at {offset} of slot {slot}, which has "
                f"{self._reserved[slot]}"
            )
        start = slot * self.slot_bytes + offset
        return torch.frombuffer(self._memory, dtype=dtype, count=count, offset=start).view(tuple(shape))

    def lendable(self) -> ArenaMemory:
        """The memory as lenders between relays read it. Raises INVALID_ARGUMENT after `close`."""
        if self._memory is None:
            raise invalid("the relay's memory was closed")
        whole = torch.frombuffer(self._memory, dtype=torch.uint8, count=self.size)
        return ArenaMemory(self.id, whole, self.descriptor, self.slot_bytes)

    def close(self) -> None:
        """Closes the descriptor. The memory is freed when no process maps it any more. May be repeated."""
        self._memory = None
        for carrier in self.carriers:
            carrier.close()
        self._closer()


def free_huge_pages(folder: Path) -> int:
    """Reserved pages that are neither taken nor promised; 0 where the kernel has none."""
    try:
        return int((folder / "free_hugepages").read_text()) - int((folder / "resv_hugepages").read_text())
    except (OSError, ValueError):
        return 0
