"""How a relay reads from relays of other hosts over TCP. Each region has a link; the links to regions of one slot share
the connections to that slot."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import torch

from ckpt_engine.addresses import split_address
from ckpt_engine.core.problems import CkptEngineError, deadline, invalid, unavailable
from ckpt_engine.transport.base import Availability, ByteRun
from ckpt_engine.transport.locator import locator_of
from ckpt_engine.transport.tcp import connection, wire
from ckpt_engine.transport.tcp.connection import Lane, OwnerRequest
from ckpt_engine.transport.tcp.kind import NAME
from ckpt_engine.v1.relay_pb2 import TcpLocator
from ckpt_engine.v1.weights_pb2 import Region

REQUEST_BYTES = 8 << 20
"""About how many bytes one request asks for at most; several requests are in flight at any time."""


class SlotConnections:
    """The connections to one slot of one owner. Used on one thread."""

    def __init__(self, locator: TcpLocator, owner: str, seconds: float) -> None:
        self.owner = owner  # as error messages name it
        self.links: set[TcpLink] = set()
        self._holding: set[TcpLink] = set()
        self._lending = b""
        self._lanes: list[Lane] = []
        self._closed = False
        stop_at = time.monotonic() + seconds
        try:
            for _ in range(connection.LANES):
                self._lanes.append(Lane(locator, owner, stop_at))
        except BaseException:
            self.close()
            raise

    def check(self) -> None:
        """Raises UNAVAILABLE if one of the connections was lost."""
        if self._closed:
            raise unavailable(f"the connection to {self.owner} was severed")
        for lane in self._lanes:
            lane.check()

    def hold(self, link: TcpLink, seconds: float) -> None:
        """Asks the owner to lend the slot, once for all links that read it."""
        self.check()
        if not self._holding:
            request = OwnerRequest(wire.question(wire.HOLD))
            self._lanes[0].ask(request)
            if not request.finished.wait(seconds):
                self.close()
                raise deadline(f"{self.owner} did not say within {seconds:.3g} s whether its slot can be read")
            if request.problem is not None:
                raise request.problem
            if len(request.answer) != wire.LENDING_BYTES:
                raise unavailable(
                    f"{self.owner} sent an unknown answer to the request to lend its slot: run one release on all hosts"
                )
            self._lending = request.answer
        self._holding.add(link)

    def rest(self, link: TcpLink) -> None:
        """Ends a link's hold. Once no link has one, the owner may fill the slot again."""
        self._holding.discard(link)
        if not self._holding and self._lending:
            self._lending = b""
            self._lanes[0].ask(OwnerRequest(wire.question(wire.RELEASE), expects_answer=False))

    def read(self, runs: Sequence[tuple[int, int]], landing: Sequence[memoryview]) -> list[OwnerRequest]:
        """Requests runs of the slot over the least busy connection. landing: the memory for each run."""
        if not self._lending:
            raise unavailable(f"{self.owner} does not lend its slot to this relay now, so it cannot be read")
        found = []
        for first, last in _requests(runs):
            request = OwnerRequest(wire.question(wire.READ, self._lending, runs[first:last]), landing[first:last])
            lane = min(self._lanes, key=lambda each: each.waiting)
            lane.waiting += sum(length for _, length in runs[first:last])
            lane.ask(request)
            found.append(request)
        if all(lane.waiting for lane in self._lanes):  # only the difference counts
            least = min(lane.waiting for lane in self._lanes)
            for lane in self._lanes:
                lane.waiting -= least
        return found

    def leave(self, link: TcpLink) -> None:
        """Removes a link; with the last one the connections are closed."""
        self.rest(link)
        self.links.discard(link)
        if not self.links:
            self.close()

    def close(self) -> None:
        """Ends every connection. When it returns, nothing can land any more. May be repeated."""
        self._closed = True
        for lane in self._lanes:
            lane.shut()
        for lane in self._lanes:
            lane.join()


class TcpTicket:
    """The requests of one `read`. See ReadTicket."""

    def __init__(self, requests: Sequence[OwnerRequest]) -> None:
        self._requests = requests

    @property
    def is_over(self) -> bool:
        """Whether no more bytes of it can land."""
        return all(each.finished.is_set() for each in self._requests)

    def poll(self) -> int:
        """Bytes that have landed. Raises the problem of a request that has failed."""
        for each in self._requests:
            if each.problem is not None:
                raise each.problem
        return sum(each.landed for each in self._requests)


