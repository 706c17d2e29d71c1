"""Brings a version into a slot: reads sealed boxes where they lie, digests what has arrived, and compares.

Each cell is compared with the sealed record. One that differs is read again from the next holder; a cell that no holder
has as it was sealed is left out, with a reason. Nothing here touches a replica, and no cell is offered before it was
compared. Batches travel on threads of their own (relay/pipeline.py). `run` in any one thread at a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field

import numpy as np
import torch

from ckpt_engine.core.boxes import inside
from ckpt_engine.core.problems import CkptEngineError, aborted, deadline
from ckpt_engine.core.rates import Rate
from ckpt_engine.core.relay_layout import SlotLayout
from ckpt_engine.core.sealed_record import ProvenRecord
from ckpt_engine.digest.arriving import ArrivingDigests
from ckpt_engine.relay.batches import PieceBatch, ReadPiece, Words, in_batches, parts_of
from ckpt_engine.relay.delta_figures import DeltaFigures
from ckpt_engine.relay.pipeline import Pipeline, arriving_digests
from ckpt_engine.relay.sources import Sources
from ckpt_engine.v1.weights_pb2 import Problem

NAMED = 16

Memory = Callable[[int, tuple[int, ...], torch.dtype], torch.Tensor]
"""Gives writable memory: (offset in the slot, shape, dtype) to a tensor."""

Arrived = Callable[[Collection[int]], None]
"""Takes cells that lie in the slot as they were sealed, and are not written any more; on the filling's thread."""

Progress = Callable[[int, int], None]
"""Takes (bytes that were read, bytes in all)."""


@dataclass
class FillStop:
    """Whether one filling is to end before it has all. Any thread."""

    ends: bool = False
    keeps: bool = False  # what has come is the outcome, and the rest is missing; otherwise there is none

    def ask(self, keep: bool) -> None:
        """Has the filling end at its next check. Once it is asked not to keep what has come, it does not."""
        self.keeps = keep and (self.keeps or not self.ends)
        self.ends = True

    def check(self) -> None:
        """Raises ABORTED if the filling is to end."""
        if self.ends:
            raise aborted("a newer command replaced the filling of this version")


@dataclass(frozen=True)
class Missing:
    """A cell that was asked for, and that no holder has as it was sealed."""

    cell: int
    problem: Problem


@dataclass(frozen=True)
class FillResult:
    """The outcome of a filling."""

    missing: tuple[Missing, ...]  # sorted by cell
    bytes_by_source: Mapping[str, int]  # bytes that arrived as they were sealed, each once; by source id
    again: int  # cells that were read more than once
    faults: tuple[Problem, ...]  # of sources, also where another one served instead; at most NAMED
    seconds: float
    sent: Rate | None = None  # how fast its chunks were sent to other relays; None: none was, or that is unknown
    received: Rate | None = None  # how fast other relays sent to it; None as for `sent`
    deltas: DeltaFigures = field(default_factory=DeltaFigures)  # what other relays sent, and as what

    def after(self, first: FillResult) -> FillResult:
        """The outcome of two fillings; this one brought what the first one left out."""
        sources = {*first.bytes_by_source, *self.bytes_by_source}
        bytes_by_source = {
            source: first.bytes_by_source.get(source, 0) + self.bytes_by_source.get(source, 0) for source in sources
        }
        return FillResult(
            self.missing,
            bytes_by_source,
            first.again + self.again,
            self.faults,
            first.seconds + self.seconds,
            deltas=self.deltas.after(first.deltas),
        )


