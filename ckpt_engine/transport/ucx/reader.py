"""The reader's side of UCX: runs of another relay's arena, read into this one's by helper processes.

A read that has no answer by its deadline may land at any later time. So severing a link with such reads kills the
helpers that could write, and returns when they have ended. Without such reads the helper stays for the next link.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import torch

from ckpt_engine.core.problems import CkptEngineError, deadline, invalid, unavailable
from ckpt_engine.core.relay_layout import SLOTS
from ckpt_engine.transport.base import Availability, ByteRun, source_of
from ckpt_engine.transport.locator import locator_of
from ckpt_engine.transport.ucx import channel as c
from ckpt_engine.transport.ucx.lanes import Peer, UcxLanes, lanes_of
from ckpt_engine.transport.ucx.packages import installed
from ckpt_engine.transport.ucx.settings import DEVICES, UCX, ucx_devices
from ckpt_engine.v1.ucx_pb2 import UcxLocator
from ckpt_engine.v1.weights_pb2 import Problem, Region

log = logging.getLogger(__name__)

REQUEST_BYTES = 8 << 20
"""The most of one request to a helper: the unit of progress, and what lanes take in turns."""

MOST_LANES = 64
"""The most of an owner; a host has no more network devices."""

STALL_SECONDS = 20.0
"""How long an owner may send nothing of what was asked for; one that was stopped for some seconds goes on."""

_TOKEN_BYTES = 16


class UcxFetcher:
    """Reads relays' memory over UCX. One instance a relay. stall: seconds, as STALL_SECONDS."""

    name = UCX

    def __init__(self, stall: float = STALL_SECONDS) -> None:
        self._stall = stall

    def availability(self) -> Availability:
        """Whether this process is to use UCX, and NIXL is installed. Starts nothing."""
        return availability()

    def connect(self, region: Region, landing: torch.Tensor, seconds: float) -> UcxLink:
        """Connects to the owner of a region. landing: memory of an arena of this process that was made with UCX.

        Raises as Fetcher.connect; UNAVAILABLE too if the owner does not lend the slot now.
        """
        until = time.monotonic() + seconds
        locator = read_locator(region)
        lanes = lanes_of(landing.data_ptr(), landing.nbytes)
        if lanes is None:
            raise unavailable("UCX reads into a relay's memory only, and only if that was made with --ucx-devices")
        link = UcxLink(region, locator, lanes, landing, self._stall)
        try:
            link.connect(until)
        except BaseException:
            link.sever()
            raise
        return link


def read_locator(region: Region) -> UcxLocator:
    """The locator of a region, which comes from the network unchecked. Raises INVALID_ARGUMENT for an inconsistent one.
    Only NIXL, in a helper, understands the metadata."""
    locator = locator_of(region, UCX, UcxLocator)
    end = locator.offset + region.size
    if (
        not 0 < len(locator.lanes) <= MOST_LANES
        or len(locator.token) != _TOKEN_BYTES
        or locator.slot >= SLOTS
        or any(len(lane.metadata) > c.MOST_METADATA for lane in locator.lanes)
        or any(max(lane.memory + end, lane.board + _TOKEN_BYTES) >= 1 << 64 for lane in locator.lanes)
    ):
        raise invalid(f"the locator of {source_of(region)} names no memory that UCX could read")
    return locator


def availability() -> Availability:
    """Whether a relay of this host could use UCX. Loads nothing, starts nothing."""
    package = installed()
    if package is None:
        return Availability(False, "NIXL is not installed: pip install 'ckpt-engine[relay-ucx]'")
    devices = ucx_devices()
    if not devices:
        return Availability(
            False, f"not switched on: {package} is installed, and a relay uses it with --ucx-devices ({DEVICES})"
        )
    return Availability(True, f"{package}, {', '.join(devices) if devices[0] else 'all devices that UCX finds'}")


