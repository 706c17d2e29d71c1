"""Brings a version into a slot: reads sealed boxes where they lie, digests what has arrived, and compares.

Each cell is compared with the sealed record. One that differs is read again from the next holder, and what nobody
brings as it was sealed is left out, with a reason. Nothing here touches a replica, and nothing that was not compared is
ever offered. What must be copied before it can be digested is copied on a thread of its own, while batches before it
are digested (relay/batches.py). `run` in any one thread at a time.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass

import numpy as np
import torch

from ckpt_engine.core.boxes import Box
from ckpt_engine.core.problems import CkptEngineError, aborted, deadline
from ckpt_engine.core.relay_layout import SlotLayout
from ckpt_engine.core.sealed_record import Recorded
from ckpt_engine.relay.batches import Batch, Piece, Words, staged_bytes
from ckpt_engine.relay.sources import Sources
from ckpt_engine.v1.weights_pb2 import Problem

BATCH_BYTES = 256 << 20
"""At most, between two looks at the clock; also the most of a tensor that is read at once. Some milliseconds of a
GPU's link or of 16 threads, and so long that starting and ending a batch costs little beside it."""

AHEAD = 3
"""Batches that are copied or digested, or wait for that, behind the one that is waited for."""

DIGESTING = 2
"""Batches that are digested at once, on the same threads: one has work for them while the other one begins or ends."""

READ_BACK = 2
"""Of batches that a GPU brings, every so many-th one is digested by that GPU, which reads it back over its link, which
carries both ways at once: 0 none, 1 all. The others are digested by processors, so neither has to keep up alone."""

NAMED = 16

Memory = Callable[[int, tuple[int, ...], torch.dtype], torch.Tensor]
"""(offset in the slot, shape, dtype) to writable memory."""

Progress = Callable[[int, int], None]
"""(bytes that were read, bytes that are to be read)."""


@dataclass(frozen=True)
class Missing:
    """A cell of which something is asked for, and that nobody brings as it was sealed."""

    cell: int
    problem: Problem


@dataclass(frozen=True)
class Filled:
    """What `run` brought. missing: cells, sorted. brought: bytes by source id. again: cells read more than once.
    faults: of sources, also where another one served instead; at most 16."""

    missing: tuple[Missing, ...]
    brought: Mapping[str, int]
    again: int
    faults: tuple[Problem, ...]
    seconds: float


