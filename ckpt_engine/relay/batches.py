"""What one call brings into a slot: pieces of atoms, digested as they arrive.

Memory of the host is copied and digested in one pass. What comes over a network lands in the slot, and is digested
there while the next batches are on their way. What must be cast on the way, or lies on a GPU, is copied first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from ckpt_engine.copy.prepared import PreparedCopy
from ckpt_engine.core.boxes import Box
from ckpt_engine.core.relay_layout import ATOM_BYTES
from ckpt_engine.digest.host import HostDigests
from ckpt_engine.relay.sources import Reading
from ckpt_engine.transport.base import Move
from ckpt_engine.transport.fetched import FetchedRegions
from ckpt_engine.transport.landing import Landing

BATCH_BYTES = 64 << 20
"""At least, between two looks at the clock; also the most of a tensor that is read at once."""

LANDING_BYTES = 16 << 20
"""The same of what comes over a network: several are on their way at a time."""

AHEAD = 4
"""Batches that are asked for over a network before the first of them is needed, that one included."""

_POLL_SECONDS = 50e-6
_LONGEST_POLL_SECONDS = 1e-3

Words = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of an atom that one read brings. holders: who has it, in the order in which they are asked. ends: whether
    it ends where its atom does."""

    cell: int
    tensor: int
    box: Box
    destination: torch.Tensor
    holders: tuple[Reading, ...]
    ends: bool

    @property
    def bytes(self) -> int:
        return self.destination.nbytes


class Batch:
    """Pieces that one call brings. readings: from whom each comes. All of them land over a network, or none."""

    def __init__(self, pieces: Sequence[Piece], readings: Sequence[Reading]) -> None:
        self.pieces, self.readings = pieces, readings
        self.cells = np.fromiter((piece.cell for piece in pieces), dtype=np.int64, count=len(pieces))
        plain = [index for index, reading in enumerate(readings) if reading.is_plain]
        other = [index for index, reading in enumerate(readings) if not reading.is_plain]
        self._order = np.array(plain + other, dtype=np.int64)
        self._plain = HostDigests(
            [(pieces[index].destination, pieces[index].box.start) for index in plain],
            sources=[readings[index].view(pieces[index].box) for index in plain],
        )
        self.lands = all(reading.lands for reading in readings)
        pairs = [(pieces[index], readings[index]) for index in other]
        self._landings = _landings(pairs) if self.lands else []
        self._copies = [] if self.lands else _copies(pairs)
        self._copied = HostDigests([(pieces[index].destination, pieces[index].box.start) for index in other])

    @property
    def bytes(self) -> int:
        return sum(piece.bytes for piece in self.pieces)

    def start(self) -> None:
        """Asks for what comes over a network, if that was not done yet. Waits for nothing. Raises what a transport
        raises."""
        for landing in self._landings:
            if not landing.started:
                landing.start()

    def run(self, carry_on: Callable[[], None]) -> Words:
        """The digest of each piece as it was written. carry_on: called while it waits; what it raises ends the
        batch. Raises what a transport raises."""
        found = np.zeros(len(self.pieces), dtype=np.uint64)
        values = self._plain.run()
        for copy in self._copies:
            copy.run()
        self.start()
        for landing in self._landings:
            _await(landing, carry_on)
        found[self._order] = np.array([*values, *self._copied.run()], dtype=np.uint64)
        return found

    def abandon(self) -> None:
        """Nobody waits for it any more. When it returns, nothing of it can land."""
        for landing in self._landings:
            if landing.started:
                landing.sever()


def _await(landing: Landing, carry_on: Callable[[], None]) -> None:
    pause = _POLL_SECONDS
    while not landing.over():
        carry_on()
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_POLL_SECONDS)


def _landings(pairs: Sequence[tuple[Piece, Reading]]) -> list[Landing]:
    by_source: dict[int, tuple[FetchedRegions, list[Move], list[int]]] = {}
    for piece, reading in pairs:
        assert isinstance(reading.opened, FetchedRegions), "what lands is fetched"
        _, moves, padded = by_source.setdefault(id(reading.opened), (reading.opened, [], []))
        moves.append(reading.move(piece.box, piece.destination))
        padded.append(-piece.bytes % ATOM_BYTES if piece.ends else 0)
    return [Landing(opened, moves, padded) for opened, moves, padded in by_source.values()]


def _copies(pairs: Sequence[tuple[Piece, Reading]]) -> list[PreparedCopy]:
    moves: dict[int, tuple[Reading, list[Move]]] = {}
    for piece, reading in pairs:
        _, found = moves.setdefault(id(reading.opened), (reading, []))
        found.append(reading.move(piece.box, piece.destination))
    return [reading.opened.prepare(found) for reading, found in moves.values()]


def parts_of(piece: Piece) -> list[Piece]:
    """The piece, cut along its longest axis so that no part takes much longer than a batch."""
    most = LANDING_BYTES if piece.holders[0].lands else BATCH_BYTES
    count = -(-piece.bytes // most)
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
        ends = piece.ends and first + length == shape[axis]
        found.append(Piece(piece.cell, piece.tensor, Box(low, high), part, piece.holders, ends))
    return found


def in_batches(pieces: Sequence[tuple[Piece, Reading]]) -> Iterator[Batch]:
    """In their order; what comes over a network apart from what does not."""
    batch: list[tuple[Piece, Reading]] = []
    size = 0
    for piece, reading in pieces:
        if batch and reading.lands != batch[-1][1].lands:
            yield _batch(batch)
            batch, size = [], 0
        batch.append((piece, reading))
        size += piece.bytes
        if size >= (LANDING_BYTES if reading.lands else BATCH_BYTES):
            yield _batch(batch)
            batch, size = [], 0
    if batch:
        yield _batch(batch)


def _batch(pairs: Sequence[tuple[Piece, Reading]]) -> Batch:
    return Batch([piece for piece, _ in pairs], [reading for _, reading in pairs])