class SlotFilling:
    """A prepared filling of a slot: its layout, and the holders of each piece. `run` brings what the sources have
    sealed by then.

    May be reused as long as layout, tables and slot are the same: then an update costs no work per tensor. kept_cells:
    cells that the slot holds already; they are neither read nor written.
    """

    def __init__(
        self, layout: SlotLayout, memory: Memory, sources: Sources, kept_cells: Collection[int] = frozenset()
    ) -> None:
        self.layout = layout
        self._sources = sources
        self._names = [spec.name for spec in layout.recorded.record.manifest.tensors]
        self._expected = layout.recorded.values
        self._held = np.zeros(len(self._expected), dtype=np.bool_)
        self._unheld: dict[int, Problem] = {}
        pieces: list[ReadPiece] = []
        for atom in layout.atoms:
            if atom.cell in kept_cells:
                continue
            self._held[atom.cell] = True
            dtype = sources.dtype(atom.tensor)
            whole = memory(atom.offset, atom.box.shape, dtype)
            covered = 0
            for box, holders in sources.holders(atom.tensor, atom.box):
                covered += box.volume
                if holders:
                    pieces += parts_of(ReadPiece(atom.cell, atom.tensor, box, whole[inside(box, atom.box)], holders))
                else:
                    self._unheld.setdefault(atom.cell, sources.why_not(atom.tensor, box))
            if covered != atom.box.volume:
                self._unheld.setdefault(atom.cell, sources.why_not(atom.tensor, atom.box))
        pieces = [piece for piece in pieces if piece.cell not in self._unheld]
        pieces.sort(key=lambda piece: piece.holders[0].place(piece.box))
        self._batches = in_batches([(piece, piece.holders[0]) for piece in pieces])
        self._arriving = arriving_digests(self._batches)

    def check(self) -> None:
        """Raises NOT_FOUND, saying why, if no source within reach holds any of the cells."""
        if self._unheld and not self._batches:
            raise CkptEngineError(next(iter(self._unheld.values())))

    def run(
        self,
        recorded: ProvenRecord,
        stop_at: float,
        stop: FillStop | None = None,
        progress: Progress = lambda done, total: None,
        arrived: Arrived | None = None,
    ) -> FillResult:
        """Fills the slot. recorded: of this version, with the layout's manifest and cells. stop_at: monotonic seconds.
        progress: called after each batch, on this thread. arrived: called once for each cell that has arrived.

        Raises DEADLINE_EXCEEDED or ABORTED within a few batches; the slot holds nothing then. If it is stopped to keep
        what has come, the cells of which `arrived` was not told are missing.
        """
        began = time.monotonic()
        stop = stop or FillStop()
        self._expected = recorded.values
        faults = list(self._sources.faults)
        self._sources.begin()

        def carry_on() -> None:
            stop.check()
            if time.monotonic() >= stop_at:
                raise deadline("the relay could not read all of this version before its deadline")

        try:
            with Pipeline(self._sources.lost, carry_on) as pipeline:
                run = _FillRun(pipeline, carry_on, np.zeros(len(recorded.values), dtype=np.uint64), faults)
                arrivals = None if arrived is None else _Arrivals(self._batches, run.found, self._expected, arrived)
                missing = dict(self._unheld)
                again = 0
                try:
                    run.bring(self._batches, progress, self._arriving, arrivals)
                    wrong = self._wrong(run)
                    again = len(wrong)
                    for cell, parts in self._pieces_of(wrong).items():
                        problem = self._retry(run, cell, parts)
                        if problem is not None:
                            missing[cell] = problem
                    if arrivals is not None:
                        arrivals.rest(missing)
                except CkptEngineError as error:
                    if arrivals is None or not stop.keeps:
                        raise
                    missing |= dict.fromkeys(arrivals.due, error.problem)
        finally:
            self._sources.end()
        run.forget(list(missing))
        missing_cells = tuple(Missing(cell, missing[cell]) for cell in sorted(missing))
        unique_faults = {fault.message: fault for fault in faults}
        return FillResult(
            missing_cells, run.bytes_by_source(), again, tuple(unique_faults.values())[:NAMED], time.monotonic() - began
        )

    def _pieces_of(self, cells: Collection[int]) -> dict[int, list[ReadPiece]]:
        pieces: dict[int, list[ReadPiece]] = {cell: [] for cell in cells}
        for batch in self._batches if cells else ():
            for piece in batch.pieces:
                if piece.cell in pieces:
                    pieces[piece.cell].append(piece)
        return pieces

    def _wrong(self, run: _FillRun) -> list[int]:
        differ = self._held & (run.found != self._expected)
        differ[list(run.failed)] = True
        return [cell for cell in np.flatnonzero(differ).tolist() if cell not in self._unheld]

    def _retry(self, run: _FillRun, cell: int, pieces: Sequence[ReadPiece]) -> Problem | None:
        """Reads a cell from its other holders until it is as it was sealed; returns why, if none has it so."""
        problem = run.failed.get(cell) or self._fault(cell, pieces, 0)
        run.faults.append(problem)
        # What failed may have failed for the sake of another cell, which was read along with it.
        for attempt in range(0 if cell in run.failed else 1, max(len(piece.holders) for piece in pieces)):
            pairs = [(piece, piece.holders[attempt % len(piece.holders)]) for piece in pieces]
            run.forget([cell])
            run.failed.pop(cell, None)
            run.bring(in_batches(pairs))
            if cell not in run.failed and run.found[cell] == self._expected[cell]:
                return None
            problem = run.failed.get(cell) or self._fault(cell, pieces, attempt)
            run.faults.append(problem)
        return problem

    def _fault(self, cell: int, pieces: Sequence[ReadPiece], attempt: int) -> Problem:
        sources = sorted({piece.holders[attempt % len(piece.holders)].source for piece in pieces})
        tensor = pieces[0].tensor
        box = self.layout.recorded.boxes[tensor][cell - self.layout.recorded.first[tensor]]
        return Problem(
            code=Problem.CODE_DATA_LOSS,
            message=f"{box} of tensor {self._names[tensor]} at {' and '.join(sources)} has other bytes than were "
            "sealed: they were changed since, or damaged",
            tensors=[self._names[tensor]],
        )


