"""The asker's side of UCX: chunks of another relay's arena, read into this one's by helper processes. See CarrierLink.

A read that has no answer by its deadline may land at any later time. So severing a link with such reads kills the
helpers that could write, and returns when they have ended.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np

from ckpt_engine.core.problems import data_loss, deadline, invalid, unavailable
from ckpt_engine.transport.base import ChunkRuns
from ckpt_engine.transport.locator import locator_of
from ckpt_engine.transport.ucx import channel as c
from ckpt_engine.transport.ucx.helpers import ANSWER_SECONDS, Helper
from ckpt_engine.transport.ucx.lanes import UcxLanes, lanes_of
from ckpt_engine.transport.ucx.settings import UCX
from ckpt_engine.v1.ucx_pb2 import UcxLocator
from ckpt_engine.v1.weights_pb2 import Region

REQUEST_BYTES = 8 << 20
"""The most of one request to a helper: the unit of progress, and what lanes take in turns."""

LEAST_BYTES = 256 << 10
"""Least bytes of a request, where a chunk is cut so that all lanes carry some of it."""

MOST_LANES = 64
"""The most of an owner; a host has no more network devices."""

STALL_SECONDS = 10.0
"""How long a helper may bring nothing of what was asked for; an owner that was stopped for some seconds goes on."""


def link_to(region: Region, owner: str, memory: memoryview) -> UcxLink | None:
    """A link to a relay's `UcxLanes.region`; None: this memory is not of an arena that was made with UCX. It starts
    nothing before the first read. Raises INVALID_ARGUMENT for an inconsistent locator."""
    lanes = lanes_of(_address(memory), len(memory))
    return None if lanes is None else UcxLink(region.size, read_locator(region), owner, lanes)


def read_locator(region: Region) -> UcxLocator:
    """The locator of a region, which comes from the network unchecked. Raises INVALID_ARGUMENT for an inconsistent one.
    Only NIXL, in a helper, understands the metadata."""
    locator = locator_of(region, UCX, UcxLocator)
    if (
        not 0 < len(locator.lanes) <= MOST_LANES
        or not 0 < locator.slot_bytes <= region.size
        or any(len(lane.metadata) > c.MOST_METADATA for lane in locator.lanes)
        or any(lane.memory + region.size >= 1 << 64 for lane in locator.lanes)
    ):
        raise invalid(f"the locator of region {region.id} over {UCX} names no memory that could be read")
    return locator


class UcxLink:
    """A connection to an owner, over every lane. One thread. size: bytes of the owner's arena."""

    def __init__(self, size: int, locator: UcxLocator, owner: str, lanes: UcxLanes) -> None:
        self._size = size
        self._locator = locator
        self._owner = owner
        self._lanes = lanes
        self._helpers: list[Helper] = []
        self._load: list[int] = []  # by lane: bytes that were asked for and have not come
        self._severed = False

    def read(self, slot: int, remote: ChunkRuns, memory: memoryview, local: ChunkRuns) -> UcxChunk:
        """Asks for a chunk. The first time it starts helpers and waits for them, for at most STALL_SECONDS.

        Raises UNAVAILABLE, DEADLINE_EXCEEDED; DATA_LOSS if the owner's runs do not fit.
        """
        if self._severed:
            raise unavailable("the link was severed")
        first = slot * self._locator.slot_bytes
        if any(first + offset + length > self._size for offset, length in remote):
            raise data_loss(f"{self._owner} says that a chunk lies where its memory has ended")
        for number in range(len(self._helpers), len(self._lanes.devices)):
            self._connect(number)
        local_at = _address(memory) - self._lanes.arena.address
        own = local_at // self._lanes.arena.slot_bytes
        start, size = own * self._lanes.arena.slot_bytes, self._lanes.reserved[own]
        found = UcxChunk(self)
        for number, helper in enumerate(self._helpers):
            if helper.registered.get(start, 0) < size:
                helper.registered[start] = size
                found.take(number, helper.ask(c.LEND, size, c.OFFSET.pack(start)), 0)
                found.patience = ANSWER_SECONDS
        runs = (
            (first + remote_at, local_at + at, length) for remote_at, at, length in _paired(self._owner, remote, local)
        )
        share = -(-sum(length for _, length in remote) // len(self._helpers))
        for size, request in c.in_requests(runs, max(LEAST_BYTES, min(REQUEST_BYTES, share))):
            number = min(range(len(self._helpers)), key=self._load.__getitem__)
            base = self._lane(number).memory
            body = c.pack_runs([(base + remote_at, at, length) for remote_at, at, length in request])
            found.take(number, self._helpers[number].ask(c.READ, 0, body), size)
        return found

    def sever(self) -> None:
        """See CarrierLink."""
        self._severed = True
        for helper in self._helpers:
            helper.kill()

    def _connect(self, number: int) -> None:
        helper = self._lanes.start_reader(number, STALL_SECONDS)
        self._helpers.append(helper)
        self._load.append(0)
        helper.wait(helper.ask(c.CONNECT, 0, self._lane(number).metadata), STALL_SECONDS)

    def _lane(self, number: int) -> UcxLocator.Lane:
        return self._locator.lanes[number % len(self._locator.lanes)]


class UcxChunk:
    """A chunk that is being read. See CarriedChunk."""

    def __init__(self, link: UcxLink) -> None:
        self.patience = STALL_SECONDS
        self._link = link
        self._waiting: dict[tuple[int, int], int] = {}  # by lane and number of a request: its bytes
        self._landed = 0
        self._moved = time.monotonic()

    def take(self, lane: int, number: int, size: int) -> None:
        """Adds a request."""
        self._waiting[lane, number] = size
        self._link._load[lane] += size

    def poll(self) -> int:
        """See CarriedChunk."""
        if self._link._severed:
            raise unavailable("the link was severed")
        for lane, number in list(self._waiting):
            if self._link._helpers[lane].answer(number) is not None:
                size = self._waiting.pop((lane, number))
                self._link._load[lane] -= size
                self._landed += size
                self._moved = time.monotonic()
        if self._waiting and time.monotonic() > self._moved + self.patience:
            raise deadline(
                f"nothing arrived over UCX for {self.patience:g} s: {self._link._owner} has stopped, or the network is "
                "cut"
            )
        return self._landed


def _address(memory: memoryview) -> int:
    return int(np.frombuffer(memory, np.uint8).ctypes.data)


def _paired(owner: str, remote: ChunkRuns, local: ChunkRuns) -> Iterator[tuple[int, int, int]]:
    """(offset in the owner's slot, offset in ours, length) of each piece that is contiguous in both."""
    ours = iter(local)
    local_at = room = 0
    for remote_at, length in remote:
        while length:
            if not room:
                local_at, room = next(ours, (0, 0))
                if not room:
                    raise data_loss(f"{owner} names more bytes than the chunk has")
            piece = min(length, room)
            yield remote_at, local_at, piece
            remote_at, local_at, length, room = remote_at + piece, local_at + piece, length - piece, room - piece
    if room or next(ours, None) is not None:
        raise data_loss(f"{owner} names fewer bytes than the chunk has")