class TcpLink:
    """The link to one region, which is a part of a slot."""

    def __init__(self, lanes: SlotConnections, locator: TcpLocator, size: int, landing: torch.Tensor) -> None:
        self._lanes = lanes
        self._first = locator.offset
        self._size = size
        self._landing = landing.numpy().data
        self._tickets: list[TcpTicket] = []
        self._severed = False
        lanes.links.add(self)

    def read(self, runs: Sequence[ByteRun]) -> TcpTicket:
        """See Link. Raises INVALID_ARGUMENT for runs that do not lie in the region, or in the landing memory."""
        for run in runs:
            if not (0 < run.length <= wire.MOST_BYTES and run.remote >= 0 and run.remote + run.length <= self._size):
                raise invalid(f"{run.length} bytes at {run.remote} are not within the region of {self._size} bytes")
            if run.local < 0 or run.local + run.length > len(self._landing):
                raise invalid(
                    f"{run.length} bytes at {run.local} are not within the {len(self._landing)} bytes that they land in"
                )
        self._check_open()
        slot_runs = [(self._first + run.remote, run.length) for run in runs]
        landing = [self._landing[run.local : run.local + run.length] for run in runs]
        self._tickets = [ticket for ticket in self._tickets if not ticket.is_over]
        self._tickets.append(TcpTicket(self._lanes.read(slot_runs, landing)))
        return self._tickets[-1]

    def check(self) -> None:
        """See Link."""
        self._check_open()
        self._lanes.check()

    def hold(self, seconds: float) -> None:
        """See LeasedLink."""
        self._check_open()
        self._lanes.hold(self, min(seconds, connection.ASK_SECONDS))

    def rest(self) -> None:
        """See LeasedLink."""
        self._lanes.rest(self)

    def sever(self) -> None:
        """See Link. If bytes may still land, ends the connections, also for other links."""
        if self._severed:
            return
        self._severed = True
        if not all(ticket.is_over for ticket in self._tickets):
            self._lanes.close()
        self._lanes.leave(self)

    def _check_open(self) -> None:
        if self._severed:
            raise unavailable(f"the link to {self._lanes.owner} was severed")


class TcpFetcher:
    """Connects to relays of other hosts. One instance a relay; one thread."""

    name = NAME

    def __init__(self) -> None:
        self._lanes: dict[bytes, SlotConnections] = {}
        self._lock = threading.Lock()

    def availability(self) -> Availability:
        """Always: every host has sockets."""
        return Availability(True, "plain sockets, encrypted where relays have certificates")

    def connect(self, region: Region, landing: torch.Tensor, seconds: float) -> TcpLink:
        """See Fetcher. Links to one slot share their connections."""
        locator = read_locator(region)
        key = TcpLocator(
            addresses=locator.addresses,
            arena=locator.arena,
            slot=locator.slot,
            token=locator.token,
            certificate=locator.certificate,
        ).SerializeToString(deterministic=True)
        with self._lock:
            self._lanes = {name: lanes for name, lanes in self._lanes.items() if _is_up(lanes)}
            if key not in self._lanes:
                owner = f"the relay at {' or '.join(locator.addresses)}"
                self._lanes[key] = SlotConnections(locator, owner, min(seconds, connection.ASK_SECONDS))
            return TcpLink(self._lanes[key], locator, region.size, landing)


def read_locator(region: Region) -> TcpLocator:
    """The region's locator. Raises INVALID_ARGUMENT for an inconsistent one."""
    locator = locator_of(region, NAME, TcpLocator)
    if not 1 <= len(locator.addresses) <= 8:
        raise invalid(f"the locator of region {region.id} has {len(locator.addresses)} addresses, not 1 to 8")
    for address in locator.addresses:
        split_address(address)
    if len(locator.arena) != wire.ARENA_BYTES or len(locator.token) != wire.TOKEN_BYTES:
        raise invalid(f"the locator of region {region.id} names no memory of a relay, or has no token")
    if len(locator.certificate) not in (0, 32):
        raise invalid(
            f"the locator of region {region.id} has {len(locator.certificate)} bytes of certificate digest, not 32"
        )
    return locator


def _is_up(lanes: SlotConnections) -> bool:
    try:
        lanes.check()
    except CkptEngineError:
        return False
    return bool(lanes.links)


def _requests(runs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """For each request, the range [first, last) of the runs that it asks for."""
    found, first, size = [], 0, 0
    for index, (_, length) in enumerate(runs):
        full = size and (size + length > REQUEST_BYTES or index - first == wire.MOST_RUNS)
        if full:
            found.append((first, index))
            first, size = index, 0
        size += length
    if first < len(runs):
        found.append((first, len(runs)))
    return found