class _FillRun:
    """The state of one `run`. Used on the thread that fills."""

    def __init__(self, pipeline: Pipeline, carry_on: Callable[[], None], found: Words, faults: list[Problem]) -> None:
        self.found = found  # by cell, the sum of its pieces' digests
        self.failed: dict[int, Problem] = {}  # by cell, why it could not be read
        self.faults = faults
        self._pipeline = pipeline
        self._carry_on = carry_on
        self._came: dict[str, Words] = {}  # by source, of each cell the bytes that were read

    def bring(
        self,
        batches: Sequence[PieceBatch],
        progress: Progress = lambda done, total: None,
        arriving: ArrivingDigests | None = None,
        arrivals: _Arrivals | None = None,
    ) -> None:
        """Reads and digests batches. When it returns or raises, nothing can still be written."""
        done, total = 0, sum(batch.bytes for batch in batches)
        pipeline = self._pipeline
        with closing(pipeline.arriving(batches, arriving) if arriving else pipeline.results(batches)) as results:
            for batch, result in results:
                self._carry_on()
                if isinstance(result, Problem):
                    self.failed.update((int(cell), result) for cell in batch.cells)
                else:
                    np.add.at(self.found, batch.cells, result)
                    if arrivals is not None:
                        arrivals.add(batch)
                    for source, cells, sizes in batch.by_source():
                        came = self._came.setdefault(source, np.zeros_like(self.found))
                        np.add.at(came, cells, sizes)
                done += batch.bytes
                progress(done, total)

    def forget(self, cells: Sequence[int]) -> None:
        """Resets cells that are read again or given up."""
        for each in (self.found, *self._came.values()):
            each[cells] = 0

    def bytes_by_source(self) -> dict[str, int]:
        """Bytes that lie in the slot as they were sealed, by source."""
        return {source: int(came.sum()) for source, came in self._came.items() if came.any()}


class _Arrivals:
    """Reports cells as soon as they are complete and as sealed. found: the sums of their digests so far."""

    def __init__(self, batches: Sequence[PieceBatch], found: Words, expected: Words, arrived: Arrived) -> None:
        self._found, self._expected, self._arrived = found, expected, arrived
        self.due = {int(cell) for batch in batches for cell in batch.cells}  # that were not reported
        self._pieces_due = np.zeros(len(expected), dtype=np.int64)  # a sum may be right before all pieces have come
        for batch in batches:
            np.add.at(self._pieces_due, batch.cells, 1)

    def add(self, batch: PieceBatch) -> None:
        """Notes that a batch has come and is part of the sums."""
        np.subtract.at(self._pieces_due, batch.cells, 1)
        cells = np.unique(batch.cells)
        whole = cells[(self._pieces_due[cells] == 0) & (self._found[cells] == self._expected[cells])].tolist()
        self.due.difference_update(whole)
        if whole:
            self._arrived(whole)

    def rest(self, missing: Collection[int]) -> None:
        """Reports the remaining cells, at the end: all but the missing ones."""
        self._arrived(sorted(self.due.difference(missing)))