class UcxLink:
    """A connection to an owner, over every lane. One thread."""

    def __init__(
        self, region: Region, locator: UcxLocator, lanes: UcxLanes, landing: torch.Tensor, stall: float
    ) -> None:
        self._region = region
        self._locator = locator
        self._lanes = lanes
        self._landing = landing.data_ptr() - lanes.address
        self._landing_size = landing.nbytes
        self._stall = stall
        self._peers: list[tuple[Peer, UcxLocator.Lane]] = []
        self._waiting: dict[tuple[int, int], int] = {}  # lane and number to bytes
        self._load: list[int] = []
        self._moved = 0.0
        self._severed = False

    def connect(self, until: float) -> None:
        """Takes a helper for each lane and registers the memory that it writes."""
        for number in range(len(self._lanes.devices)):
            lane = self._locator.lanes[number % len(self._locator.lanes)]
            peer = self._lanes.peer(number, lane.metadata, max(0.01, until - time.monotonic()), self._stall)
            self._peers.append((peer, lane))
            self._load.append(0)
            slot = self._landing // self._lanes.slot_bytes
            start, size = slot * self._lanes.slot_bytes, self._lanes.reserved[slot]
            if self._landing + self._landing_size > start + size:
                raise invalid(
                    f"{self._landing_size} bytes at {self._landing} are not in one slot that has taken memory"
                )
            if peer.helper.registered.get(start, 0) < size:
                self._register(peer, start, size)

    def _register(self, peer: Peer, start: int, size: int) -> None:
        try:
            peer.helper.register(start, size)
        except CkptEngineError:
            peer.failed = True
            raise

    def read(self, runs: Sequence[ByteRun]) -> UcxTicket:
        """See Link. Adjacent runs travel as one."""
        self._alive()
        for run in runs:
            if min(run) < 0 or run.remote + run.length > self._region.size:
                raise invalid(f"{run.length} bytes at {run.remote} are not in a region of {self._region.size}")
            if run.local + run.length > self._landing_size:
                raise invalid(f"{run.length} bytes at {run.local} are not in a landing of {self._landing_size}")
        beyond, first = self._locator.offset, self._landing
        slot_runs = ((beyond + run.remote, first + run.local, run.length) for run in runs if run.length)
        if not self._waiting:
            self._moved = time.monotonic()
        pending: dict[tuple[int, int], int] = {}
        for size, request in c.in_requests(slot_runs, REQUEST_BYTES):
            number = min(range(len(self._peers)), key=self._load.__getitem__)
            peer, lane = self._peers[number]
            body = c.pack_runs([(lane.memory + remote, local, length) for remote, local, length in request])
            pending[number, peer.helper.ask(c.READ, 0, body)] = size
            self._load[number] += size
        self._waiting.update(pending)
        return UcxTicket(self, pending)

    def check(self) -> None:
        """See Link. Only `hold` asks the owner whether it lends the memory now."""
        self._alive()

    def hold(self, seconds: float) -> None:
        """Reads the slot's token from the owner's board, over every lane: then the owner lives and lends this memory.
        Waits for the answer no longer than `stall`.

        The owner does not learn of the read, so it does not wait for its end: bytes that it overwrites meanwhile do not
        hash here. Raises UNAVAILABLE, DEADLINE_EXCEEDED.
        """
        self._alive()
        until = time.monotonic() + min(seconds, self._stall)
        for peer, lane in self._peers:
            body = c.TOKEN.pack(lane.board, self._locator.token)
            try:
                peer.helper.wait(peer.helper.ask(c.CHECK, 0, body), max(0.01, until - time.monotonic()))
            except CkptEngineError as error:
                if error.problem.code == Problem.FAILED_PRECONDITION:
                    raise unavailable(error.problem.message) from error
                peer.failed = True
                raise

    def rest(self) -> None:
        """See LeasedLink. Nothing to do: the owner does not know of the hold."""

    def sever(self) -> None:
        """See Link. Kills the helpers that may still write."""
        self._severed = True
        peers, self._peers = self._peers, []
        for number, (peer, _) in enumerate(peers):
            self._lanes.release(peer, kill=any(lane == number for lane, _ in self._waiting))
        self._waiting.clear()

    def landed(self, pending: dict[tuple[int, int], int]) -> int:
        """Removes answered reads of this link from `pending`; returns their bytes. Raises what failed reads raise."""
        self._alive()
        done = 0
        for key in list(pending):
            peer, _ = self._peers[key[0]]
            try:
                answer = peer.helper.answer(key[1])
            except CkptEngineError:
                peer.failed = True
                raise
            if answer is not None:
                size = pending.pop(key)
                del self._waiting[key]
                self._load[key[0]] -= size
                self._moved = time.monotonic()
                done += size
        if pending and time.monotonic() > self._moved + self._stall:
            raise deadline(
                f"nothing arrived over UCX for {self._stall:g} s: the other relay has stopped, or the network is cut"
            )
        return done

    def _alive(self) -> None:
        if self._severed:
            raise unavailable("the link was severed")
        for peer, _ in self._peers:
            if peer.failed:
                raise unavailable("a read over UCX has failed, or its helper process was ended")
            if why := peer.helper.ended:
                peer.failed = True
                raise unavailable(why)


class UcxTicket:
    """See ReadTicket. pending: bytes by lane and number."""

    def __init__(self, link: UcxLink, pending: dict[tuple[int, int], int]) -> None:
        self._link = link
        self._pending = dict(pending)
        self._landed = 0

    def poll(self) -> int:
        """See ReadTicket."""
        self._landed += self._link.landed(self._pending)
        return self._landed
