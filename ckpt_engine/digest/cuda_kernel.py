"""The Triton kernel of the digest. Importing this needs Triton; digest/cuda.py launches it."""

from __future__ import annotations

import os

import triton
import triton.language as tl

from ckpt_engine.digest.factors import INDEX_STEP, MIX_1, MIX_2

BYTES = tl.constexpr(0)
LANES = tl.constexpr(1)
AS_BFLOAT16 = tl.constexpr(2)
AS_FLOAT16 = tl.constexpr(3)

_INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0") == "1")

# The numbers of digest/factors.py.
_INDEX_STEP = tl.constexpr(INDEX_STEP)
_MIX_1 = tl.constexpr(MIX_1)
_MIX_2 = tl.constexpr(MIX_2)


@triton.jit
def _lanes(pointers, inside, KIND: tl.constexpr):  # noqa: N803
    """Lanes as they are digested, zero where not inside."""
    if KIND == AS_BFLOAT16:
        number = tl.load(pointers, mask=inside, other=0.0)
        if _INTERPRETED:
            # Triton's interpreter does not round. 0x7FFF is what a GPU makes of a NaN.
            bits = number.to(tl.uint32, bitcast=True)
            value = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FFF, (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)
        else:
            value = number.to(tl.bfloat16).to(tl.uint16, bitcast=True)
    elif KIND == AS_FLOAT16:
        value = tl.load(pointers, mask=inside, other=0.0).to(tl.float16).to(tl.uint16, bitcast=True)
    else:
        value = tl.load(pointers, mask=inside, other=0)
    return value


@triton.jit
def _either(one, other):
    return one | other


@triton.jit
def _suspects(words, FLIP: tl.constexpr, STEP: tl.constexpr, BOTH: tl.constexpr):  # noqa: N803
    """The highest bit of each byte in which NaN or infinity is found, for four bytes in a word.

    Adding STEP carries into a byte's highest bit if its lower seven are great enough: all of them for STEP 1. BOTH:
    the highest bit must be set, too, so that it carries out of the byte. A carry may spoil the byte above, which does
    not matter: the byte from which it comes was found already.
    """
    flipped = words ^ (FLIP * 0x01010101)
    added = flipped + STEP * 0x01010101
    found = flipped & (added ^ 0xFFFFFFFF) if BOTH else flipped ^ added
    return found & 0x80808080


@triton.jit
def _keep_mask(columns, KEEP: tl.constexpr, LANES_OF_NUMBER: tl.constexpr):  # noqa: N803
    """The bits of each column's lanes in which to look for NaN and infinity: those of a number's last lane."""
    return tl.where(columns % LANES_OF_NUMBER == LANES_OF_NUMBER - 1, KEEP, 0)


