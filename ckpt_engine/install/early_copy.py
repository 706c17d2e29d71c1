"""Brings what a plan reads into a worker's stage memory, and verifies it there, while the engine generates.

It decides which needs are brought early, on a thread of its own, and says when all of them are there. It writes to no
tensor of the model: an install copies from stage memory as from one more source, and proves what it wrote.

What is slowest to bring goes first, if there is not room for all: files, then memory of the host, then another GPU's.
What lies on the worker's own GPU, comes by a collective, or is handed to the engine's loader, is read in the pause. The
engine's thread calls all of it; the thread in between ends before anything else uses sources, plans or stage memory.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field

import torch

from ckpt_engine.copy.background import in_background
from ckpt_engine.copy.prepared import PreparedCopy
from ckpt_engine.core.boxes import Box, inside
from ckpt_engine.core.names import some
from ckpt_engine.core.problems import CkptEngineError, aborted, data_loss, deadline, internal
from ckpt_engine.core.transports import FILES, GPU_MEMORY, is_collective, memory_of
from ckpt_engine.cuda.driver import CudaDriverError, driver
from ckpt_engine.cuda.elsewhere import lies_elsewhere
from ckpt_engine.digest.prepared import PreparedDigests, prepare_digests
from ckpt_engine.install.resolve import PieceRead, Resolved
from ckpt_engine.install.stage_memory import StageMemory
from ckpt_engine.torch_dtypes import torch_dtype
from ckpt_engine.trace import trace
from ckpt_engine.transport.base import Move, OpenedRegions, Viewable
from ckpt_engine.v1 import worker_pb2

log = logging.getLogger(__name__)

Tell = Callable[[worker_pb2.WorkerEarly], bool]
"""Tells the agent how far it is, and returns whether to go on. Any thread."""

BATCH_BYTES = 1 << 30
"""Bytes that are brought and then digested together: a digest of them takes a GPU 0.4 ms."""

TELL_SECONDS = 0.2

_ALIGNMENT = 256


@dataclass
class Batch:
    """Needs that are brought together."""

    copies: list[PreparedCopy]
    needs: list[int]
    digests: PreparedDigests

    def bring(self, on_bytes: Callable[[int], None]) -> None:
        """Brings them, and begins to digest them as they lie in stage memory."""
        for copy in self.copies:
            copy.run(on_bytes)
        self.digests.launch()

    def wrong(self, expected: Sequence[int]) -> list[int]:
        """Waits for the digests; returns the needs with one that differs from `expected`."""
        values = zip(self.needs, self.digests.collect(), strict=True)
        return [need for need, value in values if value != expected[need]]


@dataclass
class EarlyLayout:
    """Where in stage memory one plan's needs lie."""

    memory: torch.Tensor  # the stage memory that `places` are of
    reads: dict[int, list[PieceRead]]  # by need: its pieces, each once
    places: dict[int, torch.Tensor] = field(default_factory=dict)  # by need: contiguous, in global axis order
    bytes: int = 0  # of `places`
    by_transport: dict[str, int] = field(default_factory=dict)  # bytes that are brought early
    whole: bool = True  # nothing of the plan is left to be read in the pause
    batches: list[Batch] | None = None  # made by the thread that brings them first
    seconds: float = 0.0  # that the last version took

    def make_batches(
        self, resolved: Resolved, opened: Mapping[str, OpenedRegions], on_bytes: Callable[[int], None]
    ) -> list[Batch]:
        """Prepares all copies and digests, unless that was done. The first time pins what is read. on_bytes: called
        with 0 before each batch; what it raises ends the work."""
        if self.batches is None:
            batches = []
            for needs in self._groups():
                on_bytes(0)
                batches.append(self._batch(needs, resolved, opened))
            self.batches = batches
        return self.batches

    def _groups(self) -> Iterator[list[int]]:
        group: list[int] = []
        size = 0
        for need, place in self.places.items():
            if group and size + place.nbytes > BATCH_BYTES:
                yield group
                group, size = [], 0
            group.append(need)
            size += place.nbytes
        if group:
            yield group

    def _batch(self, needs: list[int], resolved: Resolved, opened: Mapping[str, OpenedRegions]) -> Batch:
        moves: dict[str, list[Move]] = {}
        for need in needs:
            box = resolved.recording.needs[need].box
            for read in self.reads[need]:
                moves.setdefault(read.transport, []).append(_move(read, self.places[need], box))
        copies = [opened[name].prepare(some_moves) for name, some_moves in moves.items()]
        boxes = [(self.places[need], resolved.recording.needs[need].box.start) for need in needs]
        return Batch(copies, needs, prepare_digests(boxes))


