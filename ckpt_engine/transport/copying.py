"""Copies many tensors into many others, on as many threads as torch may use.

Runs in the reader. Torch's own way, one parallel loop a tensor, waits for its slowest thread after each of them. On a
host where anything else runs, that wait is a scheduling quantum, and hundreds of tensors take seconds. So everything is
cut into pieces that are copied within one thread, and the threads take batches of pieces until none is left: they wait
for each other once, at the end. Long runs of bytes go through numpy (memcpy), short and scattered ones through torch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

Pair = tuple[torch.Tensor, torch.Tensor]
"""(destination, source), of equal shape."""

RUN_BYTES = 2048
"""From this many bytes in one run on, memcpy is faster than torch's loop over elements."""

PIECE_ELEMENTS = 32_704
"""Elements of a piece of short runs. Torch spreads an operation over threads from 32,768 on; whole cache lines."""

BATCH_BYTES = 4 << 20
"""Bytes that a thread takes at once, some 0.5 ms of work; also how often progress can be told."""

BATCH_PIECES = 1024
"""Pieces that a thread takes at once, when they are small."""

THREADS_LIMIT = 16
"""More threads than this only wait for memory."""

_LANES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class TensorCopy:
    """PreparedCopy of pairs. Elements of one dtype are copied as integers, so that every bit pattern arrives unchanged;
    other dtypes are cast as torch does it.

    What is on a CPU on both sides is copied by several threads, all else by the calling thread, a pair an operation.
    """

    def __init__(self, pairs: Iterable[Pair]) -> None:
        long: list[Pair] = []
        short: list[Pair] = []
        far: list[Pair] = []
        for whole_destination, whole_source in pairs:
            destination, source = whole_destination.detach(), whole_source.detach()
            if destination.numel() == 0:
                continue
            if destination.device.type != "cpu" or source.device.type != "cpu":
                far.append((destination, source))
                continue
            destination, source = _lanes(destination, source)
            width = destination.element_size()
            if destination.dtype == source.dtype and _run(destination, source) * width >= RUN_BYTES:
                long += _pieces(destination, source, BATCH_BYTES // width)
            else:
                short += _pieces(destination, source, PIECE_ELEMENTS)
        self._near = [*_batches(long, BATCH_BYTES, _copy_runs), *_batches(short, BATCH_BYTES, _copy_elements)]
        self._far = list(_batches(far, BATCH_BYTES, _copy_elements))
        self.bytes = sum(batch.bytes for batch in (*self._near, *self._far))

    def run(self, on_bytes: Callable[[int], None] | None = None) -> int:
        """Writes every destination; see PreparedCopy. `on_bytes` runs in the calling thread, between its batches."""
        with torch.inference_mode():
            for batch in self._far:
                batch.copy()
                if on_bytes is not None:
                    on_bytes(batch.bytes)
            _Run(self._near).finish(on_bytes)
        return self.bytes


@dataclass(frozen=True, slots=True)
class _Batch:
    """What a thread takes at once. `copy` is one call, most of which runs outside of the interpreter's lock."""

    copy: Callable[[], None]
    bytes: int


def _copy_runs(pairs: Sequence[Pair]) -> Callable[[], None]:
    arrays = [(destination.numpy(), source.numpy()) for destination, source in pairs]

    def copy() -> None:
        for destination, source in arrays:
            np.copyto(destination, source, casting="no")

    return copy


def _copy_elements(pairs: Sequence[Pair]) -> Callable[[], None]:
    destinations = [destination for destination, _ in pairs]
    sources = [source for _, source in pairs]
    return lambda: torch._foreach_copy_(destinations, sources)


class _Run:
    """One run over batches: who takes which, how much is done, and how it stops."""

    def __init__(self, batches: Sequence[_Batch]) -> None:
        self._waiting = iter(batches)
        self._lock = threading.Lock()
        self._done = 0
        self._told = 0
        self._failures: list[Exception] = []
        self._helpers = min(torch.get_num_threads(), THREADS_LIMIT, len(batches)) - 1

    def finish(self, on_bytes: Callable[[int], None] | None) -> None:
        """Copies all batches in this thread and its helpers, none of which outlives the call."""
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

    def _take(self) -> Iterator[_Batch]:
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
            new = self._done - self._told
            self._told = self._done
        if on_bytes is not None and new:
            on_bytes(new)


def _lanes(destination: torch.Tensor, source: torch.Tensor) -> Pair:
    """Both as the widest integers that either can be viewed as: fewer elements, so fewer pieces."""
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


def _run(destination: torch.Tensor, source: torch.Tensor) -> int:
    """Elements that lie one behind the other in both."""
    run = 1
    for axis in reversed(range(destination.dim())):
        extent = destination.shape[axis]
        if extent > 1 and not destination.stride(axis) == source.stride(axis) == run:
            break
        run *= extent
    return run


def _pieces(destination: torch.Tensor, source: torch.Tensor, limit: int) -> list[Pair]:
    """The pair in pieces of at most `limit` elements."""
    count = destination.numel()
    if count <= limit:
        return [(destination, source)]
    axis = next(axis for axis, extent in enumerate(destination.shape) if extent > 1)
    rows = limit * destination.shape[axis] // count
    if rows:
        parts = torch.split(destination, rows, axis), torch.split(source, rows, axis)
        return list(zip(*parts, strict=True))
    rows_of_both = zip(destination.unbind(axis), source.unbind(axis), strict=True)
    return [piece for pair in rows_of_both for piece in _pieces(*pair, limit)]


def _batches(
    pairs: Sequence[Pair], limit: int, prepare: Callable[[Sequence[Pair]], Callable[[], None]]
) -> Iterator[_Batch]:
    batch: list[Pair] = []
    size = 0
    for pair in pairs:
        batch.append(pair)
        size += pair[0].numel() * pair[0].element_size()
        if size >= limit or len(batch) >= BATCH_PIECES:
            yield _Batch(prepare(batch), size)
            batch, size = [], 0
    if batch:
        yield _Batch(prepare(batch), size)
