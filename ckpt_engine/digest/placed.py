"""Some elements of a box where they lie: found, read, written, and what the digest of the box gained by that.

It decides neither which elements these are, nor what the gain must be (`install/changes.py` does). Places are row-major
in the box, uint32, and rise. Elements travel as unsigned numbers of their width. A box of the host's memory is walked
by kernels that Numba compiles, outside of the interpreter's lock; one on a GPU by torch.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from ckpt_engine.core.problems import data_loss
from ckpt_engine.digest.changes import changed_digest
from ckpt_engine.digest.factors import LANE_AXIS, SEED, hashed, words
from ckpt_engine.digest.host import checked_box

if TYPE_CHECKING:
    from ckpt_engine.digest.host_kernel import FindKernel, ReadKernel, SumKernel, WriteKernel

log = logging.getLogger(__name__)

Places = npt.NDArray[np.uint32]
Elements = npt.NDArray[Any]
"""Unsigned numbers of an element's width, one axis."""

_TORCH_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class PlacedBox(Protocol):
    """A box whose elements are read and written one by one. Any thread, for places of its own."""

    def read(self, places: Places) -> Elements:
        """Copies the elements at these places to the host. Raises DATA_LOSS if a place lies outside the box or does not
        rise."""
        ...

    def write(self, places: Places, elements: Elements) -> None:
        """Writes elements. places: as they were read before."""
        ...

    def gain(self, places: Places, before: Elements) -> int:
        """Reads what lies there now, and returns what the box's digest gained since these elements were `before`,
        modulo 2^64."""
        ...


def placed_box(view: torch.Tensor, start: Sequence[int]) -> PlacedBox | None:
    """The box whose elements are those of `view`, of one axis or more; None: this process cannot do it. start: the
    box's first global coordinate. Raises INVALID_ARGUMENT as `digest_box`."""
    plain = checked_box(view, tuple(start))
    if not plain.dim() or not plain.numel() or plain.is_conj() or plain.is_neg() or plain.itemsize not in _TORCH_BITS:
        return None
    if plain.device.type == "cuda":
        return _DeviceBox(plain, start)
    kernels = _kernels(plain.itemsize) if plain.device.type == "cpu" else None
    return None if kernels is None else _HostBox(plain, start, kernels)


def warm_up(dtypes: Collection[torch.dtype]) -> None:
    """Loads or compiles the kernels for host memory: seconds in a process's first call. Never raises."""
    for width in {dtype.itemsize for dtype in dtypes} & _TORCH_BITS.keys():
        _kernels(width)


@cache
def _kernels(width: int) -> tuple[ReadKernel, WriteKernel, SumKernel] | None:
    try:
        from ckpt_engine.digest.host_kernel import compiled_placed

        return compiled_placed(width)
    except Exception as error:  # as `host.warm_up` tells
        log.warning("versions are installed in full, not by what changed: %s", f"{error}".partition("\n")[0])
        return None


def differing(one: Elements, other: Elements) -> Places:
    """The numbers of the elements in which two memories of this host differ, rising. Both are contiguous. Made for few:
    where many differ, `delta.coding.changed_places` takes less time."""
    kernel = _find(one.itemsize)
    if kernel is None:
        return np.flatnonzero(one != other).astype(np.uint32)
    whole = one.nbytes // 8 * 8  # bytes, of whole words
    one_words, other_words = (each.view(np.uint8)[:whole].view(np.uint64) for each in (one, other))
    found = np.empty(len(one) // 16 + 16, dtype=np.uint32)
    count = kernel(one_words, other_words, one, other, found)
    if count > len(found):
        found = np.empty(count, dtype=np.uint32)
        kernel(one_words, other_words, one, other, found)
    return found[:count].copy()


def warm_up_search() -> None:
    """Loads or compiles what finds differing elements of two bytes. Never raises."""
    _find(2)


@cache
def _find(width: int) -> FindKernel | None:
    try:
        from ckpt_engine.digest.host_kernel import compiled_find

        return compiled_find(width)
    except Exception as error:  # as `host.warm_up` tells
        log.warning("versions are compared by numpy, slowly: %s", f"{error}".partition("\n")[0])
        return None


def _flat(view: torch.Tensor) -> torch.Tensor:
    """The memory from a box's first element to its last one, as numbers of its elements' width."""
    span = 1 + sum((length - 1) * step for length, step in zip(view.shape, view.stride(), strict=True))
    return view.as_strided((span,), (1,)).view(_TORCH_BITS[view.itemsize])


class _HostBox:
    """A box of this host's memory."""

    def __init__(
        self, view: torch.Tensor, start: Sequence[int], kernels: tuple[ReadKernel, WriteKernel, SumKernel]
    ) -> None:
        self._read, self._write, self._sum = kernels
        self._memory = _flat(view).numpy().view(f"u{view.itemsize}")
        hashes = [hashed(SEED, axis, first) for axis, first in enumerate(start, 1)]
        rows = [*zip(view.shape, view.stride(), hashes, strict=True)]
        self._axes = np.array(rows, dtype=np.uint64).reshape(len(rows), 3)
        self._lanes = words(hashed(SEED, LANE_AXIS, 0), max(1, view.itemsize // 2))

    def read(self, places: Places) -> Elements:
        found = np.empty(len(places), dtype=self._memory.dtype)
        count = self._read(places, self._axes, self._memory, found)
        if count != len(places):
            raise data_loss(f"element {places[count]} of {math.prod(self._axes[:, 0].tolist())} cannot have changed")
        return found

    def write(self, places: Places, elements: Elements) -> None:
        self._write(places, self._axes, self._memory, elements)

    def gain(self, places: Places, before: Elements) -> int:
        return int(self._sum(places, self._axes, self._memory, before, self._lanes))


class _DeviceBox:
    """A box on a GPU. Works on the current stream."""

    def __init__(self, view: torch.Tensor, start: Sequence[int]) -> None:
        self._view = view
        self._start = tuple(start)
        self._memory = _flat(view)
        self._bits = f"u{view.itemsize}"

    def read(self, places: Places) -> Elements:
        if len(places) and (int(places[-1]) >= self._view.numel() or (np.diff(places.astype(np.int64)) <= 0).any()):
            raise data_loss(f"elements up to {places[-1]} of {self._view.numel()} cannot have changed")
        found: Elements = self._memory[self._offsets(self._indices(places))].cpu().numpy().view(self._bits)
        return found

    def write(self, places: Places, elements: Elements) -> None:
        self._memory[self._offsets(self._indices(places))] = self._elements(elements)

    def gain(self, places: Places, before: Elements) -> int:
        indices = self._indices(places)
        bits = self._view.view(self._memory.dtype)
        now = bits[tuple(self._coordinates(indices))]  # torch finds them by the view, not by the offsets of `write`
        return changed_digest(self._start, self._view.shape, indices, self._elements(before), now)

    def _indices(self, places: Places) -> torch.Tensor:
        return torch.from_numpy(places.astype(np.int64)).to(self._view.device)

    def _elements(self, elements: Elements) -> torch.Tensor:
        signed = elements.view("u1" if self._view.itemsize == 1 else f"i{self._view.itemsize}")
        return torch.from_numpy(signed).to(self._view.device)

    def _coordinates(self, places: torch.Tensor) -> list[torch.Tensor]:
        found = []
        for length in reversed(self._view.shape):
            found.append(places % length)
            places = places // length
        return found[::-1]

    def _offsets(self, places: torch.Tensor) -> torch.Tensor:
        offsets = torch.zeros_like(places)
        for at, step in zip(self._coordinates(places), self._view.stride(), strict=True):
            offsets += at * step
        return offsets