def lay_out(resolved: Resolved, opened: Mapping[str, OpenedRegions], stage: StageMemory) -> EarlyLayout | None:
    """Places what is worth bringing early in stage memory, for which it takes memory if need be. None: nothing is."""
    reads = _reads(resolved)
    nearness = _Nearness(opened, stage.device)
    worth = sorted(
        (-rank, need) for need, pieces in reads.items() if (rank := max(map(nearness.of, pieces))) and pieces
    )
    sizes = {need: _bytes(resolved, need) for _, need in worth}
    memory = stage.provide(sum(_aligned(size) for size in sizes.values()))
    if memory is None:
        return None
    layout = EarlyLayout(memory, reads)
    end = 0
    for _, need in worth:
        if end + sizes[need] > memory.numel():
            continue
        box = resolved.recording.needs[need].box
        dtype = torch_dtype(resolved.recording.manifest.tensors[resolved.recording.needs[need].tensor].dtype)
        layout.places[need] = memory[end : end + sizes[need]].view(dtype).view(box.shape)
        end += _aligned(sizes[need])
        layout.bytes += sizes[need]
        for read in reads[need]:
            size = layout.by_transport.get(read.transport, 0)
            layout.by_transport[read.transport] = size + read.box.volume * dtype.itemsize
    read_later = {read.need for work in (*resolved.work.values(), *resolved.handed.values()) for read in work.reads}
    layout.whole = read_later <= layout.places.keys()
    return layout if layout.places else None


def _reads(resolved: Resolved) -> dict[int, list[PieceRead]]:
    """By need, its pieces, each once, however often the model keeps it; without what is read in the pause anyhow."""
    found: dict[int, dict[Box, PieceRead]] = {}
    for work in resolved.work.values():
        for read in work.reads:
            found.setdefault(read.need, {}).setdefault(read.box, read)
    handed = {read.need for work in resolved.handed.values() for read in work.reads}
    return {
        need: list(pieces.values())
        for need, pieces in found.items()
        if need not in handed and not any(is_collective(read.transport) for read in pieces.values())
    }


def _bytes(resolved: Resolved, need: int) -> int:
    box = resolved.recording.needs[need]
    return box.box.volume * torch_dtype(resolved.recording.manifest.tensors[box.tensor].dtype).itemsize


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _move(read: PieceRead, place: torch.Tensor, box: Box) -> Move:
    shape = read.destination.shape
    return Move(read.region, read.offset, shape, read.stride, read.dtype, place[inside(read.box, box)], read.stored)


class _Nearness:
    """How slowly a piece comes: 3 files and networks, 2 memory of the host, 1 another GPU, 0 the worker's own."""

    def __init__(self, opened: Mapping[str, OpenedRegions], device: torch.device) -> None:
        self._opened = opened
        self._device = device
        self._known: dict[tuple[str, bytes], int] = {}

    def of(self, read: PieceRead) -> int:
        key = read.transport, read.region.locator
        if key not in self._known:
            self._known[key] = self._look(read)
        return self._known[key]

    def _look(self, read: PieceRead) -> int:
        opened = self._opened[read.transport]
        memory = memory_of(read.transport)
        if memory == {FILES} or not isinstance(opened, Viewable):
            return 3
        if memory != {GPU_MEMORY} or self._device.type != "cuda":
            return 2
        address = opened.view(
            read.region, read.offset, read.destination.shape, read.stride, read.stored or read.dtype
        ).data_ptr()
        try:
            near = not lies_elsewhere(address) and driver().device_of(address) == self._device.index
        except CudaDriverError:
            return 1
        return 0 if near else 1


@dataclass(frozen=True)
class EarlyVersion:
    """What is to lie in stage memory: one version, by one plan."""

    key: tuple[bytes, bytes]  # digest of the plan, and the serialised digests of its needs
    layout: EarlyLayout
    resolved: Resolved
    opened: Mapping[str, OpenedRegions]
    rest: Callable[[], None]  # ends reading from the plan's sources
    expected: Sequence[int]  # digests of the needs, by number


