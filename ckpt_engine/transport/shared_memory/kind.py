"""What planners, workers and commands need to know about reading host memory of another process on the same host. Loads
neither the reader nor the lender."""

from __future__ import annotations

import mmap
import os

from ckpt_engine.core.reach import by_process
from ckpt_engine.core.transports import HOST_MEMORY, Availability, TransportKind

NAME = "shared_memory"

MARK = b"ckpt-engine"


def on_host() -> Availability:
    """Makes one page of an anonymous file and reads it back through /proc."""
    try:
        descriptor = os.memfd_create("ckpt-engine-probe", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, mmap.PAGESIZE)
            os.pwrite(descriptor, MARK, 0)
            reader = os.open(f"/proc/{os.getpid()}/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
            try:
                with mmap.mmap(reader, mmap.PAGESIZE, prot=mmap.PROT_READ) as page:
                    same = page[: len(MARK)] == MARK
            finally:
                os.close(reader)
        finally:
            os.close(descriptor)
    except OSError as error:
        return Availability(False, f"memory files cannot be shared here: {error}")
    if not same:
        return Availability(False, "a page of shared memory read back through /proc differs")
    return Availability(True, "memory files of this user's processes open through /proc")


KIND = TransportKind(
    name=NAME,
    order=30,
    reach=by_process,
    reader="ckpt_engine.transport.shared_memory.memory:SharedMemoryTransport",
    lender="ckpt_engine.transport.shared_memory.memory:SharedMemoryLender",
    lends=frozenset({HOST_MEMORY}),
    on_host=on_host,
    rates={"host": 16.0e9, "gpu": 55.3e9},
)
