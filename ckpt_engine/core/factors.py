"""The factors of the digest (see core/digest.py): what each coordinate and each lane is multiplied by. Pure.

Factor vectors are kept, because thousands of tensors share a few shapes; the store is bounded in bytes and may be used
from several threads.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

Words = npt.NDArray[np.uint64]

Axis = tuple[int, int, int]
"""(axis number in `word`, first coordinate, length)"""

LANE_AXIS = 0
"""Axis number of the lanes of an element in `word`; axis d of the tensor has number d + 1."""

LIMB_BITS = 7
LIMBS = 10
LIMB_COLUMNS = 16
"""Ten limbs of 7 bits hold a factor; matrix units work in multiples of 16 columns, so the others are zero."""

ONE: Words = np.ones(1, dtype=np.uint64)

_CACHE_BYTES = 128 << 20
_MASK = (1 << 64) - 1
_AXIS_STEP = 0xD1B54A32D192ED03
INDEX_STEP = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB


def word(seed: int, axis: int, index: int) -> int:
    """The odd 64-bit factor of coordinate `index` on axis number `axis` (LANE_AXIS, or 1 + the axis of the tensor).

    mix(seed + axis * 0xD1B54A32D192ED03 + (index + 1) * 0x9E3779B97F4A7C15) | 1 modulo 2^64, where mix is the finaliser
    of splitmix64: x ^= x >> 30; x *= 0xBF58476D1CE4E5B9; x ^= x >> 27; x *= 0x94D049BB133111EB; x ^= x >> 31.
    """
    return mix(hashed(seed, axis, index))


def mix(x: int) -> int:
    """The odd number that splitmix64's finaliser makes of one."""
    x = ((x ^ (x >> 30)) * MIX_1) & _MASK
    x = ((x ^ (x >> 27)) * MIX_2) & _MASK
    return (x ^ (x >> 31)) | 1


def hashed(seed: int, axis: int, index: int) -> int:
    """What `word` mixes; INDEX_STEP more for the next coordinate."""
    return (seed + axis * _AXIS_STEP + (index + 1) * INDEX_STEP) & _MASK


def words(seed: int, axis: int, start: int, length: int) -> Words:
    """`word` of `length` coordinates from `start` on. Not to be written to."""
    return _store.get(("words", seed, axis, start, length), lambda: _words(seed, axis, start, length))


def element_words(seed: int, lanes: int, axes: tuple[Axis, ...]) -> Words:
    """Factors of the lanes of a block of elements in row-major order: the products over its axes.

    axes: from the slowest to the fastest. lanes: 16-bit lanes an element. The result has
    one entry a lane, elements slowest. Not to be written to.
    """
    key = ("elements", seed, lanes, axes)
    return _store.get(key, lambda: _outer([words(seed, *axis) for axis in (*axes, (LANE_AXIS, 0, lanes))]))


def outer_words(seed: int, axes: Sequence[Axis]) -> Words:
    """Factors of a block of coordinates in row-major order: the products over its axes, which are as above."""
    return words(seed, *axes[0]) if len(axes) == 1 else _outer([words(seed, *axis) for axis in axes])


def byte_limbs(seed: int, itemsize: int, axes: tuple[Axis, ...]) -> tuple[torch.Tensor, int]:
    """Factors of the *bytes* of a block of elements, as signed 7-bit limbs, and the sum of the factors.

    The matrix is [bytes, LIMB_COLUMNS]: column j counts 2^(7 j), so a factor is the weighted sum of its row modulo
    2^64. The upper byte of a lane has 256 times the factor of the lower one. Not to be written to.
    """
    return _store.get(("limbs", seed, itemsize, axes), lambda: _byte_limbs(seed, itemsize, axes))


def _words(seed: int, axis: int, start: int, length: int) -> Words:
    first = hashed(seed, axis, start)
    x = np.arange(length, dtype=np.uint64)
    x *= np.uint64(INDEX_STEP)
    x += np.uint64(first)
    for shift, factor in ((30, MIX_1), (27, MIX_2)):
        x ^= x >> np.uint64(shift)
        x *= np.uint64(factor)
    x ^= x >> np.uint64(31)
    x |= np.uint64(1)
    return x


def _outer(vectors: list[Words]) -> Words:
    product = np.ones(1, dtype=np.uint64)
    for vector in vectors:
        product = np.multiply.outer(product, vector).ravel() if product.size > 1 else product[0] * vector
    return product


def _byte_limbs(seed: int, itemsize: int, axes: tuple[Axis, ...]) -> tuple[torch.Tensor, int]:
    left = element_words(seed, (itemsize + 1) // 2, axes)
    left = np.stack([left, left * np.uint64(256)], axis=1).ravel() if itemsize > 1 else left.copy()
    total = int(np.add.reduce(left))
    limbs = np.zeros((left.size, LIMB_COLUMNS), dtype=np.int8)
    half = np.uint64(1 << (LIMB_BITS - 1))
    for column in range(LIMBS):
        digit = ((left + half) & np.uint64((1 << LIMB_BITS) - 1)).astype(np.int64) - int(half)
        limbs[:, column] = digit
        left -= digit.astype(np.uint64)
        left >>= np.uint64(LIMB_BITS)
    return torch.from_numpy(limbs), total


Kept = TypeVar("Kept", Words, tuple[torch.Tensor, int])


class _Store:
    """What was computed last, up to a number of bytes."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._kept: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()
        self.bytes = 0

    def get(self, key: Hashable, make: Callable[[], Kept]) -> Kept:
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
                value: Kept = found[0]
                return value
        made = make()  # outside the lock: two threads may make the same, which harms nobody
        size = made[0].nbytes if isinstance(made, tuple) else made.nbytes
        with self._lock:
            if key not in self._kept and size <= self._limit // 4:
                self._kept[key] = made, size
                self.bytes += size
            while self.bytes > self._limit:
                self.bytes -= self._kept.popitem(last=False)[1][1]
        return made


_store = _Store(_CACHE_BYTES)