class EarlyCopies:
    """One worker's early copies: at most one version lies in stage memory, or is on its way there."""

    def __init__(self, stage: StageMemory) -> None:
        self._stage = stage
        self._key: tuple[bytes, bytes] | None = None  # plan and digests of what lies there verified
        self._layout: EarlyLayout | None = None  # of `_key`
        self._run: _EarlyRun | None = None
        self._stream: torch.cuda.Stream | None = None

    @property
    def stages(self) -> bool:
        """Whether this worker is to bring anything early."""
        return self._stage.is_configured

    @property
    def words(self) -> str:
        """How much stage memory there is, for people; empty if there is to be none."""
        return self._stage.words

    @property
    def note(self) -> str:
        """Why less is brought early than could be; empty: it is not."""
        return self._stage.note

    def lay_out(
        self, before: EarlyLayout | None, resolved: Resolved, opened: Mapping[str, OpenedRegions]
    ) -> EarlyLayout | None:
        """The layout of a plan; `before`, if that is still right."""
        if not self.stages:
            return None
        if before is not None and before.memory is self._stage.bytes:
            return before
        return lay_out(resolved, opened, self._stage)

    def begin(self, order: worker_pb2.ReadyOrder, version: EarlyVersion, tell: Tell) -> None:
        """Starts to bring a version, unless it lies there; its end is told in any case. Only after `stop`."""
        lies_there = version.key == self._key
        if not lies_there:
            self._key, self._layout = None, version.layout
        self._run = _EarlyRun(order, version, lies_there, tell, self)
        self._run.start()

    def verified(self, version: EarlyVersion) -> None:
        """Takes from its thread that a version lies there."""
        self._key = version.key

    def held(self, key: tuple[bytes, bytes]) -> EarlyLayout | None:
        """The layout of the version `key` if it lies verified in stage memory, else None. Ends what is on its way."""
        self.stop()
        return self._layout if key == self._key else None

    def stop(self, silent: bool = True) -> None:
        """Ends what is on its way, and waits for that; what lies verified stays. silent: its agent has ordered
        something else, and is told nothing of it."""
        run, self._run = self._run, None
        if run is not None:
            run.stop(silent)

    def drop(self, silent: bool = True) -> None:
        """Forgets what lies in stage memory; the memory stays."""
        self.stop(silent)
        self._key, self._layout = None, None

    def give_back(self) -> None:
        """Forgets it, and frees the memory until the next plan is laid out."""
        self.drop(silent=False)
        self._stage.give_back()

    def on_device(self) -> AbstractContextManager[object]:
        """Has its thread work beside the engine's: in the device's context, on a stream of its own."""
        device = self._stage.device
        if device.type != "cuda":
            return nullcontext()
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        stack = ExitStack()
        stack.enter_context(driver().on(device.index))
        stack.enter_context(torch.cuda.device(device))
        stack.enter_context(torch.cuda.stream(self._stream))
        return stack


class _EarlyRun(threading.Thread):
    """Brings one version, and tells how that goes on."""

    def __init__(
        self, order: worker_pb2.ReadyOrder, version: EarlyVersion, lies_there: bool, tell: Tell, owner: EarlyCopies
    ) -> None:
        super().__init__(name="ckpt-engine early copy", daemon=True)
        self._version, self._lies_there, self._tell, self._owner = version, lies_there, tell, owner
        self._seconds = order.deadline_seconds
        self._stop_at = time.monotonic() + self._seconds
        self._news = worker_pb2.WorkerEarly(fence=order.fence, bytes_total=version.layout.bytes)
        self._news_at = 0.0
        self._stopped = threading.Event()
        self._silent = False

    def stop(self, silent: bool) -> None:
        """Ends it, and waits for that. silent: that it was stopped is not told."""
        self._silent = silent
        self._stopped.set()
        self.join()

    def run(self) -> None:
        """Runs the thread: brings the version and tells how that goes on."""
        try:
            try:
                if not self._lies_there:
                    self._bring()
            finally:
                self._version.rest()
            self._owner.verified(self._version)
            self._news.verified, self._news.bytes_done = True, self._news.bytes_total
            trace("worker.early", "verified")
        except CkptEngineError as error:
            self._news.problem.CopyFrom(error.problem)
        except Exception as error:
            log.exception("ckpt-engine: bringing a version into stage memory failed")
            message = f"bringing it into stage memory failed inside the engine: {type(error).__name__}: {error}"
            self._news.problem.CopyFrom(internal(message).problem)
        try:
            if not self._silent:
                self._tell(self._news)
        except Exception:
            log.exception("ckpt-engine: the agent does not know how bringing into stage memory ended")

    def _bring(self) -> None:
        """Brings all batches. A GPU digests one while the next one comes."""
        trace("worker.early", "begin")
        started = time.monotonic()
        version, digested = self._version, None
        with in_background(), self._owner.on_device():
            for batch in version.layout.make_batches(version.resolved, version.opened, self._on_bytes):
                self._on_bytes(0)
                trace("worker.early", "copy")
                batch.bring(self._on_bytes)
                self._check(digested)
                digested = batch
            self._check(digested)
        version.layout.seconds = time.monotonic() - started

    def _check(self, batch: Batch | None) -> None:
        wrong = batch.wrong(self._version.expected) if batch is not None else []
        if wrong:
            names = sorted({self._version.resolved.recording.name(need) for need in wrong})
            message = f"what was brought into stage memory of {some(names)} does not hash to what its source sealed"
            raise data_loss(message, names)

    def _on_bytes(self, count: int) -> None:
        if self._stopped.is_set():
            raise aborted("bringing it into stage memory was stopped")
        self._news.bytes_done += count
        now = time.monotonic()
        if now > self._stop_at:
            raise deadline(
                f"{self._news.bytes_done} of {self._news.bytes_total} bytes were in stage memory after "
                f"{self._seconds:g} s"
            )
        if now - self._news_at >= TELL_SECONDS:
            self._news_at = now
            if not self._tell(self._news):
                raise aborted("what is brought into stage memory is not waited for any more")
