"""Reading over transports that bring bytes: any `Fetcher` as the `Transport` that plans use.

Boxes are cut into runs of bytes that are contiguous at their owner. Runs are read into a ring of staging buffers, and
copied and cast from there while the next ones are in flight: fetched bytes never land directly in a parameter. A read
that fails, stalls or outlives the deadline severs every link before the error is raised, so nothing writes to staging
memory afterwards; the next `check` connects again. Reader's side, one thread.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from math import prod
from typing import NamedTuple

import torch

from ckpt_engine.copy.copying import TensorCopy
from ckpt_engine.copy.prepared import PreparedCopy
from ckpt_engine.core.dtypes import itemsize
from ckpt_engine.core.problems import CkptEngineError, data_loss, deadline, error, invalid, unavailable
from ckpt_engine.core.strides import span
from ckpt_engine.torch_dtypes import torch_dtype
from ckpt_engine.transport.base import (
    OPEN_SECONDS,
    Availability,
    ByteRun,
    CannotOpenError,
    Fetcher,
    LeasedLink,
    Link,
    Move,
    ReadTicket,
    source_of,
)
from ckpt_engine.transport.mapped import check_destination, span_of
from ckpt_engine.v1.weights_pb2 import Problem, Region

SLOT_BYTES = 16 << 20
"""The size of one staging buffer."""

SLOTS = 4
"""Staging buffers: one is copied from while the others are filled."""

RUN_BYTES = 64 << 10
"""Runs shorter than this are joined, if the gaps between them are small enough (_WASTE)."""

STALL_SECONDS = 60.0
"""How long nothing may arrive. Mostly the update's deadline comes first."""

_WASTE = 4
_ALIGNMENT = 64
_POLL_SECONDS = 50e-6
_TELL_SECONDS = 2e-3


class FetchedTransport:
    """A fetched transport as plans use it. One instance a worker."""

    def __init__(self, fetcher: Fetcher) -> None:
        self._fetcher = fetcher

    @property
    def name(self) -> str:
        """The transport's name, as in Region.transport."""
        return self._fetcher.name

    def availability(self) -> Availability:
        """What the fetcher says."""
        return self._fetcher.availability()

    def open(
        self, regions: Sequence[Region], seconds: float = OPEN_SECONDS, landing: torch.Tensor | None = None
    ) -> FetchedRegions:
        """Connects to the owner of each region. Raises what the fetcher raises, naming the source.

        landing: uint8[n], the memory to fill, if nothing is cast or laid out differently: bytes land there directly
        (`landing.py`), and there is no staging memory.
        """
        opened = FetchedRegions(self._fetcher, regions, seconds, landing)
        try:
            opened.connect()
        except BaseException:
            opened.close()
            raise
        return opened


class FetchedRegions:
    """OpenedRegions over links, by locator."""

    def __init__(
        self, fetcher: Fetcher, regions: Sequence[Region], seconds: float, landing: torch.Tensor | None = None
    ) -> None:
        self._fetcher = fetcher
        self._regions = {region.locator: region for region in regions}
        self._links: dict[bytes, Link] = {}
        self._seconds = seconds
        self.stages = landing is None
        if landing is None:
            landing = torch.zeros(SLOTS * SLOT_BYTES, dtype=torch.uint8, pin_memory=torch.cuda.is_initialized())
        self.landing = landing

    def connect(self) -> None:
        """Connects to owners without a link. Raises UNAVAILABLE, DATA_LOSS, DEADLINE_EXCEEDED."""
        stop_at = time.monotonic() + self._seconds
        for locator, region in self._regions.items():
            if locator in self._links:
                continue
            remaining = stop_at - time.monotonic()
            if remaining <= 0:
                raise deadline(f"{source_of(region)} could not be reached: others took all of {self._seconds:g} s")
            with Naming(region):
                self._links[locator] = self._fetcher.connect(region, self.landing, remaining)

    def prepare(self, moves: Sequence[Move]) -> FetchedCopy:
        """Checks every move and cuts it into runs. Raises INVALID_ARGUMENT."""
        if not self.stages:
            raise invalid("these regions were opened to land where they belong; nothing is staged")
        return FetchedCopy(self, moves)

    def check(self) -> None:
        """Raises unless every owner offers the memory that was published; a LeasedLink's owner is asked to keep it.
        Connects again, once, where a link was cut."""
        held = {locator for locator, link in self._links.items() if self._holds(locator, link)}
        for locator in self._links.keys() - held:
            self._links.pop(locator).sever()
        self.connect()
        for locator in self._links.keys() - held:
            with Naming(self._regions[locator]):
                _check(self._links[locator], self._seconds)

    def rest(self) -> None:
        """Lets owners write to their memory again. Abandoned reads must have been severed before."""
        for link in self._links.values():
            if isinstance(link, LeasedLink):
                link.rest()

    def _holds(self, locator: bytes, link: Link) -> bool:
        try:
            with Naming(self._regions[locator]):
                _check(link, self._seconds)
        except CkptEngineError as found:
            if found.problem.code != Problem.UNAVAILABLE:
                raise
            return False
        return True

    def offered(self) -> bool:
        """Whether every link holds."""
        try:
            for link in self._links.values():
                link.check()
        except CkptEngineError:
            return False
        return len(self._links) == len(self._regions)

    def close(self) -> None:
        """Ends every link. When it returns, nothing can land any more."""
        self.sever()
        self._regions = {}

    def sever(self) -> None:
        """Closes as `close` does, until the next `check`."""
        links, self._links = self._links, {}
        for link in links.values():
            link.sever()

    def link(self, region: Region) -> Link:
        """The link to a region's owner. Raises UNAVAILABLE if it was severed or never made."""
        found = self._links.get(region.locator)
        if found is None:
            raise unavailable(f"there is no connection to {source_of(region)} any more")
        return found


