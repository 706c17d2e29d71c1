"""Fills a slot: from sources of this host where these have a chunk, and from other relays where they do not.

It decides which chunks are brought in which of the two ways; how a source is read is in fill.py, which relay is asked
in asking.py. A chunk is passed on from the moment at which all of its cells were compared with the sealed record.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from ckpt_engine.core.chunk_places import ChunkPlaces
from ckpt_engine.core.chunks import Chunk, chunk_key, chunks_with
from ckpt_engine.core.reach import Distance
from ckpt_engine.core.relay_layout import SlotLayout
from ckpt_engine.core.sealed_record import ProvenRecord
from ckpt_engine.digest.host import HostDigests
from ckpt_engine.relay.asking import ChunkQuestions
from ckpt_engine.relay.chunk_search import ChunkTable
from ckpt_engine.relay.delta_figures import DeltaFigures
from ckpt_engine.relay.deltas import DeltaTaker
from ckpt_engine.relay.fill import NAMED, FillResult, FillStop, Memory, Missing, Progress, SlotFilling
from ckpt_engine.relay.sources import Sources
from ckpt_engine.torch_dtypes import torch_dtype
from ckpt_engine.transport.askers import KeptAskers
from ckpt_engine.transport.base import ChunkLending
from ckpt_engine.v1.weights_pb2 import Problem


@dataclass(frozen=True)
class SlotMemory:
    """The memory of one slot."""

    number: int
    at: Memory  # see fill.Memory
    bytes: memoryview  # all that the layout takes


class ChunkFilling:
    """A slot's filling, prepared; kept as long as its layout and sources are the same.

    kept_cells: cells that the slot holds already; they are neither read nor written.
    """

    def __init__(
        self,
        layout: SlotLayout,
        chunks: Sequence[Chunk],
        memory: SlotMemory,
        sources: Sources,
        kept_cells: Collection[int] = frozenset(),
    ) -> None:
        self.layout = layout
        self.chunks = chunks
        self.places = ChunkPlaces(layout, chunks)
        self._memory = memory
        self._sources = sources
        self._kept_cells = frozenset(kept_cells)
        self._cells = frozenset(atom.cell for atom in layout.atoms)
        self._digests: dict[int, HostDigests] = {}
        self._prepared: dict[frozenset[int], SlotFilling] = {}
        near = self._near_cells()
        self._far = [number for number in self.places.held if not near.issuperset(chunks[number].cells)]

    def check(self) -> None:
        """Raises NOT_FOUND, saying why, if no source within reach holds any of the cells."""
        self._reading(frozenset(self._cells - self._kept_cells)).check()

    def key(self, recorded: ProvenRecord) -> bytes:
        """The key by which other relays name this version's chunks, 16 bytes."""
        return chunk_key(recorded, self.chunks)

    def run(
        self,
        recorded: ProvenRecord,
        stop_at: float,
        stop: FillStop | None = None,
        progress: Progress = lambda done, total: None,
        table: ChunkTable | None = None,
        askers: KeptAskers | None = None,
        lending: ChunkLending | None = None,
        deltas: DeltaTaker | None = None,
    ) -> FillResult:
        """Fills the slot. recorded: of this version, with the layout's manifest and cells. stop_at: monotonic seconds.
        table: the relays to ask; None: sources alone. lending: notes what may be passed on; None: it is not. deltas:
        takes those of chunks; None: none is asked for.

        When it returns or raises, nothing can land any more. Raises DEADLINE_EXCEEDED; ABORTED, also if it is stopped
        to keep what has come and that is nothing; INVALID_ARGUMENT for a table that contradicts itself.
        """
        began = time.monotonic()
        stop = stop or FillStop()
        passing = _Passing(self.chunks, self.places.held, self._kept_cells, lending) if lending is not None else None
        questions = None
        if table is not None and askers is not None:
            questions = ChunkQuestions(
                table,
                self._far,
                self.chunks,
                self.places.runs,
                lambda number: self._wrong(number, recorded),
                lending,
                askers,
                lambda asker: asker.begin(self.key(recorded), self._memory.number, self._memory.bytes, deltas),
                stop_at,
                deltas,
            )
        total = sum(self.chunks[number].bytes for number in self.places.held)
        at_first = sum(self.chunks[number].bytes for number in self.places.held if self._is_kept(number))
        results: list[FillResult] = []

        def report(done: int, _: int) -> None:
            if lending is not None and done:
                lending.moved()
            come = sum(sum(each.bytes_by_source.values()) for each in results)
            progress(at_first + come + done + (questions.done_bytes if questions is not None else 0), total)

        def read(cells: frozenset[int]) -> FillResult:
            arrived = passing.arrived if passing is not None else None
            found = self._reading(cells).run(recorded, stop_at, stop, report, arrived)
            results.append(found)
            return found

        if questions is None:
            read(self._cells - self._kept_cells)
            self._check_kept(stop, {each.cell for each in results[0].missing})
            if passing is not None and not stop.ends:
                passing.give_up()
            return _joined(results, None, lending, time.monotonic() - began)
        try:
            questions.start()
            near = read(self._cells - self._kept_cells - self._cells_of(questions.numbers))
            if not stop.ends:
                questions.also(self._chunks_of(near))
                if passing is not None:
                    passing.give_up(questions.numbers)
            questions.finish(stop, lambda: report(0, 0))
        finally:
            questions.stop()
        if stop.ends:
            lacking = {each.cell for each in near.missing} - self._cells_of(questions.taken)
            lacking |= self._cells_of(questions.reasons())
            self._check_kept(stop, lacking)
            replaced = Problem(code=Problem.CODE_ABORTED, message="a newer command is to bring the rest")
            results[0] = replace(near, missing=tuple(Missing(cell, replaced) for cell in sorted(lacking)))
            return _joined(results, questions, lending, time.monotonic() - began)
        results[0] = replace(results[0], missing=())  # what sources lacked was asked of relays
        if reasons := questions.reasons():
            rest = read(self._cells_of(reasons))
            why = {cell: reason for number, reason in reasons.items() for cell in self.chunks[number].cells}
            missing = tuple(Missing(each.cell, _not_sent(each.problem, why[each.cell])) for each in rest.missing)
            results[-1] = replace(rest, missing=missing)
        return _joined(results, questions, lending, time.monotonic() - began)

    def _check_kept(self, stop: FillStop, lacking: Collection[int]) -> None:
        """Raises ABORTED if a filling was stopped and nothing of it is kept. lacking: cells that have not come."""
        if not stop.keeps or len(lacking) == len(self._cells):
            stop.check()

    def _is_kept(self, number: int) -> bool:
        return self._kept_cells.issuperset(self.chunks[number].cells)

    def _cells_of(self, numbers: Collection[int]) -> frozenset[int]:
        return frozenset(cell for number in numbers for cell in self.chunks[number].cells)

    def _chunks_of(self, result: FillResult) -> list[int]:
        """The chunks with cells that are missing."""
        return chunks_with(self.chunks, [each.cell for each in result.missing])

    def _reading(self, cells: frozenset[int]) -> SlotFilling:
        """A filling that reads these cells from sources."""
        if cells not in self._prepared:
            self._prepared = dict(list(self._prepared.items())[-1:])
            self._prepared[cells] = SlotFilling(self.layout, self._memory.at, self._sources, self._cells - cells)
        return self._prepared[cells]

    def _near_cells(self) -> frozenset[int]:
        """The cells that it has, or that sources of this host have: not files that this host may or may not have."""
        far: set[int] = set()
        for atom in self.layout.atoms:
            if atom.cell in self._kept_cells or atom.cell in far:
                continue
            covered = 0
            for box, holders in self._sources.holders(atom.tensor, atom.box):
                if holders and holders[0].nearness[0] < Distance.SHARED_FILE:
                    covered += box.volume
            if covered != atom.box.volume:
                far.add(atom.cell)
        return self._cells - far

    def _wrong(self, number: int, recorded: ProvenRecord) -> list[str]:
        """The names of the tensors of which a chunk's cells now differ from the sealed record."""
        atoms = self.places.atoms(number)
        if number not in self._digests:
            self._digests[number] = HostDigests([self._box(atom) for atom in atoms])
        sums = dict.fromkeys(self.chunks[number].cells, 0)
        for atom, value in zip(atoms, self._digests[number].run(), strict=True):
            cell = self.layout.atoms[atom].cell
            sums[cell] = (sums[cell] + value) % 2**64
        wrong = [cell for cell, value in sums.items() if value != int(recorded.values[cell])]
        specs = recorded.record.manifest.tensors
        return sorted({specs[int(np.searchsorted(recorded.first, cell, side="right")) - 1].name for cell in wrong})

    def _box(self, number: int) -> tuple[torch.Tensor, Sequence[int]]:
        atom = self.layout.atoms[number]
        dtype = torch_dtype(self.layout.recorded.record.manifest.tensors[atom.tensor].dtype)
        return self._memory.at(atom.offset, atom.box.shape, dtype), atom.box.start


