"""Digests of boxes on one GPU, all in a few launches; equal to the bit to those of digest/host.py.

Tables are made once for a set of boxes and kept; a run only launches. Boxes that the kernel cannot read where they lie
are copied to contiguous memory of the same GPU at each run. Needs Triton; `missing` says why it cannot be used.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import NamedTuple

import numpy as np
import torch

from ckpt_engine.core.problems import deadline
from ckpt_engine.digest.cuda_tiles import ALIGNMENT, BLOCK_BYTES, FIELDS, NotTileableError, Strided, Table, TileTable
from ckpt_engine.digest.factors import Words, digest_of_zeros
from ckpt_engine.digest.finite import RULES, FiniteRule
from ckpt_engine.digest.host import HostDigests
from ckpt_engine.torch_dtypes import dtype_name

log = logging.getLogger(__name__)

Box = tuple[torch.Tensor, tuple[int, ...], torch.dtype]
"""View, first global coordinate of each axis, and the dtype as which it is digested."""

HANG_SECONDS = 120.0
"""How long a digest may take, with earlier work on its stream; it takes milliseconds itself."""

_POLL_SECONDS = 20e-6
_ROWS = 8
_STAGES = 1
_WARPS = 4


class _LoadKind(NamedTuple):
    """What a kernel loads: see digest/cuda_kernel.py."""

    number: int
    unit: torch.dtype
    rule: FiniteRule | None = None  # how NaN and infinity are found among it, if they are looked for
    lanes: int = 1  # of an element, if they are


_BYTES = _LoadKind(0, torch.uint8)
_LANES = _LoadKind(1, torch.uint16)
_CASTS = {torch.bfloat16: _LoadKind(2, torch.float32), torch.float16: _LoadKind(3, torch.float32)}


@cache
def missing() -> str:
    """Why the kernel cannot be used in this process; empty if it can."""
    try:
        import ckpt_engine.digest.cuda_kernel  # noqa: F401
    except Exception as error:
        return f"Triton cannot be imported ({type(error).__name__}: {error})"
    return ""


class CudaDigests:
    """Prepared digests of boxes on one device. Keeps the views, and tables of about 1/2000 of their size.

    Making one compiles the kernel, which takes seconds the first time. Used from one thread at a time; several
    instances may be used at once.
    """

    def __init__(self, boxes: Sequence[Box], seed: int, finite: bool = False) -> None:
        """boxes: on one device, at least one. finite: look for NaN and infinity, too. Raises what Triton or CUDA
        raises, before anything else is launched."""
        self._device = boxes[0][0].device
        self._boxes = list(boxes)
        self.bytes = sum(view.nbytes for view, _, _ in boxes)
        zeros = (digest_of_zeros(dtype_name(served), at, tuple(view.shape), seed) for view, at, served in boxes)
        self._zeros: Words = np.fromiter(
            zeros, dtype=np.uint64, count=len(boxes)
        )  # what the kernels' sums are added to
        self.not_finite: list[bool] = []
        """Which boxes held NaN or infinity when digests were last collected, if `finite` was set."""
        self._finite = finite
        room = len(boxes) + len(boxes) % 2  # marks lie behind the sums, aligned as these are
        self._sums = torch.zeros(2 * room if finite else room, dtype=torch.int64, device=self._device)
        self._marks = self._sums[-room:]
        on_gpu = self._device.type == "cuda"  # the interpreter of Triton runs on a CPU
        self._found = torch.zeros(self._sums.numel(), dtype=torch.int64, pin_memory=on_gpu)
        self._done = torch.cuda.Event() if on_gpu else None
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._launches: list[_Launch] = []
        self._on_host: list[int] = []
        self._seed = seed
        self._running = threading.Lock()
        with torch.inference_mode(), self._guard():
            self._make(seed)

    @property
    def launches(self) -> int:
        """Our kernels that one run launches; without copies and the clearing of sums."""
        return len(self._launches)

    def launch(self) -> None:
        """Enqueues everything on the device's current stream. `collect` must follow, before another `launch`."""
        with torch.inference_mode(), self._guard():
            for scratch, view in self._copies:
                scratch.copy_(view)
            self._sums.zero_()
            for launch in self._launches:
                launch.run(self._sums, self._marks)
            self._found.copy_(self._sums, non_blocking=True)
            if self._done is not None:
                self._done.record()

    def collect(self) -> list[int]:
        """Waits only for what was launched; returns the digests, in order. Raises DEADLINE_EXCEEDED if a GPU hangs."""
        self._wait()
        count = len(self._zeros)
        found: list[int] = (self._found[:count].numpy().view(np.uint64) + self._zeros).tolist()
        marks = self._found[len(self._marks) :] if self._finite else self._found.new_zeros(count)
        self.not_finite = [bool(mark) for mark in marks[:count].tolist()]
        for place in self._on_host:
            view, start, served = self._boxes[place]
            digests = HostDigests([(view.to(device="cpu", dtype=served), start)], self._seed, finite=self._finite)
            (found[place],), (self.not_finite[place],) = digests.run(), digests.not_finite
        return found

    def run(self) -> list[int]:
        """Launches and collects. May be called from several threads, which then take turns."""
        with self._running:
            self.launch()
            return self.collect()

    def _wait(self) -> None:
        stop_at = time.monotonic() + HANG_SECONDS
        while self._done is not None and not self._done.query():
            if time.monotonic() > stop_at:
                raise deadline(
                    f"digests on {self._device} did not arrive within {HANG_SECONDS:g} s: the GPU hangs, or what was "
                    "queued on it before takes longer"
                )
            time.sleep(_POLL_SECONDS)

    def forget(self) -> bool:
        """Drops the views, if tables alone are enough to run; returns whether. Boxes must stay where they are."""
        if self._copies or self._on_host:
            return False
        self._boxes.clear()
        return True

    def _guard(self) -> AbstractContextManager[object]:
        """Triton launches on the current device."""
        return torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()

    def _make(self, seed: int) -> None:
        # All addresses count from one tensor of our own: see `origin` in the kernel.
        origin = torch.empty(ALIGNMENT, dtype=torch.uint8, device=self._device)
        tables: dict[_LoadKind, TileTable] = {}
        copied: list[str] = []
        for place, (view, start, served) in enumerate(self._boxes):
            why = self._add(tables, view, start, served, place, seed, origin)
            if why:
                copied.append(why)
                self._copy_first(tables, place, seed, origin)
        for kind, table in tables.items():
            tiles = table.tiles()
            factors = torch.from_numpy(tiles.factors.view("int64")).to(self._device)
            for work, wide in ((tiles.aligned, True), (tiles.unaligned, False)):
                if len(work):
                    self._launches.append(_Launch(kind, wide, 0, work, factors, origin))
            for lanes, work in tiles.flat.items():
                self._launches.append(_Launch(kind, False, lanes, work, factors, origin))
        if copied:
            log.warning(
                "%d of %d boxes are copied before each digest, %d on %s (%d bytes) and %d to the host: %s",
                *(len(copied), len(self._boxes), len(self._copies), self._device),
                *(sum(scratch.nbytes for scratch, _ in self._copies), len(self._on_host)),
                "; ".join(dict.fromkeys(copied[:3])),
            )

    def _add(
        self,
        tables: dict[_LoadKind, TileTable],
        view: torch.Tensor,
        start: tuple[int, ...],
        served: torch.dtype,
        place: int,
        seed: int,
        origin: torch.Tensor,
    ) -> str:
        """Adds a box to the table of its kind, or returns why that is impossible."""
        kind = _kind(view, served)
        if kind is None:
            return f"{view.dtype} digested as {served}"
        lanes = view.itemsize // kind.unit.itemsize
        if self._finite and (rule := RULES.get(dtype_name(served))) is not None:
            kind = kind._replace(rule=rule, lanes=lanes // 2 if served.is_complex else lanes)
        if kind not in tables:
            tables[kind] = TileTable(seed, kind.unit.itemsize, origin.data_ptr())
        try:
            tables[kind].add(Strided(view.data_ptr(), tuple(view.shape), tuple(view.stride()), start, lanes), place)
        except NotTileableError as error:
            return str(error)
        return ""

    def _copy_first(self, tables: dict[_LoadKind, TileTable], place: int, seed: int, origin: torch.Tensor) -> None:
        """Adds a copy of a box to the tables. If there is no room for it, or it cannot be digested here either, the
        host will digest the box."""
        view, start, served = self._boxes[place]
        try:
            scratch = torch.empty(view.shape, dtype=served, device=self._device)
        except torch.OutOfMemoryError:
            self._on_host.append(place)
            return
        if self._add(tables, scratch, start, served, place, seed, origin):
            self._on_host.append(place)
        else:
            self._copies.append((scratch, view))


class _Launch:
    """One launch of the kernel, with its table on the device. Compiles when made."""

    def __init__(
        self, kind: _LoadKind, wide: bool, flat: int, work: Table, factors: torch.Tensor, origin: torch.Tensor
    ) -> None:
        """flat: lanes of an element, if the table is of flat tiles."""
        self._kind = kind
        self._vector = ALIGNMENT // kind.unit.itemsize if wide else 1
        self._flat = flat
        self._words = wide and kind.unit.itemsize == 1 and kind.rule is not None
        self._work = torch.from_numpy(work.view("int64")).to(factors.device)
        self._factors = factors
        self._origin = origin.view(torch.uint32 if self._words else kind.unit)
        nothing = torch.zeros(FIELDS, dtype=torch.int64, device=factors.device)
        sums = torch.zeros(4, dtype=torch.int64, device=factors.device)
        self._start(nothing, 1, sums[:2], sums[2:])

    def run(self, sums: torch.Tensor, marks: torch.Tensor) -> None:
        self._start(self._work, len(self._work), sums, marks)

    def _start(self, work: torch.Tensor, programs: int, sums: torch.Tensor, marks: torch.Tensor) -> None:
        from ckpt_engine.digest.cuda_kernel import digest_flat, digest_tiles, digest_words

        block = BLOCK_BYTES // self._kind.unit.itemsize
        tables = work, self._origin, self._factors, sums, marks
        flip, keep, least = 0, 0, 0
        if (rule := self._kind.rule) is not None:
            flip, keep = rule.of_lane(self._kind.lanes - 1, 8 * min(self._kind.unit.itemsize, 2))
            least = rule.least
        look = {"FLIP": flip, "KEEP": keep, "LEAST": least, "LANES_OF_NUMBER": self._kind.lanes}
        if self._flat:
            digest_flat[(programs,)](
                *tables, BLOCK=block, KIND=self._kind.number, LANES_OF_ELEMENT=self._flat, **look, num_warps=_WARPS
            )
            return
        if self._words:
            both = keep == 0xFF
            digest_words[(programs,)](
                *tables,
                BLOCK=block,
                ROWS=_ROWS,
                STAGES=_STAGES,
                FLIP=flip,
                STEP=(0x100 if both else 0x80) - least,
                BOTH=both,
                num_warps=_WARPS,
            )
            return
        digest_tiles[(programs,)](
            *tables,
            BLOCK=block,
            ROWS=_ROWS,
            KIND=self._kind.number,
            VECTOR=self._vector,
            STAGES=_STAGES,
            **look,
            num_warps=_WARPS,
        )


def _kind(view: torch.Tensor, served: torch.dtype) -> _LoadKind | None:
    """How to load a view; None if it must be copied, or cast by torch, first."""
    if view.is_conj() or view.is_neg():
        return None
    if view.dtype == served:
        return _BYTES if view.itemsize == 1 else _LANES
    return _CASTS.get(served) if view.dtype == torch.float32 else None
