"""Copies from pageable host memory to a GPU, through a ring of pinned buffers.

The driver moves pageable memory at a sixth of the link's speed, through one small buffer of its own. Here several
threads fill pinned buffers, while the GPU reads full ones: files come at the speed of the page cache. It is for memory
that cannot be pinned where it lies; see `transport/mapped.py` for memory that can.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, Protocol

import torch

from ckpt_engine.copy.device_work import DeviceWork, Pair, Segment
from ckpt_engine.copy.host_copy import Work, host_work

SLOT_BYTES = 16 << 20
"""Bytes of one buffer: 1.5 ms of a thread's copying, 0.3 ms of the link's."""

SLOTS = 24
"""Buffers of a process, so that every thread has one to fill and the GPU some to read."""

THREADS_LIMIT = 16
"""A thread fills at 5 GB/s, rows of a matrix at half of that; PCIe 5 takes 55."""

_ALIGNMENT = 64


class Flight(Protocol):
    """Queues segments and knows which have arrived; see device_copy.py."""

    def queue(self, segment: Segment) -> int:
        """Queues a segment; returns its number, counted from 1."""
        ...

    def arrived(self) -> int:
        """The number of the last segment that has arrived; reports progress and keeps the deadline."""
        ...

    def pause(self) -> None:
        """Sleeps for as long as polling should."""
        ...


class _StagedBatch(NamedTuple):
    fill: list[Work]
    work: DeviceWork


class StagedFeed:
    """Pairs (destination on `device`, source in pageable memory), cut and packed into buffers."""

    def __init__(self, pairs: Iterable[Pair], device: torch.device) -> None:
        self._ring = _ring(device)
        self._batches: list[_StagedBatch] = []
        waiting: list[Pair] = []
        room = SLOT_BYTES
        for pair in (part for whole in pairs for part in _parts(*whole)):
            size = _packed(pair[1])
            if size > room:
                self._pack(waiting, device)
                waiting, room = [], SLOT_BYTES
            waiting.append(pair)
            room -= size
        if waiting:
            self._pack(waiting, device)
        self.bytes = sum(batch.work.bytes for batch in self._batches)
        self.launches = sum(batch.work.launches for batch in self._batches)
        self.engine_copies = sum(batch.work.engine_copies for batch in self._batches)

    def _pack(self, pairs: Sequence[Pair], device: torch.device) -> None:
        slot = self._ring.slots[len(self._batches) % SLOTS]
        first = 0
        filled: list[Pair] = []
        taken: list[Pair] = []
        for destination, source in pairs:
            place = slot[first : first + source.nbytes].view(source.dtype).view(source.shape)
            filled.append((place, source))
            taken.append((destination, place))
            first += _packed(source)
        self._batches.append(_StagedBatch(host_work(filled), DeviceWork(taken, device)))

    def run(self, flight: Flight) -> None:
        """Fills and queues everything; segments may still be in flight when it returns. Raises what filling or `flight`
        raises, and leaves no thread behind."""
        threads = min(THREADS_LIMIT, len(os.sched_getaffinity(0)), max(1, len(self._batches)))
        pool = ThreadPoolExecutor(threads, thread_name_prefix="ckpt-engine staging")
        fills: list[Future[None]] = []
        tickets: list[int] = []
        try:
            for number, batch in enumerate(self._batches):
                while True:
                    arrived = flight.arrived()
                    while len(fills) < len(self._batches) and self._is_free(len(fills), tickets, arrived):
                        fills.append(pool.submit(_fill, self._batches[len(fills)].fill))
                    if len(fills) > number and fills[number].done():
                        break
                    flight.pause()
                fills[number].result()
                tickets.append([flight.queue(segment) for segment in batch.work.segments][-1])
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _is_free(self, number: int, tickets: Sequence[int], arrived: int) -> bool:
        """Whether the buffer of batch `number` may be filled: its former content has arrived."""
        before = number - SLOTS
        return before < 0 or (before < len(tickets) and tickets[before] <= arrived)


class _Ring:
    """The pinned buffers of one process for one GPU. Uninitialised memory."""

    def __init__(self) -> None:
        self.slots = [torch.empty(SLOT_BYTES, dtype=torch.uint8, pin_memory=_pins()) for _ in range(SLOTS)]


_rings: weakref.WeakValueDictionary[str, _Ring] = weakref.WeakValueDictionary()


def _ring(device: torch.device) -> _Ring:
    ring = _rings.get(str(device))
    if ring is None:
        ring = _rings[str(device)] = _Ring()
    return ring


def _pins() -> bool:
    return torch.cuda.is_available()


def _fill(work: Sequence[Work]) -> None:
    with torch.inference_mode():
        for each in work:
            each.copy()


def _packed(source: torch.Tensor) -> int:
    return -(-source.nbytes // _ALIGNMENT) * _ALIGNMENT


def _parts(destination: torch.Tensor, source: torch.Tensor) -> Iterable[Pair]:
    """The pair in parts that fit a buffer."""
    if _packed(source) <= SLOT_BYTES:
        return [(destination, source)]
    axis = next(axis for axis, extent in enumerate(source.shape) if extent > 1)
    rows = SLOT_BYTES * source.shape[axis] // source.nbytes
    if rows:
        return list(zip(torch.split(destination, rows, axis), torch.split(source, rows, axis), strict=True))
    rows_of_both = zip(destination.unbind(axis), source.unbind(axis), strict=True)
    return [part for pair in rows_of_both for part in _parts(*pair)]