def _not_sent(problem: Problem, why: str) -> Problem:
    found = Problem()
    found.CopyFrom(problem)
    found.message = f"{why}; {problem.message}"
    return found


class _Passing:
    """Notes chunks as verified once all their cells have come. On the filling's thread."""

    def __init__(
        self,
        chunks: Sequence[Chunk],
        held: Collection[int],
        kept_cells: Collection[int],
        lending: ChunkLending,
    ) -> None:
        self._lending = lending
        self._chunk_of = {cell: number for number in held for cell in chunks[number].cells}
        self._due = {number: len(chunks[number].cells) for number in held}
        self.arrived(sorted(kept_cells))

    def arrived(self, cells: Collection[int]) -> None:
        """Takes cells that lie in the slot as they were sealed, and are not written any more."""
        for cell in cells:
            if (number := self._chunk_of.get(cell)) is not None:
                self._due[number] -= 1
                if not self._due[number]:
                    self._lending.verified(number)

    def give_up(self, others: Collection[int] = frozenset()) -> None:
        """Gives up the chunks that sources were to bring and did not: others must not wait for them."""
        for number, due in self._due.items():
            if due and number not in others:
                self._lending.never(number)


def _joined(
    results: Sequence[FillResult], questions: ChunkQuestions | None, lending: ChunkLending | None, seconds: float
) -> FillResult:
    bytes_by_source = dict(questions.bytes_by_source) if questions is not None else {}
    faults = list(questions.faults) if questions is not None else []
    for each in results:
        for source, size in each.bytes_by_source.items():
            bytes_by_source[source] = bytes_by_source.get(source, 0) + size
        faults += each.faults
    missing = sorted((one for each in results for one in each.missing), key=lambda one: one.cell)
    unique_faults = {fault.message: fault for fault in faults}
    return FillResult(
        tuple(missing),
        bytes_by_source,
        sum(each.again for each in results) + (questions.again if questions is not None else 0),
        tuple(unique_faults.values())[:NAMED],
        seconds,
        lending.sent if lending is not None else None,
        questions.received if questions is not None else None,
        questions.figures if questions is not None else DeltaFigures(),
    )
