"""Copies into GPU memory, or out of it to pinned memory: prepared once, replayed in few launches, waited for by
events.

A copy runs on a stream of its own, after the work that is queued on the current stream, and nothing synchronises the
device: the thread polls events, and reports progress and keeps the deadline in between. Only a few segments are in
flight at a time, so that a copy can be stopped. Reader's side, one thread.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from functools import cache

import torch

from ckpt_engine.copy import background, copy_kernel
from ckpt_engine.copy.device_work import DeviceWork, Pair, Segment
from ckpt_engine.copy.staging import StagedFeed
from ckpt_engine.core.problems import internal

log = logging.getLogger(__name__)

IN_FLIGHT = 3
"""Segments queued at a time: the next one is there when one ends."""

DRAIN_SECONDS = 10.0
"""How long a stopped copy waits for segments in flight. They take milliseconds unless a GPU hangs."""

_POLL_SECONDS = 20e-6
_TELL_SECONDS = 2e-3


class DeviceCopy:
    """PreparedCopy of pairs (destination, source) with destinations on GPUs.

    Sources: on the same GPU, on a peer GPU that this one can reach, in pinned or in pageable host memory. Any strides.
    A destination may also be pinned host memory, if its source is on a GPU, which then copies. Elements of one dtype
    arrive bit by bit, others are cast as torch casts. launches: kernels an update; engine_copies: copies by the GPU's
    copy engines. notes: what is slower than it could be, and why.
    """

    def __init__(self, pairs: Iterable[Pair]) -> None:
        groups: dict[torch.device, tuple[list[Pair], list[Pair]]] = defaultdict(lambda: ([], []))
        for whole_destination, whole_source in pairs:
            destination, source = whole_destination.detach(), whole_source.detach()
            if destination.numel():
                pageable = source.device.type == "cpu" and not source.is_pinned()
                device = destination.device if destination.device.type == "cuda" else source.device
                groups[device][pageable].append((destination, source))
        self._parts = [_GpuCopy(device, *group) for device, group in groups.items()]
        self.bytes = sum(part.bytes for part in self._parts)
        self.launches = sum(part.launches for part in self._parts)
        self.engine_copies = sum(part.engine_copies for part in self._parts)
        self.notes: tuple[str, ...] = ()
        if self._parts and copy_kernel.problem():
            self.notes = (f"copies are made one by one: {copy_kernel.problem()}",)

    def run(self, on_bytes: Callable[[int], None] | None = None) -> int:
        """Writes every destination; see PreparedCopy. `on_bytes` is also called with 0 while nothing arrives."""
        with torch.inference_mode():
            for part in self._parts:
                part.run(on_bytes)
        return self.bytes

    def queue(self) -> QueuedCopies | None:
        """See QueueableCopy. None if a source is in pageable memory."""
        if not all(part.is_queueable for part in self._parts):
            return None
        queued = QueuedCopies()
        try:
            with torch.inference_mode():
                for part in self._parts:
                    part.queue(queued)
        except BaseException:
            queued.drain()
            raise
        return queued


class QueuedCopies:
    """Queued copies, with an event at the end of each stream's. See Queued."""

    def __init__(self) -> None:
        self._streams: list[torch.cuda.Stream] = []
        self._ends: list[torch.cuda.Event] = []

    def add(self, stream: torch.cuda.Stream, segments: Sequence[Segment]) -> None:
        """Queues segments on a stream, which is torch's current one."""
        self._streams.append(stream)
        for segment in segments:
            segment.queue(stream.cuda_stream)
        end = torch.cuda.Event()
        end.record(stream)
        self._ends.append(end)

    def finished(self) -> bool:
        """Whether all of them have arrived."""
        return all(end.query() for end in self._ends)

    def drain(self) -> None:
        """Waits until no copy is in flight: then memory may be freed. Raises INTERNAL if a GPU does not end."""
        for stream in self._streams:
            _drain(stream)


