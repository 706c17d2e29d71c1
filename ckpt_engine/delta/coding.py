"""Codes how the elements of a box differ from those of a base: where they differ, and in which bits, compressed.

Each block of elements is coded in the way that takes fewest bytes. It decides neither what the base is, nor whether a
delta is worth its seconds (choice.py). Elements are compared as unsigned numbers of their width, whatever their dtype
makes of them: -0 and 0 differ, and a NaN equals itself if its bits do.

A block is a head and two strings, each compressed by zstd where that makes it shorter:

    gaps    how many equal elements lie before each changed one, as digits of one or two bytes: the highest digit means
            that many and no change yet. Digits of two bytes are all lower bytes, then all upper ones
    words   of the changed elements (XOR: old ^ new; VALUES: new), or of all (DENSE: old ^ new; WHOLE: new, as they
            are): all first bytes, then all second ones, ...

Gaps follow a geometric distribution where changes are scattered, and the upper bytes of what small steps of training
change are nearly always equal; zstd's entropy coder makes the most of both.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterator
from enum import IntEnum
from functools import cache
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from ckpt_engine.core.problems import CkptEngineError, data_loss

Bits = npt.NDArray[Any]
"""Elements as unsigned numbers of their width, one axis."""

Places = npt.NDArray[np.int64]
"""Where elements are, rising."""

BLOCK = 1 << 20
"""Elements of a block. Bounds the memory that coding takes: some tens of megabytes a thread."""

_LEVEL = 1  # of zstd: its entropy coder does the work here, and higher levels find no repetitions either
_SAMPLE = 1 << 13  # words by which XOR and VALUES are compared
_SPARSE = 0.5  # of a block's elements: if more changed, places cost more than they save
_NEAR = 500  # elements between two changes, on average, up to which digits of one byte are shorter

_HEAD = struct.Struct("<BBxxIIII")
"""Kind, bytes of a digit, changed elements, digits, bytes of the gaps as they are here, and of the words."""


class Kind(IntEnum):
    """How a block is coded."""

    SAME = 0  # nothing changed
    XOR = 1  # gaps, and old ^ new of what changed
    VALUES = 2  # gaps, and the new elements
    DENSE = 3  # old ^ new of all elements
    WHOLE = 4  # the new elements, all of them


class _Local(threading.local):
    """Compressors may be used by one thread at a time."""

    def __init__(self) -> None:
        import zstandard

        self.compressor = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=False, write_content_size=True)
        self.decompressor = zstandard.ZstdDecompressor()


@cache
def _local() -> _Local:
    return _Local()


def missing() -> str:
    """Why this process can code nothing; empty: it can."""
    try:
        _local()
    except ImportError as error:
        return f"{error}; pip install zstandard"
    return ""


def blocks(elements: int) -> Iterator[slice]:
    """The blocks of a box, in their order."""
    for first in range(0, elements, BLOCK):
        yield slice(first, min(elements, first + BLOCK))


def changed_places(old: Bits, new: Bits) -> Places:
    """Where two blocks differ."""
    return np.flatnonzero(old != new)


def encode_block(old: Bits, new: Bits, places: Places) -> bytes:
    """Codes a block. places: where it differs from the base."""
    if not len(places):
        return _HEAD.pack(Kind.SAME, 0, 0, 0, 0, 0)
    if len(places) > _SPARSE * len(new):
        words = _compressed(_planes(old ^ new))
        if len(words) >= new.nbytes:
            return whole_block(new)
        return _HEAD.pack(Kind.DENSE, 0, len(places), 0, 0, len(words)) + words
    values = new[places]
    differences = old[places] ^ values
    sample = [len(_compressed(_planes(each[:_SAMPLE]))) for each in (differences, values)]
    kind, chosen = (Kind.XOR, differences) if sample[0] <= sample[1] else (Kind.VALUES, values)
    width = 1 if len(new) <= _NEAR * len(places) else 2
    digits = _digits(places, width)
    gaps, words = _compressed(_planes(digits)), _compressed(_planes(chosen))
    if len(gaps) + len(words) >= new.nbytes:
        return whole_block(new)
    return _HEAD.pack(kind, width, len(places), len(digits), len(gaps), len(words)) + gaps + words


def whole_block(new: Bits) -> bytes:
    """Codes a block that has no base, or that differs too much from it."""
    return _HEAD.pack(Kind.WHOLE, 0, len(new), 0, 0, new.nbytes) + new.tobytes()


def decode_block(coded: memoryview, block: Bits) -> tuple[memoryview, int]:
    """Decodes the first block of `coded`. block: the base's elements, which become the new ones.

    Returns what follows in `coded`, and how many elements changed. Raises DATA_LOSS, after which
    the block is neither, if it was not coded for a block of this size.
    """
    if len(coded) < _HEAD.size:
        raise _malformed("it ends in the middle of a block")
    kind, width, changes, digits, gap_bytes, word_bytes = _HEAD.unpack_from(coded)
    rest = coded[_HEAD.size :]
    if gap_bytes + word_bytes > len(rest) or changes > len(block):
        raise _malformed(f"a block of {len(block)} elements has {changes} changes in {gap_bytes + word_bytes} bytes")
    gaps, words = rest[:gap_bytes], rest[gap_bytes : gap_bytes + word_bytes]
    rest = rest[gap_bytes + word_bytes :]
    match kind:
        case Kind.SAME:
            return rest, 0
        case Kind.WHOLE:
            if len(words) != block.nbytes:
                raise _malformed(f"a block of {block.nbytes} bytes comes in {len(words)}")
            new = np.frombuffer(words, block.dtype)
            changes = int(np.count_nonzero(block != new))
            block[:] = new
        case Kind.DENSE:
            block ^= _joined(_plain(words, block.nbytes), block.dtype)
        case Kind.XOR | Kind.VALUES:
            places = _places(gaps, digits, width, changes, len(block))
            chosen = _joined(_plain(words, changes * block.itemsize), block.dtype)
            block[places] = block[places] ^ chosen if kind == Kind.XOR else chosen
        case _:
            raise _malformed(f"a block is coded in way {kind}")
    return rest, changes


# --------------------------------------------------------------------------------------------------------------- gaps


def _digits(places: Places, width: int) -> Bits:
    """The gaps before changes in digits of `width` bytes."""
    dtype = np.dtype(f"<u{width}")
    highest = np.iinfo(dtype).max
    gaps = np.diff(places, prepend=-1) - 1
    skips = gaps // highest
    ends = np.cumsum(skips + 1) - 1
    found = np.full(int(ends[-1]) + 1, highest, dtype=dtype)
    found[ends] = gaps % highest
    return found


def _places(gaps: memoryview, digits: int, width: int, changes: int, elements: int) -> Places:
    """The places that `_digits` was made of. Raises DATA_LOSS."""
    if width not in (1, 2) or not 1 <= changes <= digits <= changes + elements // ((1 << 8 * width) - 1):
        raise _malformed(f"{changes} changes have {digits} digits of {width} bytes")
    found = _joined(_plain(gaps, digits * width), np.dtype(f"<u{width}"))
    ends = np.flatnonzero(found != np.iinfo(found.dtype).max)
    if len(ends) != changes or ends[-1] != digits - 1:
        raise _malformed(f"{len(ends)} changes came, and {changes} were announced")
    places = cast(Places, np.cumsum(found, dtype=np.int64)[ends] + np.arange(changes))
    if places[-1] >= elements:
        raise _malformed(f"element {places[-1]} of {elements} is said to have changed")
    return places


# ------------------------------------------------------------------------------------------------------------- strings


def _planes(words: Bits) -> bytes:
    """All first bytes, then all second ones."""
    return np.ascontiguousarray(words).view(np.uint8).reshape(len(words), words.itemsize).T.tobytes()


def _joined(planes: bytes | memoryview, dtype: np.dtype[Any]) -> Bits:
    """The words that `_planes` was made of."""
    found = np.frombuffer(planes, np.uint8).reshape(dtype.itemsize, -1).T
    return np.ascontiguousarray(found).view(dtype).reshape(-1)


def _compressed(plain: bytes) -> bytes:
    """Compressed, if that is shorter."""
    found = _local().compressor.compress(plain)
    return found if len(found) < len(plain) else plain


def _plain(coded: memoryview, size: int) -> bytes | memoryview:
    """The string of `size` bytes that `_compressed` was made of. Raises DATA_LOSS before it takes more memory."""
    if len(coded) == size:
        return coded
    import zstandard

    try:
        if zstandard.frame_content_size(coded) == size:
            found = _local().decompressor.decompress(coded)
            if len(found) == size:
                return found
    except zstandard.ZstdError as error:
        raise _malformed(str(error)) from error
    raise _malformed(f"{len(coded)} bytes are not {size} bytes compressed")


def _malformed(why: str) -> CkptEngineError:
    return data_loss(f"a delta cannot be read: {why}")