def _check(link: Link, seconds: float) -> None:
    link.check()
    if isinstance(link, LeasedLink):
        link.hold(seconds)


class _FetchedPiece(NamedTuple):
    """A part of a move that is read at once, and how it lies in staging memory."""

    region: Region
    destination: torch.Tensor
    dtype: torch.dtype
    offset: int  # bytes in the region
    length: int  # bytes of each run
    outer: tuple[tuple[int, int], ...]  # axes (extent, stride) with a run for each coordinate, slowest first
    stride: tuple[int, ...]  # elements, of the staged view

    @property
    def size(self) -> int:
        """Bytes of staging memory."""
        return self.length * prod(extent for extent, _ in self.outer)

    def runs(self, local: int) -> Iterator[ByteRun]:
        width = self.dtype.itemsize
        for number, place in enumerate(product(*(range(extent) for extent, _ in self.outer))):
            beyond = sum(i * step for i, (_, step) in zip(place, self.outer, strict=True))
            yield ByteRun(self.offset + beyond * width, local + number * self.length, self.length)

    def stage_view(self, landing: torch.Tensor, local: int) -> torch.Tensor:
        flat = landing[local : local + self.size].view(self.dtype)
        return flat.as_strided(self.destination.shape, self.stride)


class _FetchedBatch(NamedTuple):
    """The reads that fill one staging buffer, by region, and the copy out of it."""

    reads: list[tuple[Region, list[ByteRun]]]
    copy: PreparedCopy


