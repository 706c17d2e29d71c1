"""Digests of boxes on one GPU, all in a few launches; equal to the bit to those of core/digest.py.

Tables are made once for a set of boxes and kept; a run only launches. What the kernel cannot take as it lies is copied
to contiguous memory of the same GPU at each run. Needs Triton; `missing` says why it cannot be used.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import NamedTuple

import torch

from ckpt_engine.core.digest_tiles import ALIGNMENT, BLOCK_BYTES, FIELDS, NotTileableError, Strided, Table, TileTable

log = logging.getLogger(__name__)

Box = tuple[torch.Tensor, tuple[int, ...], torch.dtype]
"""View, first global coordinate of each axis, and the dtype that it is digested as."""

_ROWS = 8
_STAGES = 1
_WARPS = 4
_MASK = (1 << 64) - 1


class _Kind(NamedTuple):
    """What a kernel loads: see core/digest_kernel.py."""

    number: int
    unit: torch.dtype


_BYTES = _Kind(0, torch.uint8)
_LANES = _Kind(1, torch.uint16)
_CASTS = {torch.bfloat16: _Kind(2, torch.float32), torch.float16: _Kind(3, torch.float32)}


@cache
def missing() -> str:
    """Why the kernel cannot be used in this process; empty if it can."""
    try:
        import ckpt_engine.core.digest_kernel  # noqa: F401
    except Exception as error:
        return f"Triton cannot be imported ({type(error).__name__}: {error})"
    return ""


class CudaDigests:
    """Boxes of one device, made ready. Keeps the views, and tables of about 1/2000 of their size.

    Making one compiles the kernel, which takes seconds the first time. Used from one thread at a time; several
    instances may be used at once.
    """

    def __init__(self, boxes: Sequence[Box], seed: int) -> None:
        """boxes: on one device, at least one. Raises whatever Triton or CUDA raises, having launched nothing else."""
        self._device = boxes[0][0].device
        self._boxes = list(boxes)
        self.bytes = sum(view.nbytes for view, _, _ in boxes)
        self._sums = torch.zeros(len(boxes), dtype=torch.int64, device=self._device)
        on_gpu = self._device.type == "cuda"  # the interpreter of Triton runs on a CPU
        self._found = torch.zeros(len(boxes), dtype=torch.int64, pin_memory=on_gpu)
        self._done = torch.cuda.Event() if on_gpu else None
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._launches: list[_Launch] = []
        self._running = threading.Lock()
        with torch.inference_mode(), self._guard():
            self._make(seed)

    @property
    def launches(self) -> int:
        """Kernels of ours that one run launches; copies and clearing the sums not counted."""
        return len(self._launches)

    def launch(self) -> None:
        """Enqueues everything on the device's current stream. `collect` must follow, before another `launch`."""
        with torch.inference_mode(), self._guard():
            for scratch, view in self._copies:
                scratch.copy_(view)
            self._sums.zero_()
            for launch in self._launches:
                launch.run(self._sums)
            self._found.copy_(self._sums, non_blocking=True)
            if self._done is not None:
                self._done.record()

    def collect(self) -> list[int]:
        """Waits for what was launched, and no more; the digests, in order."""
        if self._done is not None:
            self._done.synchronize()
        return [each & _MASK for each in self._found.tolist()]

    def run(self) -> list[int]:
        """Launches and collects. May be called from several threads, which then take turns."""
        with self._running:
            self.launch()
            return self.collect()

    def forget(self) -> bool:
        """Lets the views go, if tables alone are enough to run; who keeps this must know where the boxes lie."""
        if not self._copies:
            self._boxes.clear()
        return not self._copies

    def _guard(self) -> AbstractContextManager[object]:
        """Triton launches on the current device."""
        return torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()

    def _make(self, seed: int) -> None:
        # All addresses count from one tensor of our own: see `origin` in the kernel.
        origin = torch.empty(ALIGNMENT, dtype=torch.uint8, device=self._device)
        tables: dict[_Kind, TileTable] = {}
        copied: list[str] = []
        for place, (view, start, served) in enumerate(self._boxes):
            kind = _kind(view, served)
            if kind is not None:
                try:
                    _table(tables, kind, seed, origin).add(_strided(view, start, kind), place)
                    continue
                except NotTileableError as error:
                    copied.append(str(error))
            else:
                copied.append(f"{view.dtype} digested as {served}")
            scratch = torch.empty(view.shape, dtype=served, device=self._device)
            self._copies.append((scratch, view))
            kind = _kind(scratch, served) or _LANES
            _table(tables, kind, seed, origin).add(_strided(scratch, start, kind), place)
        for kind, table in tables.items():
            tiles = table.tiles()
            factors = torch.from_numpy(tiles.factors.view("int64")).to(self._device)
            for work, wide in ((tiles.aligned, True), (tiles.unaligned, False)):
                if len(work):
                    self._launches.append(_Launch(kind, wide, work, factors, origin))
        if copied:
            size = sum(scratch.nbytes for scratch, _ in self._copies)
            log.warning(
                "%d of %d boxes (%d bytes) are copied on %s before each digest: %s",
                *(len(copied), len(self._boxes), size, self._device, "; ".join(dict.fromkeys(copied[:3]))),
            )


class _Launch:
    """One launch of the kernel, with its table on the device. Compiles when made."""

    def __init__(self, kind: _Kind, wide: bool, work: Table, factors: torch.Tensor, origin: torch.Tensor) -> None:
        self._kind = kind
        self._vector = ALIGNMENT // kind.unit.itemsize if wide else 1
        self._work = torch.from_numpy(work.view("int64")).to(factors.device)
        self._factors = factors
        self._origin = origin.view(kind.unit)
        nothing = torch.zeros(FIELDS, dtype=torch.int64, device=factors.device)
        self._start(nothing, 1, torch.zeros(1, dtype=torch.int64, device=factors.device))

    def run(self, sums: torch.Tensor) -> None:
        self._start(self._work, len(self._work), sums)

    def _start(self, work: torch.Tensor, programs: int, sums: torch.Tensor) -> None:
        from ckpt_engine.core.digest_kernel import digest_tiles

        digest_tiles[(programs,)](
            work,
            self._origin,
            self._factors,
            sums,
            BLOCK=BLOCK_BYTES // self._kind.unit.itemsize,
            ROWS=_ROWS,
            KIND=self._kind.number,
            VECTOR=self._vector,
            STAGES=_STAGES,
            num_warps=_WARPS,
        )


def _kind(view: torch.Tensor, served: torch.dtype) -> _Kind | None:
    """What to load of a view; None if it has to be copied, or cast by torch, first."""
    if view.is_conj() or view.is_neg():
        return None
    if view.dtype == served:
        return _BYTES if view.itemsize == 1 else _LANES
    return _CASTS.get(served) if view.dtype == torch.float32 else None


def _strided(view: torch.Tensor, start: tuple[int, ...], kind: _Kind) -> Strided:
    lanes = view.itemsize // kind.unit.itemsize
    return Strided(view.data_ptr(), tuple(view.shape), tuple(view.stride()), start, lanes)


def _table(tables: dict[_Kind, TileTable], kind: _Kind, seed: int, origin: torch.Tensor) -> TileTable:
    if kind not in tables:
        tables[kind] = TileTable(seed, kind.unit.itemsize, origin.data_ptr())
    return tables[kind]
