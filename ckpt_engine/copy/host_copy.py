"""Copies within a CPU, as work for threads: cut into pieces that torch copies within one thread.

Torch runs one parallel loop a tensor, and waits for its slowest thread after each. On a busy host that wait is a
scheduling quantum, and hundreds of tensors take seconds. So our threads take batches of pieces until none is left, and
wait for each other once, at the end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from ckpt_engine.copy.rows import Rows, as_rows

Pair = tuple[torch.Tensor, torch.Tensor]
"""(destination, source), of equal shape."""

PIECE_ELEMENTS = 32_704
"""Most elements of a piece. Torch spreads an operation over threads from 32,768 on; whole cache lines."""

BATCH_BYTES = 4 << 20
"""Bytes that a thread takes at once, some 0.5 ms of work; also the unit of progress."""

BATCH_PIECES = 1024
"""Pieces that a thread takes at once, when they are small."""

THREADS_LIMIT = 16
"""More threads than this only wait for memory."""

_LANES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def host_work(pairs: Iterable[Pair]) -> list[Work]:
    """Cuts pairs of CPU tensors into units of work. The `copy` of each runs on the calling thread only, without torch's
    thread pool."""
    near: list[Pair] = []
    rows: list[Rows] = []
    for whole_destination, whole_source in pairs:
        destination, source = whole_destination.detach(), whole_source.detach()
        if destination.numel() == 0:
            continue
        if destination.dtype == source.dtype and (found := as_rows(destination, source)) is not None:
            rows += found.parts(BATCH_BYTES)
        else:
            near += _pieces(*_lanes(destination, source))
    return [*batches_of(near), *rows]


class CopyBatch:
    """Pairs that a thread takes together, and copies with one call that releases the interpreter's lock."""

    __slots__ = ("_destinations", "_sources", "bytes")

    def __init__(self, pairs: Sequence[Pair], size: int) -> None:
        self._destinations = [destination for destination, _ in pairs]
        self._sources = [source for _, source in pairs]
        self.bytes = size

    def copy(self) -> None:
        torch._foreach_copy_(self._destinations, self._sources)


Work = CopyBatch | Rows
"""A unit of work for a thread: `copy` and `bytes`."""


class HostRun:
    """One run over batches that this thread and its helpers share. Hands out batches, counts bytes, and can be
    stopped."""

    def __init__(self, batches: Sequence[Work]) -> None:
        self._waiting = iter(batches)
        self._lock = threading.Lock()
        self._done = 0
        self._reported_bytes = 0
        self._failures: list[Exception] = []
        self._helpers = min(torch.get_num_threads(), THREADS_LIMIT, len(batches)) - 1

    def finish(self, on_bytes: Callable[[int], None] | None) -> None:
        """Copies all batches in this thread and its helpers, which end before it returns."""
        helpers = [
            threading.Thread(target=self._help, name=f"ckpt-engine copy {number}", daemon=True)
            for number in range(self._helpers)
        ]
        for helper in helpers:
            helper.start()
        try:
            for batch in self._take():
                batch.copy()
                self._tell(batch.bytes, on_bytes)
        finally:
            self._stop()
            for helper in helpers:
                helper.join()
        if self._failures:
            raise self._failures[0]
        self._tell(0, on_bytes)

    def _help(self) -> None:
        try:
            with torch.inference_mode():
                for batch in self._take():
                    batch.copy()
                    with self._lock:
                        self._done += batch.bytes
        except Exception as error:
            self._failures.append(error)
            self._stop()

    def _take(self) -> Iterator[Work]:
        while True:
            with self._lock:
                batch = next(self._waiting, None)
            if batch is None:
                return
            yield batch

    def _stop(self) -> None:
        with self._lock:
            self._waiting = iter(())

    def _tell(self, size: int, on_bytes: Callable[[int], None] | None) -> None:
        with self._lock:
            self._done += size
            new = self._done - self._reported_bytes
            self._reported_bytes = self._done
        if on_bytes is not None and new:
            on_bytes(new)


def _lanes(destination: torch.Tensor, source: torch.Tensor) -> Pair:
    """The pair as the widest integers that both can be viewed as: fewer elements, so fewer pieces."""
    if destination.is_contiguous() and source.is_contiguous():
        destination, source = destination.view(-1), source.view(-1)
    for width in (8, 4, 2, 1) if destination.dtype == source.dtype else ():
        if width >= destination.element_size() and _fits(destination, width) and _fits(source, width):
            return destination.view(_LANES[width]), source.view(_LANES[width])
    return destination, source


def _fits(tensor: torch.Tensor, width: int) -> bool:
    size = tensor.element_size()
    if size == width:
        return True
    if tensor.dim() == 0 or tensor.stride(-1) != 1:
        return False
    steps = (*tensor.stride()[:-1], tensor.shape[-1], tensor.storage_offset())
    return all(step * size % width == 0 for step in steps)


def _pieces(destination: torch.Tensor, source: torch.Tensor) -> list[Pair]:
    """The pair in pieces of at most PIECE_ELEMENTS."""
    count = destination.numel()
    if count <= PIECE_ELEMENTS:
        return [(destination, source)]
    axis = next(axis for axis, extent in enumerate(destination.shape) if extent > 1)
    rows = PIECE_ELEMENTS * destination.shape[axis] // count
    if rows:
        parts = torch.split(destination, rows, axis), torch.split(source, rows, axis)
        return list(zip(*parts, strict=True))
    rows_of_both = zip(destination.unbind(axis), source.unbind(axis), strict=True)
    return [piece for pair in rows_of_both for piece in _pieces(*pair)]


def batches_of(pairs: Sequence[Pair]) -> list[CopyBatch]:
    """The pairs in batches that a thread takes at once."""
    batches: list[CopyBatch] = []
    batch: list[Pair] = []
    size = 0
    for pair in pairs:
        batch.append(pair)
        size += pair[0].numel() * pair[0].element_size()
        if size >= BATCH_BYTES or len(batch) >= BATCH_PIECES:
            batches.append(CopyBatch(batch, size))
            batch, size = [], 0
    return [*batches, CopyBatch(batch, size)] if batch else batches
