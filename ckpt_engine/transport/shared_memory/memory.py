"""Shared memory of one host: anonymous memory files, opened through /proc.

The owner makes a file without a name (memfd) and publishes its pid, descriptor, device and inode. A reader opens
/proc/<pid>/fd/<descriptor> read-only and maps it. There is nothing to unlink: the kernel frees the memory when the
last process that maps it has ended. It needs one pid namespace and one user, and no room in /dev/shm.

A forked child of the owner gets private pages: neither its parent nor a reader sees what it writes. It sees its
parent's writes to a page until it has written to that page itself. A copy of all pages at each fork would cost every
worker of a data loader the size of the model.
"""

from __future__ import annotations

import ctypes
import fcntl
import logging
import mmap
import os
import weakref
from collections.abc import Sequence
from functools import cache, partial

import torch

from ckpt_engine.core.problems import CkptEngineError, data_loss, invalid, unavailable
from ckpt_engine.core.strides import span
from ckpt_engine.host.room import memory_room
from ckpt_engine.transport.base import OPEN_SECONDS, Availability, CannotOpenError, HostMemory, Memory
from ckpt_engine.transport.locator import locator_of
from ckpt_engine.transport.mapped import MappedRegions, Mapping
from ckpt_engine.transport.shared_memory.kind import NAME
from ckpt_engine.v1.weights_pb2 import Region, SharedMemoryLocator

log = logging.getLogger(__name__)


ALIGNMENT = 64
"""Bytes; where tensors should start in an arena, so that none shares a cache line with another."""