class Filling:
    """A slot's layout and who has what of it, made ready; `run` brings what the sources have sealed by then.

    May be kept for as long as layout, tables and slot are the same: then an update costs no work per tensor.
    """

    def __init__(self, layout: SlotLayout, memory: Memory, sources: Sources) -> None:
        self.layout = layout
        self._sources = sources
        self._names = [spec.name for spec in layout.recorded.record.manifest.tensors]
        self._expected = layout.recorded.values
        self._held = np.zeros(len(self._expected), dtype=np.bool_)
        self._unheld: dict[int, Problem] = {}
        pieces: list[Piece] = []
        for atom in layout.atoms:
            self._held[atom.cell] = True
            dtype = sources.dtype(atom.tensor)
            whole = memory(atom.offset, atom.box.shape, dtype)
            covered = 0
            for box, holders in sources.holders(atom.tensor, atom.box):
                covered += box.volume
                inside = tuple(
                    slice(start - first, stop - first)
                    for first, start, stop in zip(atom.box.start, box.start, box.stop, strict=True)
                )
                if holders:
                    pieces += _parts(Piece(atom.cell, atom.tensor, box, whole[inside], holders))
                else:
                    self._unheld.setdefault(atom.cell, sources.why_not(atom.tensor, box))
            if covered != atom.box.volume:
                self._unheld.setdefault(atom.cell, sources.why_not(atom.tensor, atom.box))
        pieces = [piece for piece in pieces if piece.cell not in self._unheld]
        pieces.sort(key=lambda piece: piece.holders[0].place(piece.box))
        parts = list(_in_batches(pieces))
        stage_bytes = max((sum(staged_bytes(piece.destination) for piece in part) for part in parts), default=0)
        self._batches = [
            Batch(part, stage_bytes=stage_bytes if READ_BACK and number % READ_BACK == 0 else 0)
            for number, part in enumerate(parts)
        ]

    def check(self) -> None:
        """Raises NOT_FOUND, saying why, if nobody within reach holds any of what is asked for."""
        if self._unheld and not self._batches:
            raise CkptEngineError(next(iter(self._unheld.values())))

    def run(
        self,
        recorded: Recorded,
        stop_at: float,
        cancelled: Callable[[], bool] = lambda: False,
        progress: Progress = lambda done, total: None,
    ) -> Filled:
        """Fills the slot. recorded: of this version, with the layout's manifest and cells. stop_at: of the monotonic
        clock. progress: told after each batch, on this thread.

        Raises DEADLINE_EXCEEDED or ABORTED within a few batches of its end; the slot holds nothing then.
        """
        began = time.monotonic()
        self._expected = recorded.values
        found = np.zeros(len(recorded.values), dtype=np.uint64)
        brought: dict[str, int] = {}
        faults = list(self._sources.faults)
        self._sources.begin()
        failed: dict[int, Problem] = {}
        try:
            done, total = 0, sum(batch.bytes for batch in self._batches)
            with closing(self._brought()) as batches:
                for batch, result in batches:
                    self._carry_on(stop_at, cancelled)
                    self._add(batch, result, found, brought, failed)
                    done += batch.bytes
                    progress(done, total)
            missing = dict(self._unheld)
            wrong = self._wrong(found, failed)
            again = len(wrong)
            pieces: dict[int, list[Piece]] = {cell: [] for cell in wrong}
            for batch in self._batches if wrong else ():
                for piece in batch.pieces:
                    if piece.cell in pieces:
                        pieces[piece.cell].append(piece)
            for cell, parts in pieces.items():
                problem = self._retry(cell, parts, found, brought, failed, faults, stop_at, cancelled)
                if problem is not None:
                    missing[cell] = problem
        finally:
            self._sources.end()
        left = tuple(Missing(cell, missing[cell]) for cell in sorted(missing))
        told = {fault.message: fault for fault in faults}
        return Filled(left, brought, again, tuple(told.values())[:NAMED], time.monotonic() - began)

    def _carry_on(self, stop_at: float, cancelled: Callable[[], bool]) -> None:
        if cancelled():
            raise aborted("bringing this version was overtaken by a newer command")
        if time.monotonic() >= stop_at:
            raise deadline("bringing this version into the relay took longer than it may")

    def _brought(self) -> Generator[tuple[Batch, Words | Problem], None, None]:
        """Each batch in turn with its digests, or why there are none; meanwhile the next ones are copied and digested.
        Whoever ends it early waits for what is on its way."""
        digesting = min(DIGESTING, torch.get_num_threads())
        ahead: deque[tuple[Batch, Future[Words | Problem]]] = deque()
        with (
            ThreadPoolExecutor(digesting, thread_name_prefix="ckpt-engine fill digest") as digests,
            ThreadPoolExecutor(1, thread_name_prefix="ckpt-engine fill copy") as copies,
        ):
            try:
                for batch in self._batches:
                    copied = copies.submit(self._copy, batch) if batch.copies else None
                    ahead.append((batch, digests.submit(self._digest, batch, copied)))
                    if len(ahead) > AHEAD:
                        first, found = ahead.popleft()
                        yield first, found.result()
                while ahead:
                    first, found = ahead.popleft()
                    yield first, found.result()
            finally:
                for pool in (copies, digests):
                    pool.shutdown(wait=False, cancel_futures=True)

    def _copy(self, batch: Batch) -> Problem | None:
        """Why it could not be done."""
        if (lost := self._sources.lost(batch.readings)) is not None:
            return lost
        try:
            batch.copy()
        except CkptEngineError as error:
            return error.problem
        return None

    def _digest(self, batch: Batch, copied: Future[Problem | None] | None) -> Words | Problem:
        """Of a batch that is copied before it is digested, or else along with it."""
        problem = self._sources.lost(batch.readings) if copied is None else copied.result()
        if problem is not None:
            return problem
        try:
            return batch.digest()
        except CkptEngineError as error:
            return error.problem

    def _add(
        self,
        batch: Batch,
        result: Words | Problem,
        found: Words,
        brought: dict[str, int],
        failed: dict[int, Problem],
    ) -> None:
        if isinstance(result, Problem):
            failed.update((int(cell), result) for cell in batch.cells)
            return
        np.add.at(found, batch.cells, result)
        for piece, reading in zip(batch.pieces, batch.readings, strict=True):
            brought[reading.source] = brought.get(reading.source, 0) + piece.bytes

    def _wrong(self, found: Words, failed: Mapping[int, Problem]) -> list[int]:
        differ = self._held & (found != self._expected)
        differ[list(failed)] = True
        return [cell for cell in np.flatnonzero(differ).tolist() if cell not in self._unheld]

    def _retry(
        self,
        cell: int,
        pieces: Sequence[Piece],
        found: Words,
        brought: dict[str, int],
        failed: dict[int, Problem],
        faults: list[Problem],
        stop_at: float,
        cancelled: Callable[[], bool],
    ) -> Problem | None:
        """Reads a cell from its other holders, until it is as it was sealed. Why it cannot be had, if it cannot."""
        problem = failed.get(cell) or self._fault(cell, pieces, 0)
        faults.append(problem)
        # What failed may have failed for the sake of another cell, which was read along with it.
        for attempt in range(0 if cell in failed else 1, max(len(piece.holders) for piece in pieces)):
            self._carry_on(stop_at, cancelled)
            batch = Batch(pieces, attempt)
            found[cell] = 0
            failed.pop(cell, None)
            self._add(batch, self._copy(batch) or self._digest(batch, None), found, brought, failed)
            if cell not in failed and found[cell] == self._expected[cell]:
                return None
            problem = failed.get(cell) or self._fault(cell, pieces, attempt)
            faults.append(problem)
        return problem

    def _fault(self, cell: int, pieces: Sequence[Piece], attempt: int) -> Problem:
        sources = sorted({piece.holders[attempt % len(piece.holders)].source for piece in pieces})
        tensor = pieces[0].tensor
        box = self.layout.recorded.boxes[tensor][cell - self.layout.recorded.first[tensor]]
        return Problem(
            code=Problem.DATA_LOSS,
            message=f"{box} of tensor {self._names[tensor]} as {' and '.join(sources)} has it is not what was sealed: "
            "its bytes have changed since, or were damaged",
            tensors=[self._names[tensor]],
        )


def _parts(piece: Piece) -> Iterable[Piece]:
    """The piece, cut along its longest axis so that no part takes much longer than a batch."""
    count = -(-piece.bytes // BATCH_BYTES)
    if count <= 1:
        return [piece] if piece.bytes else []
    start, stop = piece.box
    shape = piece.box.shape
    axis = next(axis for axis, extent in enumerate(shape) if extent > 1)
    step = -(-shape[axis] // count)
    found = []
    for first in range(0, shape[axis], step):
        length = min(step, shape[axis] - first)
        low = (*start[:axis], start[axis] + first, *start[axis + 1 :])
        high = (*stop[:axis], start[axis] + first + length, *stop[axis + 1 :])
        part = piece.destination.narrow(axis, first, length)
        found.append(Piece(piece.cell, piece.tensor, Box(low, high), part, piece.holders))
    return found


def _in_batches(pieces: Sequence[Piece]) -> Iterable[list[Piece]]:
    batch: list[Piece] = []
    size = 0
    for piece in pieces:
        if batch and size + piece.bytes > BATCH_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(piece)
        size += piece.bytes
    if batch:
        yield batch
