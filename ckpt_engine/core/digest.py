"""Digests of boxes: one 64-bit sum for the bytes of a box, wherever and however they lie.

The formula, which every implementation (this one, a GPU kernel) must agree on to the bit, modulo 2^64:

    digest(box) = sum over elements e of the box, sum over lanes l of e:
                      lane(e, l) * word(0, l) * word(1, i0) * word(2, i1) * ...

- i0, i1, ... are the element's *global* coordinates, so digests of disjoint boxes add up to that of their union.
- The lanes of an element are its bytes in memory order as unsigned little-endian 16-bit numbers; an element of one byte
  is one lane of that byte, zero-extended. bfloat16 has 1 lane, float32 2, complex64 4.
- word(a, i) is the odd 64-bit hash of core/factors.py, with SEED: a = 0 for lanes, a = d + 1 for axis d.

An element's factor depends on its coordinates only, not on dtype, device or strides. As every factor is odd, a change
of one lane always changes the digest; other changes escape with a probability of about 2^-48 or less (two flipped top
bits of lanes have most). It guards against faults, not against an adversary who chooses weights.

On a CPU (measured in benchmarks/test_digest.py) the sum over the fastest axes is an 8-bit integer matrix product: bytes
times factors, the latter split into signed 7-bit limbs, so that no 32-bit sum (nor a 16-bit one of a pair, inside of
processors without VNNI) can overflow. Few rows, and small boxes, go through numpy. Both are exact, and equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from math import prod

import numpy as np
import torch

from ckpt_engine.core.dtypes import dtype_name
from ckpt_engine.core.factors import (
    LIMB_BITS,
    LIMB_COLUMNS,
    LIMBS,
    ONE,
    Axis,
    byte_limbs,
    element_words,
    outer_words,
    word,
    words,
)
from ckpt_engine.core.problems import invalid
from ckpt_engine.core.threads import share_out

SEED = 0x636B70742D656E67  # "ckpt-eng"

_MASK = (1 << 64) - 1
_SMALL_LANES = 8 << 10  # up to here a box is one scalar product
_INNER_BYTES = 16 << 10  # of one row of a matrix product; sums stay below 2^7 * 2^6 * 2^14, far from 2^31
_SCRATCH_BYTES = 2 << 20  # a thread; less pays for the factors' rearrangement too often, more leaves the caches
_GEMM_ROWS = 12  # below, numpy is faster
_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_LANE = {1: np.uint8, 2: np.uint16, 4: np.uint16, 8: np.uint16}
_SIGN = {1: 0x80, 2: -0x7F80, 4: -0x7F7F7F80, 8: -0x7F7F7F7F7F7F7F80}  # 0x80 in every byte, as a signed number


def digest_box(tensor_view: torch.Tensor, start: Sequence[int], seed: int = SEED) -> int:
    """The digest of one box. `tensor_view` holds its elements (any strides), `start` is its first global coordinate.

    Raises INVALID_ARGUMENT for an unsupported dtype or a start that does not fit the tensor.
    """
    return digest_boxes([(tensor_view, start)], seed)[0]


def digest_boxes(
    boxes: Sequence[tuple[torch.Tensor, Sequence[int]]],
    seed: int = SEED,
    served: Sequence[torch.dtype | None] | None = None,
) -> list[int]:
    """The digest of each box, in order; see `digest_box`. Meant for thousands of them.

    served: of each box the dtype that it is digested as (see core/prepared_digests.py, which is also for boxes that are
    digested again and again); None: its own. What lies on a GPU is digested there. On a CPU, uses as many threads as
    torch does in the calling one (`torch.get_num_threads()`), but not torch's: see core/threads.py. Outside of the
    interpreter's lock for the most part; 2 MiB of scratch memory a thread.
    """
    if served is None and all(view.device.type == "cpu" for view, _ in boxes):
        return digest_host_boxes(boxes, seed)
    from ckpt_engine.core.prepared_digests import digest_anywhere

    return digest_anywhere(boxes, seed, served)


def digest_host_boxes(boxes: Sequence[tuple[torch.Tensor, Sequence[int]]], seed: int = SEED) -> list[int]:
    """As `digest_boxes`, of boxes in the host's memory and as they are."""
    checked = [_box(view, tuple(start)) for view, start in boxes]
    threads = torch.get_num_threads()
    if threads == 1 or all(_lane_count(memory) <= _SMALL_LANES for memory, _ in checked):
        return _digests(checked, seed)
    digests = [0] * len(checked)
    shares = _shares(checked, threads)
    found = share_out(lambda share: _digests([box for _, box in share], seed), shares, threads)
    for share, sums in zip(shares, found, strict=True):
        for (index, _), each in zip(share, sums, strict=True):
            digests[index] = digests[index] + each & _MASK
    return digests


