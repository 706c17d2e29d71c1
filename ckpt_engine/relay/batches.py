"""Pieces of a version that are brought together: copied where they must be, and digested as they then lie in the slot.

What lies in memory of this host, as it is served, is copied and digested in one pass, on the threads that digests of
host memory use. All else is copied first: what must be cast, what comes over a network, and what lies on a GPU. Then
what has arrived is digested: by processors, or, where a GPU brought it, by that GPU, which reads it back. A digest of
what was sent would prove nothing.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch

from ckpt_engine.copy.prepared import PreparedCopy
from ckpt_engine.core.boxes import Box
from ckpt_engine.digest.factors import SEED
from ckpt_engine.digest.host import HostDigests
from ckpt_engine.relay.sources import Reading
from ckpt_engine.transport.base import Move

log = logging.getLogger("ckpt_engine.relay")

Words = npt.NDArray[np.uint64]

_ALIGNMENT = 256

_Boxes = list[tuple[torch.Tensor, Sequence[int]]]


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of an atom that one read brings. holders: who has it, in the order in which they are asked."""

    cell: int
    tensor: int
    box: Box
    destination: torch.Tensor
    holders: tuple[Reading, ...]

    @property
    def bytes(self) -> int:
        return self.destination.nbytes


class Batch:
    """Pieces that are brought together, from their first holders (or those of a later attempt). `copy`, then `digest`,
    maybe on another thread."""

    def __init__(self, pieces: Sequence[Piece], attempt: int = 0, stage_bytes: int = 0) -> None:
        """stage_bytes: memory of each GPU for what it reads back; 0: it reads nothing back."""
        self.pieces = pieces
        self._stage_bytes = stage_bytes
        self.readings = [piece.holders[attempt % len(piece.holders)] for piece in pieces]
        self.cells = np.fromiter((piece.cell for piece in pieces), dtype=np.int64, count=len(pieces))
        plain, near, by_gpu = self._sorted()
        self._order = np.array([*plain, *near, *chain.from_iterable(by_gpu.values())], dtype=np.int64)
        self._plain = HostDigests(self._boxes(plain), sources=[self.readings[i].view(pieces[i].box) for i in plain])
        far = [index for index, reading in enumerate(self.readings) if not reading.is_plain]
        self._copies = _copies([(pieces[index], self.readings[index]) for index in far])
        self._near = HostDigests(self._boxes(near))
        self._read_back = [_read_back(self._boxes(group), gpu, stage_bytes) for gpu, group in by_gpu.items()]

    @property
    def bytes(self) -> int:
        return sum(piece.bytes for piece in self.pieces)

    @property
    def copies(self) -> bool:
        """Whether `copy` has anything to do."""
        return bool(self._copies)

    def copy(self) -> None:
        """Brings what must be copied before it can be digested. Raises what a transport raises."""
        for copy in self._copies:
            copy.run()

    def digest(self) -> Words:
        """Brings the rest; the digest of each piece as it has arrived."""
        found = np.zeros(len(self.pieces), dtype=np.uint64)
        read_back = [value for digests in self._read_back for value in digests.run()]
        found[self._order] = np.array([*self._plain.run(), *self._near.run(), *read_back], dtype=np.uint64)
        return found

    def _sorted(self) -> tuple[list[int], list[int], dict[int, list[int]]]:
        """Pieces that are copied and digested in one pass, those that processors digest, and those that a GPU does."""
        plain: list[int] = []
        near: list[int] = []
        by_gpu: dict[int, list[int]] = {}
        for index, (piece, reading) in enumerate(zip(self.pieces, self.readings, strict=True)):
            if reading.is_plain:
                plain.append(index)
            elif self._stage_bytes and reading.gpu is not None and piece.destination.is_pinned():
                by_gpu.setdefault(reading.gpu, []).append(index)
            else:
                near.append(index)
        return plain, near, by_gpu

    def _boxes(self, indices: Sequence[int]) -> _Boxes:
        return [(self.pieces[index].destination, self.pieces[index].box.start) for index in indices]


def _copies(pieces: Sequence[tuple[Piece, Reading]]) -> list[PreparedCopy]:
    """Of what must be copied first."""
    moves: dict[int, tuple[Reading, list[Move]]] = {}
    for piece, reading in pieces:
        _, found = moves.setdefault(id(reading.opened), (reading, []))
        found.append(reading.move(piece.box, piece.destination))
    return [reading.opened.prepare(found) for reading, found in moves.values()]


def _read_back(boxes: _Boxes, gpu: int, stage_bytes: int) -> HostDigests | _ReadBack:
    try:
        return _ReadBack(boxes, gpu, stage_bytes)
    except Exception as error:  # no compiler, no memory: processors do it, slower and not wrong
        log.warning("GPU %d cannot digest what it brought: %s: %s", gpu, type(error).__name__, error)
        return HostDigests(boxes)


class _Stage:
    """Memory of a GPU that holds what is read back, one batch at a time, and the stream on which that is done."""

    def __init__(self, gpu: int) -> None:
        self.gpu = gpu
        self.lock = threading.Lock()
        self.stream = torch.cuda.Stream(gpu)
        self._memory = torch.empty(0, dtype=torch.uint8, device=torch.device("cuda", gpu))

    def memory(self, size: int) -> torch.Tensor:
        """So many bytes of it. More than there were: other memory."""
        if size > self._memory.numel():
            self._memory = torch.empty(size, dtype=torch.uint8, device=self._memory.device)
        return self._memory[:size]


_stages: weakref.WeakValueDictionary[int, _Stage] = weakref.WeakValueDictionary()
"""Of this process, by GPU: the fillings of both slots share one."""


def _stage(gpu: int) -> _Stage:
    found = _stages.get(gpu)
    if found is None:
        found = _stages[gpu] = _Stage(gpu)
    return found


def staged_bytes(view: torch.Tensor) -> int:
    """What it takes of the memory for what is read back."""
    return -(-view.nbytes // _ALIGNMENT) * _ALIGNMENT


class _ReadBack:
    """Digests of pinned memory of this host by a GPU: copied to its memory, for which link and copy engines have a way
    of their own, and digested there. A kernel that reads the host itself would get in the way of what arrives."""

    def __init__(self, boxes: _Boxes, gpu: int, stage_bytes: int) -> None:
        # Imported here: it loads Triton, which only a relay that reads GPUs needs.
        from ckpt_engine.digest.cuda import CudaDigests, missing

        if why := missing():
            raise RuntimeError(why)
        self._stage = _stage(gpu)
        memory = self._stage.memory(stage_bytes)
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        first = 0
        for view, _ in boxes:
            self._copies.append((memory[first : first + view.nbytes].view(view.dtype).view(view.shape), view))
            first += staged_bytes(view)
        with torch.cuda.stream(self._stage.stream):
            seen = [
                (there, tuple(start), there.dtype) for (there, _), (_, start) in zip(self._copies, boxes, strict=True)
            ]
            self._digests = CudaDigests(seen, SEED)
            self._stage.stream.synchronize()  # tables were copied, and the kernel compiled

    def run(self) -> list[int]:
        with self._stage.lock, torch.inference_mode(), torch.cuda.stream(self._stage.stream):
            for there, view in self._copies:
                there.copy_(view, non_blocking=True)
            return self._digests.run()
