"""A transport that ckpt-engine has never heard of, whole: a reader opens the owner's memory file by its path."""

from __future__ import annotations

import os
from collections.abc import Sequence

from ckpt_engine.core.problems import unavailable
from ckpt_engine.core.reach import Reach, same_host
from ckpt_engine.core.transports import HOST_MEMORY, TransportKind
from ckpt_engine.transport.base import OPEN_SECONDS, Availability, HostMemory, Memory
from ckpt_engine.transport.mapped import MappedRegions, Mapping
from ckpt_engine.v1.weights_pb2 import Host, Region


class BorrowedLender:
    """The owner's side: a duplicate of the memory file's descriptor, named by its path."""

    def __init__(self) -> None:
        self._descriptors: list[int] = []

    def offer(self, id: int, memory: Memory) -> Region:
        if not isinstance(memory, HostMemory):
            raise unavailable(f"{memory.kind} cannot be borrowed")
        self._descriptors.append(os.dup(memory.descriptor))
        path = f"/proc/{os.getpid()}/fd/{self._descriptors[-1]}"
        return Region(id=id, transport="borrowed", size=memory.bytes.numel(), locator=path.encode())

    def unchanged(self) -> bool:
        return True

    def withdraw(self, seconds: float) -> None:
        self.close()

    def close(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.pop())


class Borrowed:
    """The reader's side."""

    name = "borrowed"

    def availability(self) -> Availability:
        return Availability(True, "paths can be opened")

    def open(self, regions: Sequence[Region], seconds: float = OPEN_SECONDS) -> MappedRegions:
        found = {}
        for region in regions:
            try:
                descriptor = os.open(region.locator, os.O_RDONLY)
            except OSError as error:
                raise unavailable(str(error)) from error
            found[region.locator] = Mapping(descriptor, region.size)
            os.close(descriptor)
        return MappedRegions(found, lambda: None, lambda: True)


def near(source: Host, worker: Host) -> Reach:
    """Nearer than everything that is built."""
    return Reach(same_host(source, worker), "both are made up", -1)


BORROWED = TransportKind("borrowed", near, Borrowed, BorrowedLender, frozenset({HOST_MEMORY}), unasked=False)