@triton.jit
def digest_tiles(
    work,
    origin,
    factors,
    sums,
    marks,
    BLOCK: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    KIND: tl.constexpr,  # noqa: N803
    VECTOR: tl.constexpr,  # noqa: N803
    STAGES: tl.constexpr,  # noqa: N803
    FLIP: tl.constexpr,  # noqa: N803
    KEEP: tl.constexpr,  # noqa: N803
    LEAST: tl.constexpr,  # noqa: N803
    LANES_OF_NUMBER: tl.constexpr,  # noqa: N803
):
    """Digests tiles of digest/cuda_tiles.py, one a program. work, factors, sums: int64; unsigned numbers, modulo 2^64.

    origin: a pointer from which addresses in `work` count; the compiler must know its alignment to make loads of 16
    bytes. VECTOR: 1, or units of 16 bytes if addresses, steps and widths are multiples of it. ROWS rows are loaded at a
    time, STAGES such loads are in flight at once. Integer addition is associative, so the order in which programs add
    to `sums` does not matter. FLIP, KEEP, LEAST: for the last of a number's lanes, as in digest/finite.py. If NaN or
    infinity is found, the box's place in `marks` becomes 1. LEAST of 0: do not look.
    """
    entry = work + tl.program_id(0).to(tl.int64) * 8
    first = origin + tl.load(entry) // VECTOR * VECTOR
    step = tl.load(entry + 1) // VECTOR * VECTOR
    outer = factors + tl.load(entry + 2)
    inner = factors + tl.load(entry + 3)
    rows = tl.load(entry + 4).to(tl.int32)
    width = tl.load(entry + 5).to(tl.int32) // VECTOR * VECTOR
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    together = tl.arange(0, ROWS)
    pointers = first + together.to(tl.int64)[:, None] * step + columns[None, :]
    sum_of_column = tl.zeros([BLOCK], dtype=tl.uint64)
    greatest = tl.zeros([BLOCK], dtype=tl.int32)
    keep = _keep_mask(columns, KEEP, LANES_OF_NUMBER)
    whole = rows // ROWS * ROWS
    for row in tl.range(0, whole, ROWS, num_stages=STAGES):
        lanes = _lanes(pointers + row * step, inside[None, :], KIND)
        row_factors = tl.load(outer + row + together).to(tl.uint64)[:, None]
        sum_of_column += tl.sum(lanes.to(tl.uint64) * row_factors, axis=0)
        if LEAST != 0:
            greatest = tl.maximum(greatest, tl.max((lanes.to(tl.int32) ^ FLIP) & keep[None, :], axis=0))
    for row in range(whole, rows):
        lane = _lanes(first + row * step + columns, inside, KIND)
        sum_of_column += lane.to(tl.uint64) * tl.load(outer + row).to(tl.uint64)
        if LEAST != 0:
            greatest = tl.maximum(greatest, (lane.to(tl.int32) ^ FLIP) & keep)
    sum_of_column *= tl.load(inner + columns, mask=inside, other=0).to(tl.uint64)
    total = tl.sum(sum_of_column, axis=0).to(tl.int64) * tl.load(entry + 6)
    tl.atomic_add(sums + tl.load(entry + 7), total, sem="relaxed")
    if LEAST != 0:
        found = tl.max(greatest, axis=0) >= LEAST
        tl.atomic_or(marks + tl.load(entry + 7), tl.full([], 1, tl.int64), mask=found, sem="relaxed")


@triton.jit
def digest_words(
    work,
    origin,
    factors,
    sums,
    marks,
    BLOCK: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    STAGES: tl.constexpr,  # noqa: N803
    FLIP: tl.constexpr,  # noqa: N803
    STEP: tl.constexpr,  # noqa: N803
    BOTH: tl.constexpr,  # noqa: N803
):
    """Digests as `digest_tiles` does, and looks for NaN and infinity as `_suspects` does.

    One program a tile of one-byte numbers with all rows in units of 16 bytes. They are read as words of four bytes:
    `origin` points to words, BLOCK and `work` count bytes.
    """
    entry = work + tl.program_id(0).to(tl.int64) * 8
    first = origin + tl.load(entry) // 16 * 4
    step = tl.load(entry + 1) // 16 * 4
    outer = factors + tl.load(entry + 2)
    inner = factors + tl.load(entry + 3)
    rows = tl.load(entry + 4).to(tl.int32)
    width = tl.load(entry + 5).to(tl.int32) // 16 * 4
    WORDS: tl.constexpr = BLOCK // 4  # noqa: N806
    columns = tl.arange(0, WORDS)
    inside = columns < width
    together = tl.arange(0, ROWS)
    pointers = first + together.to(tl.int64)[:, None] * step + columns[None, :]
    sum_0 = tl.zeros([WORDS], dtype=tl.uint64)
    sum_1 = tl.zeros([WORDS], dtype=tl.uint64)
    sum_2 = tl.zeros([WORDS], dtype=tl.uint64)
    sum_3 = tl.zeros([WORDS], dtype=tl.uint64)
    look = tl.zeros([WORDS], dtype=tl.uint32)
    whole = rows // ROWS * ROWS
    for row in tl.range(0, whole, ROWS, num_stages=STAGES):
        words = tl.load(pointers + row * step, mask=inside[None, :], other=0)
        factor = tl.load(outer + row + together).to(tl.uint64)[:, None]
        sum_0 += tl.sum((words & 0xFF).to(tl.uint64) * factor, axis=0)
        sum_1 += tl.sum(((words >> 8) & 0xFF).to(tl.uint64) * factor, axis=0)
        sum_2 += tl.sum(((words >> 16) & 0xFF).to(tl.uint64) * factor, axis=0)
        sum_3 += tl.sum((words >> 24).to(tl.uint64) * factor, axis=0)
        look |= tl.reduce(_suspects(words, FLIP, STEP, BOTH), 0, _either)
    for row in range(whole, rows):
        word = tl.load(first + row * step + columns, mask=inside, other=0)
        factor_of_row = tl.load(outer + row).to(tl.uint64)
        sum_0 += (word & 0xFF).to(tl.uint64) * factor_of_row
        sum_1 += ((word >> 8) & 0xFF).to(tl.uint64) * factor_of_row
        sum_2 += ((word >> 16) & 0xFF).to(tl.uint64) * factor_of_row
        sum_3 += (word >> 24).to(tl.uint64) * factor_of_row
        look |= _suspects(word, FLIP, STEP, BOTH)
    place = inner + columns * 4
    total = sum_0 * tl.load(place, mask=inside, other=0).to(tl.uint64)
    total += sum_1 * tl.load(place + 1, mask=inside, other=0).to(tl.uint64)
    total += sum_2 * tl.load(place + 2, mask=inside, other=0).to(tl.uint64)
    total += sum_3 * tl.load(place + 3, mask=inside, other=0).to(tl.uint64)
    scaled = tl.sum(total, axis=0).to(tl.int64) * tl.load(entry + 6)
    tl.atomic_add(sums + tl.load(entry + 7), scaled, sem="relaxed")
    # With FLIP, zeros that stand for what is not inside are not found: no such dtype has a NaN that is zero.
    found = tl.max((look != 0).to(tl.int32), axis=0) > 0
    tl.atomic_or(marks + tl.load(entry + 7), tl.full([], 1, tl.int64), mask=found, sem="relaxed")