def checked_box(view: torch.Tensor, start: tuple[int, ...], served: torch.dtype | None = None) -> torch.Tensor:
    """The plain tensor to digest. Raises INVALID_ARGUMENT for an unsupported dtype or a start that does not fit."""
    if view.dim() != len(start):
        raise invalid(f"a box of shape {list(view.shape)} cannot start at {list(start)}; give one entry an axis")
    dtype_name(view.dtype)
    if served is not None:
        dtype_name(served)
    if type(view) is not torch.Tensor:
        view = view.as_subclass(torch.Tensor)
    return view.detach()


_Box = tuple[torch.Tensor, tuple[int, ...]]
"""Elements as integers of their size, and the first one's global coordinates."""


def _box(view: torch.Tensor, start: tuple[int, ...]) -> _Box:
    view = checked_box(view, start)
    if view.is_complex():
        view = view.resolve_conj()
    return view.view(_INTEGER[view.itemsize]), start


def _lane_count(memory: torch.Tensor) -> int:
    return memory.numel() * max(memory.itemsize // 2, 1)


def _digests(boxes: Sequence[_Box], seed: int) -> list[int]:
    with torch.inference_mode():
        digester = _Digester(seed)
        return [digester.box(memory, start) for memory, start in boxes]


def _shares(boxes: Sequence[_Box], threads: int) -> list[list[tuple[int, _Box]]]:
    """Work for threads, several shares for each: parts of boxes, each with its box's index. Large boxes are split."""
    most = max(sum(memory.nbytes for memory, _ in boxes) // (4 * threads), _SCRATCH_BYTES)
    shares: list[list[tuple[int, _Box]]] = [[]]
    room = most
    for index, box in enumerate(boxes):
        for part in _split(*box, most):
            if room <= 0:
                shares.append([])
                room = most
            shares[-1].append((index, part))
            room -= part[0].nbytes
    return shares


def _split(memory: torch.Tensor, start: tuple[int, ...], most: int) -> list[_Box]:
    """Parts along the longest axis, of about `most` bytes."""
    count = -(-memory.nbytes // most)
    if count <= 1:
        return [(memory, start)]
    axis = max(range(memory.dim()), key=lambda axis: memory.shape[axis])
    step = -(-memory.shape[axis] // count)
    return [
        (memory.narrow(axis, first, length), (*start[:axis], start[axis] + first, *start[axis + 1 :]))
        for first, length in _spans(memory.shape[axis], step)
    ]


class _Digester:
    """Digests boxes one after the other, with one scratch buffer."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._scratch_bytes = _SCRATCH_BYTES
        self._scratch: torch.Tensor | None = None
        self._gemm = gemm_is_exact()

    def box(self, memory: torch.Tensor, start: tuple[int, ...]) -> int:
        if memory.numel() == 0:
            return 0
        scale = 1
        axes: list[Axis] = []
        for axis, (first, length) in enumerate(zip(start, memory.shape, strict=True), start=1):
            if length == 1:
                scale = scale * word(self._seed, axis, first) & _MASK
            else:
                axes.append((axis, first, length))
        if len(axes) < memory.dim():
            memory = memory.squeeze()
        strides = memory.stride()
        if any(fast > slow for slow, fast in pairwise(strides)):
            order = sorted(range(memory.dim()), key=lambda axis: -strides[axis])
            memory = memory.permute(order)
            axes = [axes[axis] for axis in order]
        return scale * self._sum(memory, tuple(axes)) & _MASK

    def _sum(self, memory: torch.Tensor, axes: tuple[Axis, ...]) -> int:
        """Of integers with these axes, the fastest in memory last."""
        size = memory.itemsize
        if _lane_count(memory) <= _SMALL_LANES:
            return self._small(memory, axes)
        width = axes[-1][2]
        if width * size > _INNER_BYTES:
            blocks = -(-width * size // _INNER_BYTES)
            step = -(-width // blocks)
            return sum(
                self._sum(memory.narrow(-1, first, count), _narrowed(axes, -1, first, count))
                for first, count in _spans(width, step)
            )
        inner = len(axes) - 1
        while inner and width * axes[inner - 1][2] * size <= _INNER_BYTES:
            inner -= 1
            width *= axes[inner][2]
        return self._rows(memory, axes, inner, width)

    def _rows(self, memory: torch.Tensor, axes: tuple[Axis, ...], inner: int, width: int) -> int:
        """Rows of `width` elements, those of axes[inner:]; as many at a time as fit the scratch."""
        if not inner:
            return self._block(memory, axes, 0, width)
        fitting = max(self._scratch_bytes // (width * memory.itemsize), 1)
        below = prod(length for _, _, length in axes[1:inner])  # rows in each step along the first axis
        if below * axes[0][2] <= fitting:
            return self._block(memory, axes, inner, width)
        if below >= fitting:
            factors = words(self._seed, *axes[0])
            sums = (self._rows(part, axes[1:], inner - 1, width) for part in memory)
            return sum(int(factor) * each for factor, each in zip(factors, sums, strict=True))
        return sum(
            self._block(memory[first : first + count], _narrowed(axes, 0, first, count), inner, width)
            for first, count in _spans(axes[0][2], fitting // below)
        )

    def _block(self, memory: torch.Tensor, axes: tuple[Axis, ...], inner: int, width: int) -> int:
        """Rows that fit the scratch."""
        size = memory.itemsize
        rows = memory.numel() // width
        outer = outer_words(self._seed, axes[:inner]) if inner else ONE
        if rows < _GEMM_ROWS or not self._gemm:
            lanes = _lanes(memory, rows)
            sums = np.einsum("rl,l->r", lanes, element_words(self._seed, max(size // 2, 1), axes[inner:]))
            return int(np.dot(outer, sums))
        limbs, total = byte_limbs(self._seed, size, axes[inner:])
        if self._scratch is None:
            self._scratch = torch.empty(self._scratch_bytes, dtype=torch.uint8)
        flipped = self._scratch[: rows * width * size].view(memory.dtype).view(memory.shape)
        torch.bitwise_xor(memory, _SIGN[size], out=flipped)  # unsigned bytes less 128 are signed bytes
        products = torch._int_mm(flipped.view(-1).view(torch.int8).view(rows, width * size), limbs).numpy()
        columns = np.dot(outer, products[:, :LIMBS].astype(np.uint64))
        return sum(int(column) << (LIMB_BITS * index) for index, column in enumerate(columns)) + 128 * total * int(
            np.add.reduce(outer)
        )

    def _small(self, memory: torch.Tensor, axes: tuple[Axis, ...]) -> int:
        factors = element_words(self._seed, max(memory.itemsize // 2, 1), axes)
        return int(np.dot(_lanes(memory, 1)[0].astype(np.uint64), factors))


def _lanes(memory: torch.Tensor, rows: int) -> np.ndarray[tuple[int, int], np.dtype[np.unsignedinteger]]:
    """The lanes, [rows, lanes of a row]; copies only what is not contiguous."""
    return memory.contiguous().numpy().reshape(rows, -1).view(_LANE[memory.itemsize])


def _narrowed(axes: tuple[Axis, ...], place: int, first: int, length: int) -> tuple[Axis, ...]:
    changed = list(axes)
    axis, start, _ = axes[place]
    changed[place] = axis, start + first, length
    return tuple(changed)


def _spans(length: int, step: int) -> list[tuple[int, int]]:
    return [(first, min(step, length - first)) for first in range(0, length, step)]


@cache
def gemm_is_exact() -> bool:
    """Whether this torch multiplies 8-bit integers on the CPU, exactly, in the worst cases that digests have.

    The operator is not public; where it is missing or wrong, digests come from numpy, equal and slower.
    """
    rows = torch.full((_GEMM_ROWS, _INNER_BYTES), -128, dtype=torch.int8)
    rows[1] = 127
    rows[2, ::2] = 127
    columns = torch.full((_INNER_BYTES, LIMB_COLUMNS), -64, dtype=torch.int8)
    columns[:, 1] = 63
    columns[::2, 2] = 63
    try:
        found = torch._int_mm(rows, columns)
    except (AttributeError, RuntimeError, NotImplementedError):
        return False
    exact = rows.numpy().astype(np.int64) @ columns.numpy().astype(np.int64)
    return found.dtype == torch.int32 and bool((found.numpy() == exact).all())
