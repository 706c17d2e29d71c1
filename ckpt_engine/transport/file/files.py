"""Files that every process of this host can open, mapped read-only: what a checkpoint directory offers.

A file is identified by its path, size and modification time, which unlike device and inode are the same on every host
that has its directory (NFS, Lustre). Digests verify its content. It is checked when it is mapped and again before every
update, because it can be changed at any time. A file that is replaced by renaming another over it does no harm: the
mapping stays on the old one, and the check refuses the new one. One that is truncated while it is read kills the reader
with a bus error, as it does every reader that maps safetensors.
"""

from __future__ import annotations

import os
import socket
import weakref
from collections.abc import Sequence

from ckpt_engine.core.problems import CkptEngineError, data_loss, invalid, unavailable
from ckpt_engine.transport.base import OPEN_SECONDS, Availability, CannotOpenError, FileMemory, Memory
from ckpt_engine.transport.file.kind import NAME, on_host
from ckpt_engine.transport.locator import locator_of
from ckpt_engine.transport.mapped import MappedRegions, Mapping
from ckpt_engine.v1.weights_pb2 import FileLocator, Region


def file_region(id: int, path: str, offset: int, size: int) -> Region:
    """A region of `size` bytes from `offset` of a file as it is now. The source's side; any thread.

    Raises UNAVAILABLE if the file cannot be looked at.
    """
    absolute = os.path.realpath(path)
    try:
        status = os.stat(absolute)
    except OSError as error:
        raise unavailable(f"cannot look at {absolute}: {error}") from error
    locator = FileLocator(
        path=absolute, offset=offset, modified_nanoseconds=status.st_mtime_ns, file_size=status.st_size
    )
    return Region(id=id, transport=NAME, size=size, locator=locator.SerializeToString(deterministic=True))


class FileLender:
    """The owner's side. Files are not the owner's, so it cannot take them back."""

    def __init__(self) -> None:
        self._check = FileCheck(())

    def offer(self, id: int, memory: Memory) -> Region:
        """Lends a part of a file. Raises UNAVAILABLE for other memory, or a file that cannot be looked at."""
        if not isinstance(memory, FileMemory):
            raise unavailable(f"{memory.kind} is not a file that others could open")
        region = file_region(id, memory.path, memory.offset, memory.size)
        self._check = self._check.of([region])
        return region

    def unchanged(self) -> bool:
        """Whether every file is as it was when it was offered."""
        try:
            self._check()
        except CkptEngineError:
            return False
        return True

    def withdraw(self, seconds: float) -> None:
        """Closes as `close` does and does not wait. Readers that can read the files still can."""
        self.close()

    def close(self) -> None:
        """Forgets the files."""
        self._check = FileCheck(())


class FileTransport:
    """Reads regions of files. One instance a worker; regions that it opens share mappings."""

    name = NAME

    def __init__(self) -> None:
        self._mappings: weakref.WeakValueDictionary[bytes, Mapping] = weakref.WeakValueDictionary()

    def availability(self) -> Availability:
        """Whether files can be read; the same for every process of the host."""
        return on_host()

    def open(self, regions: Sequence[Region], seconds: float = OPEN_SECONDS) -> MappedRegions:
        """Maps the regions; costs nothing for those that are mapped already.

        Raises CannotOpenError if a file cannot be read, DATA_LOSS if it is not the one that was published.
        """
        opened: dict[bytes, Mapping] = {}
        for region in regions:
            mapping = self._mappings.get(region.locator)
            if mapping is None or mapping.size != region.size:
                mapping = _map(region)
                self._mappings[region.locator] = mapping
            opened[region.locator] = mapping
        regions_check = FileCheck(()).of(regions)
        regions_check()
        return MappedRegions(opened, regions_check, lambda: True)


class FileCheck:
    """A check that raises unless the files (path, modified nanoseconds, size) are those that were published."""

    def __init__(self, files: Sequence[tuple[str, int, int]]) -> None:
        self._files = tuple(files)

    def of(self, regions: Sequence[Region]) -> FileCheck:
        """A check of these files and those of the regions."""
        found = {(each.path, each.modified_nanoseconds, each.file_size) for each in map(_locator, regions)}
        return FileCheck(sorted({*self._files, *found}))

    def __call__(self) -> None:
        for path, modified, size in self._files:
            try:
                status = os.stat(path)
            except OSError as error:
                raise _unreadable(path, error) from error
            _same(status, path, modified, size)


def _locator(region: Region) -> FileLocator:
    locator = locator_of(region, NAME, FileLocator)
    if "\0" in locator.path:
        raise invalid(f"the locator of region {region.id} names no file: {locator.path!r}")
    return locator


def _map(region: Region) -> Mapping:
    locator = _locator(region)
    try:
        descriptor = os.open(locator.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise CannotOpenError(_unreadable(locator.path, error).problem.message, region) from error
    try:
        _same(os.fstat(descriptor), locator.path, locator.modified_nanoseconds, locator.file_size)
        if locator.offset + region.size > locator.file_size:
            raise data_loss(
                f"region {region.id} ends at byte {locator.offset + region.size} of {locator.path}, "
                f"which has {locator.file_size}"
            )
        return Mapping(descriptor, region.size, locator.offset)
    except OSError as error:
        raise CannotOpenError(f"cannot map {locator.path}: {error}", region) from error
    finally:
        os.close(descriptor)


def _unreadable(path: str, problem: OSError) -> CkptEngineError:
    return unavailable(
        f"cannot read {path} on host {socket.gethostname()}: {problem.strerror}; the checkpoint's directory must be "
        "there under the same path, readable for this user, or the weights have to come by way of relays"
    )


def _same(status: os.stat_result, path: str, modified: int, size: int) -> None:
    if not _same_time(status.st_mtime_ns, modified) or status.st_size != size:
        raise data_loss(
            f"{path} on host {socket.gethostname()} changed since it was published, or is another file: it has "
            f"{status.st_size} bytes and was modified at {status.st_mtime_ns} ns, published were {size} bytes and "
            f"{modified} ns; publish it again, or give both hosts the same directory"
        )


def _same_time(one: int, other: int) -> bool:
    """Whether two modification times agree. Some file systems report whole seconds to one host and nanoseconds to
    another."""
    second = 10**9
    return one == other or (0 in (one % second, other % second) and one // second == other // second)