@triton.jit
def digest_flat(
    work,
    origin,
    factors,
    sums,
    marks,
    BLOCK: tl.constexpr,  # noqa: N803
    KIND: tl.constexpr,  # noqa: N803
    LANES_OF_ELEMENT: tl.constexpr,  # noqa: N803
    FLIP: tl.constexpr,  # noqa: N803
    KEEP: tl.constexpr,  # noqa: N803
    LEAST: tl.constexpr,  # noqa: N803
    LANES_OF_NUMBER: tl.constexpr,  # noqa: N803
):
    """Digests as `digest_tiles` does, one program a flat tile: factors are computed, not loaded, since each is needed
    once."""
    entry = work + tl.program_id(0).to(tl.int64) * 8
    first = origin + tl.load(entry)
    start = tl.load(entry + 3).to(tl.uint64)
    rows = tl.load(entry + 4).to(tl.int32)
    width = tl.load(entry + 5).to(tl.int32)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    # A Python number of more than 64 bits would not be a number of the kernel.
    stride: tl.constexpr = (BLOCK // LANES_OF_ELEMENT) * _INDEX_STEP % (1 << 64)
    hashed = start + (columns // LANES_OF_ELEMENT).to(tl.uint64) * _INDEX_STEP
    pointers = first + columns
    sum_of_column = tl.zeros([BLOCK], dtype=tl.uint64)
    greatest = tl.zeros([BLOCK], dtype=tl.int32)
    keep = _keep_mask(columns, KEEP, LANES_OF_NUMBER)
    for _ in tl.range(0, rows):
        x = (hashed ^ (hashed >> 30)) * _MIX_1
        x = (x ^ (x >> 27)) * _MIX_2
        x = (x ^ (x >> 31)) | 1
        lanes = _lanes(pointers, inside, KIND)
        sum_of_column += lanes.to(tl.uint64) * x
        if LEAST != 0:
            greatest = tl.maximum(greatest, (lanes.to(tl.int32) ^ FLIP) & keep)
        hashed += stride
        pointers += BLOCK
    sum_of_column *= tl.load(factors + tl.load(entry + 2) + columns % LANES_OF_ELEMENT).to(tl.uint64)
    total = tl.sum(sum_of_column, axis=0).to(tl.int64) * tl.load(entry + 6)
    tl.atomic_add(sums + tl.load(entry + 7), total, sem="relaxed")
    if LEAST != 0:
        found = tl.max(greatest, axis=0) >= LEAST
        tl.atomic_or(marks + tl.load(entry + 7), tl.full([], 1, tl.int64), mask=found, sem="relaxed")