class OwnedMemory(mmap.mmap):
    """The owner's mapping of a whole memory file. Lives as long as any tensor over it."""

    address: int
    descriptor: int
    process: int  # that made it: in a forked child these are private pages

    @classmethod
    def of(cls, descriptor: int, size: int) -> OwnedMemory:
        """Maps it. Raises OSError."""
        memory = cls(descriptor, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        memory.address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
        memory.descriptor, memory.process = os.dup(descriptor), os.getpid()
        _libc()  # a child should not have to load anything
        weakref.finalize(memory, os.close, memory.descriptor)
        _owned.add(memory)
        return memory

    def tensor(
        self, offset: int, shape: Sequence[int], dtype: torch.dtype, stride: Sequence[int] | None = None
    ) -> torch.Tensor:
        """As SharedArena.tensor."""
        steps = torch.empty(tuple(shape), device="meta").stride() if stride is None else tuple(stride)
        if 0 in shape:
            return torch.empty_strided(tuple(shape), steps, dtype=dtype)
        length = span(shape, steps)
        if offset < 0 or offset % dtype.itemsize or offset + length * dtype.itemsize > len(self):
            raise invalid(f"a tensor of {length} x {dtype.itemsize} bytes cannot lie at {offset} in {len(self)} bytes")
        return torch.frombuffer(self, dtype=dtype, count=length, offset=offset).as_strided(tuple(shape), steps)

    def lendable(self) -> HostMemory:
        """All of it, for a Lender."""
        return HostMemory(self.tensor(0, (len(self),), torch.uint8), self.descriptor)

    def make_private(self) -> None:
        """Replaces the shared mapping by a private one, in a forked child. Raises OSError."""
        access, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | _MAP_FIXED
        if _libc().mmap(self.address, len(self), access, flags, self.descriptor, 0) != self.address:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    return libc


_MAP_FIXED = 0x10  # what Linux calls it; Python does not
_owned: weakref.WeakSet[OwnedMemory] = weakref.WeakSet()


def lies_in_arena(address: int) -> bool:
    """Whether memory of this process lies in an arena that it made, closed or not."""
    return any(memory.address <= address < memory.address + len(memory) for memory in _owned)


def arena_at(address: int) -> OwnedMemory | None:
    """The arena, closed or not, in which memory lies that others can map. None: it lies in none, or in one of the
    process from which this one was forked."""
    process = os.getpid()
    return next(
        (
            memory
            for memory in _owned
            if memory.process == process and memory.address <= address < memory.address + len(memory)
        ),
        None,
    )


def _become_child() -> None:
    for memory in list(_owned):
        try:
            memory.make_private()
        except OSError as error:
            log.error("ckpt-engine: the published weights stay shared with the parent process: %s", error)


os.register_at_fork(after_in_child=_become_child)


class SharedArena:
    """`size` bytes that this process owns and others may map. Owner's side; any thread.

    Its size is sealed, so no truncation can hurt a reader. The memory is reserved at once: a host without room causes
    an error here and not a bus error later. Tensors over it stay valid as long as they live, also after `close`.

    Raises UNAVAILABLE if the memory cannot be allocated, INVALID_ARGUMENT if `size` is not positive.
    """

    def __init__(self, size: int) -> None:
        if size <= 0:
            raise invalid(f"the size of shared memory must be positive, not {size} bytes")
        self.size = size
        if size > (room := memory_room()):
            raise unavailable(f"no room for {size} bytes of shared memory: this process may take {room} more")
        try:
            self._descriptor = os.memfd_create("ckpt-engine", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as error:
            raise unavailable(f"no shared memory: memfd_create failed: {error}") from error
        self._closer = weakref.finalize(self, os.close, self._descriptor)
        try:
            os.posix_fallocate(self._descriptor, 0, size)
            fcntl.fcntl(
                self._descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            )
            self._memory: OwnedMemory | None = OwnedMemory.of(self._descriptor, size)
        except OSError as error:
            self._closer()
            raise unavailable(f"cannot allocate {size} bytes of shared memory: {error}") from error

    def tensor(
        self, offset: int, shape: Sequence[int], dtype: torch.dtype, stride: Sequence[int] | None = None
    ) -> torch.Tensor:
        """Memory of the arena as a tensor, from `offset` bytes, contiguous unless `stride` (elements) is given.

        Raises INVALID_ARGUMENT if it does not fit, if `offset` is not a multiple of the element size, or after `close`.
        """
        return self.memory.tensor(offset, shape, dtype, stride)

    @property
    def memory(self) -> OwnedMemory:
        """The mapping, which tensors keep alive. Raises INVALID_ARGUMENT after `close`."""
        if self._memory is None:
            raise invalid("this shared memory was closed")
        return self._memory

    def region(self, id: int) -> Region:
        """The region with which others open this memory, until this process ends or `close` is called."""
        return _region(id, self._descriptor, len(self.memory))

    def lendable(self) -> HostMemory:
        """All of it, for a Lender. Raises INVALID_ARGUMENT after `close`."""
        return self.memory.lendable()

    def close(self) -> None:
        """Ends opening by other processes. May be repeated. The memory is freed when no tensor of any process uses
        it."""
        self._memory = None
        self._closer()


class SharedMemoryLender:
    """The owner's side. Readers keep mapped memory as long as they want, so nothing waits for them."""

    def __init__(self) -> None:
        self._descriptors: list[int] = []

    def offer(self, id: int, memory: Memory) -> Region:
        """Lends a whole memory file. Raises UNAVAILABLE for other memory."""
        if not isinstance(memory, HostMemory):
            raise unavailable(f"{memory.kind} cannot be opened through /proc")
        try:
            descriptor = os.dup(memory.descriptor)
        except OSError as error:
            raise unavailable(f"shared memory that was closed cannot be offered: {error}") from error
        self._descriptors.append(descriptor)
        return _region(id, descriptor, memory.bytes.numel())

    def unchanged(self) -> bool:
        """True: the files are this process's own, and their size is sealed."""
        return True

    def withdraw(self, seconds: float) -> None:
        """Closes as `close` does, without waiting."""
        self.close()

    def close(self) -> None:
        """Ends opening by other processes."""
        descriptors, self._descriptors = self._descriptors, []
        for descriptor in descriptors:
            os.close(descriptor)


class SharedMemoryTransport:
    """Reads regions of other processes of this host. One instance a worker; regions that it opens share mappings."""

    name = NAME

    def __init__(self) -> None:
        self._mappings: weakref.WeakValueDictionary[bytes, Mapping] = weakref.WeakValueDictionary()

    def availability(self) -> Availability:
        """Makes one page and reads it back through /proc."""
        try:
            arena = SharedArena(mmap.PAGESIZE)
            arena.tensor(0, (1,), torch.uint8).fill_(7)
            region = arena.region(0)
            found = int(SharedMemoryTransport().open([region]).view(region, 0, (1,), (1,), "uint8")[0])
            arena.close()
        except CkptEngineError as error:
            return Availability(False, error.problem.message)
        if found != 7:
            return Availability(False, "a page of shared memory read back through /proc differs")
        return Availability(True, "memory files of this user's processes open through /proc")

    def open(self, regions: Sequence[Region], seconds: float = OPEN_SECONDS) -> MappedRegions:
        """Maps the regions; costs nothing for those that are mapped already.

        Raises UNAVAILABLE if an owner is gone, CannotOpenError if it may not be read, DATA_LOSS if its memory is not
        what it published.
        """
        opened: dict[bytes, Mapping] = {}
        for region in regions:
            mapping = self._mappings.get(region.locator)
            if mapping is None:
                mapping = _map(region)
                self._mappings[region.locator] = mapping
            elif mapping.size != region.size:
                raise data_loss(f"region {region.id} has {region.size} bytes, but {mapping.size} are mapped for it")
            opened[region.locator] = mapping
        # A mapped memory file is bound to its inode and its size is sealed: nothing is left to check later.
        return MappedRegions(opened, lambda: None, partial(_offered, list(regions)), pins=True)


def _region(id: int, descriptor: int, size: int) -> Region:
    status = os.fstat(descriptor)
    locator = SharedMemoryLocator(pid=os.getpid(), descriptor=descriptor, device=status.st_dev, inode=status.st_ino)
    return Region(id=id, transport=NAME, size=size, locator=locator.SerializeToString(deterministic=True))


def _offered(regions: Sequence[Region]) -> bool:
    try:
        for region in regions:
            locator = locator_of(region, NAME, SharedMemoryLocator)
            path = _path(locator)
            _same(os.stat(path), locator, region, path)
    except (OSError, CkptEngineError):
        return False
    return True


def _path(locator: SharedMemoryLocator) -> str:
    return f"/proc/{locator.pid}/fd/{locator.descriptor}"


def _map(region: Region) -> Mapping:
    locator = locator_of(region, NAME, SharedMemoryLocator)
    path = _path(locator)
    try:
        # Looked at before it is opened: if the pid was reused, opening a stranger's pipe or device would touch it.
        _same(os.stat(path), locator, region, path)
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError as error:
        raise unavailable(
            f"the owner of shared memory region {region.id} is gone or closed it: no {path}; publish again"
        ) from error
    except OSError as error:
        raise CannotOpenError(
            f"shared memory region {region.id} cannot be opened at {path}: {error}; reader and owner must be processes "
            "of one user in one pid namespace",
            region,
        ) from error
    try:
        _same(os.fstat(descriptor), locator, region, path)
        return Mapping(descriptor, region.size)
    except OSError as error:
        raise CannotOpenError(f"shared memory region {region.id} cannot be mapped: {error}", region) from error
    finally:
        os.close(descriptor)


def _same(status: os.stat_result, locator: SharedMemoryLocator, region: Region, path: str) -> None:
    if (status.st_dev, status.st_ino) != (locator.device, locator.inode):
        raise unavailable(
            f"the owner of shared memory region {region.id} is gone: {path} is device {status.st_dev} inode "
            f"{status.st_ino}, published was device {locator.device} inode {locator.inode}; publish again"
        )
    if status.st_size != region.size:
        raise data_loss(f"shared memory region {region.id} at {path} has {status.st_size} bytes, not {region.size}")