def _stream(device: int) -> torch.cuda.Stream:
    """The stream of a GPU's copies: one, so that copies arrive in the order in which they are queued; another one for
    those in the background."""
    return _made_stream(device, background.is_background())


@cache
def _made_stream(device: int, gives_way: bool) -> torch.cuda.Stream:
    """A stream. Its priority is above that of digests of the same process, unless it gives way."""
    return torch.cuda.Stream(device, priority=0 if gives_way else -1)


class _GpuCopy:
    """The pairs that one GPU copies."""

    def __init__(self, device: torch.device, direct: list[Pair], pageable: list[Pair]) -> None:
        self._device = device
        with torch.cuda.device(device):
            self._work = DeviceWork(direct, device)
            self._feed = StagedFeed(pageable, device) if pageable else None
            # Tables were copied, and kernels loaded, on the current stream.
            torch.cuda.current_stream(device).synchronize()
        works = (self._work,) if self._feed is None else (self._work, self._feed)
        self.bytes = sum(work.bytes for work in works)
        self.launches = sum(work.launches for work in works)
        self.engine_copies = sum(work.engine_copies for work in works)

    @property
    def is_queueable(self) -> bool:
        return self._feed is None

    def queue(self, queued: QueuedCopies) -> None:
        with torch.cuda.device(self._device):
            stream = _stream(self._device.index)
            stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(stream):
                queued.add(stream, self._work.segments)

    def run(self, on_bytes: Callable[[int], None] | None) -> None:
        with torch.cuda.device(self._device):
            stream = _stream(self._device.index)
            stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(stream):
                flight = _StreamFlight(stream, on_bytes)
                try:
                    for segment in self._work.segments:
                        flight.queue(segment)
                    if self._feed is not None:
                        self._feed.run(flight)
                    flight.wait(0)
                except BaseException:
                    _drain(stream)
                    raise


class _StreamFlight:
    """Segments on their way on one stream; see staging.Flight."""

    def __init__(self, stream: torch.cuda.Stream, on_bytes: Callable[[int], None] | None) -> None:
        self._stream = stream
        self._on_bytes = on_bytes
        self._flying: deque[tuple[torch.cuda.Event, int]] = deque()
        self._queued = self._arrived = 0
        self._last_report = time.monotonic()

    def queue(self, segment: Segment) -> int:
        self.wait((background.IN_FLIGHT if background.is_background() else IN_FLIGHT) - 1)
        segment.queue(self._stream.cuda_stream)
        event = torch.cuda.Event()
        event.record(self._stream)
        self._flying.append((event, segment.bytes))
        self._queued += 1
        return self._queued

    def arrived(self) -> int:
        size = 0
        while self._flying and self._flying[0][0].query():
            size += self._flying.popleft()[1]
            self._arrived += 1
        now = time.monotonic()
        if self._on_bytes is not None and (size or now > self._last_report + _TELL_SECONDS):
            self._last_report = now
            self._on_bytes(size)
        return self._arrived

    def pause(self) -> None:
        _pause()

    def wait(self, most: int) -> None:
        """Waits until at most so many segments are in flight."""
        self.arrived()
        while len(self._flying) > most:
            self.pause()
            self.arrived()


def _drain(stream: torch.cuda.Stream) -> None:
    """Waits until no copy is in flight: then memory may be freed. Raises INTERNAL if the GPU does not end."""
    stop_at = time.monotonic() + DRAIN_SECONDS
    try:
        event = torch.cuda.Event()
        event.record(stream)
        while not event.query():
            if time.monotonic() > stop_at:
                raise internal(f"a copy that was stopped still runs on its GPU after {DRAIN_SECONDS:g} s")
            _pause()
    except RuntimeError:
        log.exception("ckpt-engine: this process's GPU is broken; nothing is on its way any more")


def _pause() -> None:
    time.sleep(background.POLL_SECONDS if background.is_background() else _POLL_SECONDS)
