"""What a relay has for UCX: the process that makes helpers, and the helpers of each lane. See ChunkCarrier.

A lane is a network device. The owner's side has one helper a lane, for all readers. The reader's side has one a lane
and owner, so that an owner that hangs costs the reads from that owner only.
"""

from __future__ import annotations

import threading
import weakref
from pathlib import Path

from ckpt_engine.core.relay_layout import SLOTS
from ckpt_engine.transport.base import ArenaMapping
from ckpt_engine.transport.ucx import channel as c
from ckpt_engine.transport.ucx.helpers import START_SECONDS, ForkServer, Helper
from ckpt_engine.transport.ucx.settings import UCX, ucx_devices
from ckpt_engine.v1.ucx_pb2 import UcxLocator
from ckpt_engine.v1.weights_pb2 import Region

RDMA_DEVICES = Path("/sys/class/infiniband")


class UcxLanes:
    """UCX of one arena. Any thread. devices: one entry a lane, as UCX_NET_DEVICES has it.

    Made between the arena's mapping and its sealing. A helper is started for each lane at once, so that an invalid
    device is found here and not in the first update.

    Raises UNAVAILABLE with NIXL's message, DEADLINE_EXCEEDED.
    """

    def __init__(self, arena: ArenaMapping, devices: tuple[str, ...]) -> None:
        self.arena = arena
        self.devices = devices
        self.reserved = [0] * SLOTS
        self.takes_all = has_rdma()
        self._lock = threading.Lock()
        self._lenders: list[Helper] = []
        self._lanes: dict[Helper, UcxLocator.Lane] = {}
        self._server = ForkServer(arena.descriptor, arena.size)
        try:
            self._lenders = [self._start_lender(each) for each in devices]
        except BaseException:
            self._server.close()
            raise
        _all.add(self)

    @property
    def fork_server(self) -> int:
        """The pid of the process that makes helpers."""
        return self._server.pid

    @property
    def helpers(self) -> list[int]:
        """The pids of helpers that were not killed."""
        return self._server.helpers

    @property
    def region(self) -> Region:
        """Where other relays' helpers read this arena: all of it, registered once with each helper. It changes when a
        helper has ended, since another one takes its place.

        Raises UNAVAILABLE with NIXL's message, DEADLINE_EXCEEDED.
        """
        memory = self._server.writable if self.takes_all else self._server.readable
        with self._lock:
            for number, lender in enumerate(self._lenders):
                if lender.ended:
                    lender.kill()
                    self._lanes.pop(lender, None)
                    lender = self._lenders[number] = self._start_lender(self.devices[number])
                if lender not in self._lanes:
                    metadata = lender.register(0, self.arena.size)
                    self._lanes[lender] = UcxLocator.Lane(metadata=metadata, memory=memory)
            lanes = [self._lanes[lender] for lender in self._lenders]
        locator = UcxLocator(slot_bytes=self.arena.slot_bytes, lanes=lanes)
        return Region(transport=UCX, size=self.arena.size, locator=locator.SerializeToString(deterministic=True))

    def start_reader(self, lane: int, seconds: float = START_SECONDS) -> Helper:
        """A helper of a lane that is not connected yet. Raises UNAVAILABLE, DEADLINE_EXCEEDED."""
        return self._server.start(c.READER, self.devices[lane], seconds)

    def _start_lender(self, devices: str) -> Helper:
        return self._server.start(c.LENDER_WRITABLE if self.takes_all else c.LENDER, devices)

    def close(self) -> None:
        """Ends every helper. May be repeated. Never raises."""
        _all.discard(self)
        self._server.close()


def has_rdma() -> bool:
    """Whether this host has InfiniBand or RoCE devices, which register only writable memory, and pin it."""
    try:
        return any(RDMA_DEVICES.iterdir())
    except OSError:
        return False


def lanes_on(arena: ArenaMapping, devices: tuple[str, ...] | None = None) -> UcxLanes | None:
    """UCX of an arena that is not sealed yet; None: the settings do not ask for it. devices: None: those of the
    settings. Raises as UcxLanes."""
    found = ucx_devices() if devices is None else devices
    return UcxLanes(arena, found) if found else None


def lanes_of(address: int, length: int) -> UcxLanes | None:
    """The lanes of the arena in which memory of this process lies."""
    for each in list(_all):
        if each.arena.address <= address and address + length <= each.arena.address + each.arena.size:
            return each
    return None


_all: weakref.WeakSet[UcxLanes] = weakref.WeakSet()
