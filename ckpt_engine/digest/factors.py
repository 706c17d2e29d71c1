"""The digest's formula: one 64-bit sum for the bytes of a box, wherever and however they lie. Pure; numpy only.

Every implementation (digest/host.py on a CPU, digest/cuda.py on a GPU) agrees on it to the bit, modulo 2^64:

    digest(box) = digest_of_zeros(dtype, box)
                + sum over elements e of the box, sum over lanes l of e:
                      lane(e, l) * word(0, l) * word(1, i0) * word(2, i1) * ...

- i0, i1, ... are the element's *global* coordinates, so digests of disjoint boxes add up to that of their union.
- The lanes of an element are its bytes in memory order as unsigned little-endian 16-bit numbers; an element of one byte
  is one lane of that byte, zero-extended. bfloat16 has 1 lane, float32 2, complex64 4.
- word(a, i) is an odd 64-bit hash: a = 0 for lanes, a = d + 1 for axis d.
- digest_of_zeros adds up over disjoint boxes, too, and no element changes it. Without it, zeros of any shape and dtype
  would have the digest 0, as an empty box has.

An element's factor depends on its coordinates only, not on dtype, device or strides. As every factor is odd, a change
of one lane always changes the digest; other changes escape with a probability of about 2^-48 or less (two flipped top
bits of lanes have the highest). It guards against faults, not against an adversary who chooses weights.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

SEED = 0x636B70742D656E67  # "ckpt-eng"

Words = npt.NDArray[np.uint64]

Axis = tuple[int, int, int]
"""(axis number in `word`, first coordinate, length)"""

LANE_AXIS = 0
"""Axis number of the lanes of an element in `word`; axis d of the tensor has number d + 1."""

ONE: Words = np.ones(1, dtype=np.uint64)

MASK = (1 << 64) - 1
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


@lru_cache(maxsize=1 << 16)
def digest_of_zeros(dtype: str, start: tuple[int, ...], shape: tuple[int, ...], seed: int = SEED) -> int:
    """The digest of a box of zero bytes; 0 if it has no element. dtype: its name, such as "bfloat16".

    kind(dtype) * (edge(0, stop0) - edge(0, start0)) * (edge(1, stop1) - edge(1, start1)) * ... modulo 2^64, where kind
    is the first 8 bytes of SHA-256 of the name, little-endian, made odd, and edge(d, i) is what `word(-(d + 1), i)` is
    before it is made odd. Where two boxes touch, their edges cancel out.
    """
    product = int.from_bytes(hashlib.sha256(dtype.encode()).digest()[:8], "little") | 1
    for axis, (first, length) in enumerate(zip(start, shape, strict=True), 1):
        stop = first + length
        product = product * (_mixed(hashed(seed, -axis, stop)) - _mixed(hashed(seed, -axis, first))) & MASK
    return product


def mix(x: int) -> int:
    """The result of splitmix64's finaliser, made odd."""
    return _mixed(x) | 1


def _mixed(x: int) -> int:
    x = ((x ^ (x >> 30)) * MIX_1) & MASK
    x = ((x ^ (x >> 27)) * MIX_2) & MASK
    return x ^ (x >> 31)


def hashed(seed: int, axis: int, index: int) -> int:
    """The number that `word` mixes; for the next coordinate it is INDEX_STEP more."""
    return (seed + axis * _AXIS_STEP + (index + 1) * INDEX_STEP) & MASK


def widened(digest: int, start: tuple[int, ...], shape: tuple[int, ...], seed: int = SEED) -> int:
    """The digest of a box of bfloat16 values after a cast to float32: each value is in the upper lane of its element,
    and zero in the lower one."""
    zeros, wide_zeros = (digest_of_zeros(dtype, start, shape, seed) for dtype in ("bfloat16", "float32"))
    return (digest - zeros) * pow(word(seed, LANE_AXIS, 0), -1, MASK + 1) * word(seed, LANE_AXIS, 1) + wide_zeros & MASK


def words(first: int, length: int) -> Words:
    """`word` of `length` coordinates; `first` is the hash of the first one."""
    x = np.arange(length, dtype=np.uint64)
    x *= np.uint64(INDEX_STEP)
    x += np.uint64(first)
    for shift, factor in ((30, MIX_1), (27, MIX_2)):
        x ^= x >> np.uint64(shift)
        x *= np.uint64(factor)
    x ^= x >> np.uint64(31)
    x |= np.uint64(1)
    return x


def outer_words(seed: int, axes: Sequence[Axis]) -> Words:
    """Factors of a block of coordinates in row-major order: the products over its axes, from the slowest to the
    fastest."""
    product = ONE
    for number, start, length in axes:
        product = np.multiply.outer(product, words(hashed(seed, number, start), length)).ravel()
    return product


def element_words(seed: int, lanes: int, axes: Sequence[Axis]) -> Words:
    """Factors of a block with one entry for each of `lanes` 16-bit lanes of an element, elements slowest."""
    return outer_words(seed, (*axes, (LANE_AXIS, 0, lanes)))