class FetchedCopy:
    """PreparedCopy that reads into staging memory and copies from there."""

    notes: tuple[str, ...] = ()

    def __init__(self, regions: FetchedRegions, moves: Sequence[Move]) -> None:
        self._regions = regions
        self._batches: list[_FetchedBatch] = []
        self.bytes = sum(move.destination.nbytes for move in moves)
        waiting: list[tuple[_FetchedPiece, int]] = []
        used = 0
        for piece in (piece for move in moves for piece in _pieces_of(move)):
            if used + piece.size > SLOT_BYTES:
                self._pack(waiting)
                waiting, used = [], 0
            waiting.append((piece, used))
            used += -(-piece.size // _ALIGNMENT) * _ALIGNMENT
        if waiting:
            self._pack(waiting)

    def _pack(self, pieces: Sequence[tuple[_FetchedPiece, int]]) -> None:
        first = len(self._batches) % SLOTS * SLOT_BYTES
        reads: dict[bytes, tuple[Region, list[ByteRun]]] = {}
        for piece, local in pieces:
            reads.setdefault(piece.region.locator, (piece.region, []))[1].extend(piece.runs(first + local))
        landing = self._regions.landing
        copy = TensorCopy((piece.destination, piece.stage_view(landing, first + local)) for piece, local in pieces)
        self._batches.append(_FetchedBatch(list(reads.values()), copy))

    def run(self, on_bytes: Callable[[int], None] | None = None) -> int:
        """Writes every destination; see PreparedCopy. `on_bytes` is also called with 0 while nothing arrives."""
        flying: deque[tuple[_FetchedBatch, Reads]] = deque()
        waiting = iter(self._batches)
        try:
            while True:
                while len(flying) < SLOTS and (batch := next(waiting, None)) is not None:
                    flying.append((batch, Reads(self._regions, batch.reads, on_bytes)))
                if not flying:
                    return self.bytes
                finished = [reads.finished() for _, reads in flying]
                if finished[0]:
                    flying.popleft()[0].copy.run(on_bytes)
                else:
                    time.sleep(_POLL_SECONDS)
        except BaseException:
            self._regions.sever()
            raise


class Reads:
    """Reads of several regions that were begun together."""

    def __init__(
        self,
        regions: FetchedRegions,
        requests: Sequence[tuple[Region, Sequence[ByteRun]]],
        on_bytes: Callable[[int], None] | None = None,
    ) -> None:
        self._on_bytes = on_bytes
        self._tickets: list[tuple[Region, ReadTicket, int]] = []
        self._landed = 0
        self._moved = self._last_report = time.monotonic()
        for region, runs in requests:
            with Naming(region):
                self._tickets.append((region, regions.link(region).read(runs), sum(run.length for run in runs)))

    def finished(self) -> bool:
        """Whether all bytes have arrived. Raises what the links raise, DEADLINE_EXCEEDED after STALL_SECONDS without
        any."""
        landed = 0
        unfinished: Region | None = None
        for region, ticket, expected in self._tickets:
            with Naming(region):
                found = ticket.poll()
                if found > expected:
                    raise data_loss(f"{found} bytes came of {expected} that were asked for")
            landed += found
            unfinished = region if found < expected else unfinished
        now = time.monotonic()
        if landed != self._landed:
            self._landed, self._moved = landed, now
        if unfinished is None:
            return True
        if now > self._moved + STALL_SECONDS:
            raise deadline(f"nothing came of {source_of(unfinished)} for {STALL_SECONDS:g} s")
        if self._on_bytes is not None and now > self._last_report + _TELL_SECONDS:
            self._last_report = now
            self._on_bytes(0)
        return False


class Naming:
    """A context that adds the source's name to errors raised in it."""

    def __init__(self, region: Region) -> None:
        self._region = region

    def __enter__(self) -> None:
        return None

    def __exit__(self, _: object, raised: BaseException | None, __: object) -> None:
        name = source_of(self._region)
        if isinstance(raised, CannotOpenError) and name not in raised.problem.message:
            raise CannotOpenError(f"{name}: {raised.problem.message}", raised.region) from raised
        if isinstance(raised, CkptEngineError) and name not in raised.problem.message:
            raise error(raised.problem.code, f"{name}: {raised.problem.message}") from raised


def _pieces_of(move: Move) -> Iterator[_FetchedPiece]:
    """A move in pieces that each fit a staging buffer. Raises INVALID_ARGUMENT if it does not fit its region or its
    destination."""
    check_destination(move)
    dtype = move.stored or move.dtype
    if span_of(move.region.size, move.offset, move.shape, move.stride, itemsize(dtype)):
        yield from _cut(move.region, move.destination.detach(), torch_dtype(dtype), move.offset, tuple(move.stride))


def _cut(
    region: Region, destination: torch.Tensor, dtype: torch.dtype, offset: int, stride: tuple[int, ...]
) -> Iterator[_FetchedPiece]:
    """Halves along the slowest axis until it fits."""
    shape = tuple(destination.shape)
    axes = sorted((axis for axis, extent in enumerate(shape) if extent > 1), key=lambda axis: -stride[axis])
    inner = _in_one_run(shape, stride, axes, dtype.itemsize)
    outer = axes[: len(axes) - inner]
    in_run = axes[len(axes) - inner :]
    length = span([shape[axis] for axis in in_run], [stride[axis] for axis in in_run])
    if length * dtype.itemsize * prod(shape[axis] for axis in outer) > SLOT_BYTES:
        middle = shape[axes[0]] // 2
        low, high = destination.split([middle, shape[axes[0]] - middle], axes[0])
        yield from _cut(region, low, dtype, offset, stride)
        yield from _cut(region, high, dtype, offset + middle * stride[axes[0]] * dtype.itemsize, stride)
        return
    staged = list(stride)
    step = length
    for axis in reversed(outer):
        staged[axis] = step
        step *= shape[axis]
    counted = tuple((shape[axis], stride[axis]) for axis in outer)
    yield _FetchedPiece(region, destination, dtype, offset, length * dtype.itemsize, counted, tuple(staged))


def _in_one_run(shape: Sequence[int], stride: Sequence[int], axes: Sequence[int], width: int) -> int:
    """How many of the fastest axes one run covers: dense ones, and where runs would be short also some with gaps, which
    are read too."""
    run = useful = 1
    for number, axis in enumerate(reversed(axes)):
        wider = run + (shape[axis] - 1) * stride[axis]
        more = useful * shape[axis]
        worth = run * width < RUN_BYTES and wider <= _WASTE * more
        if wider > more and not worth:
            return number
        run, useful = wider, more
    return len(axes)
