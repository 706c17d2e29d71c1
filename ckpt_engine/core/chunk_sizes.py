"""How large the chunks are that travel between hosts, and the cells that they are made of. Pure."""

from __future__ import annotations

from collections.abc import Sequence

LEAST_BYTES = 4 << 20
"""Least bytes of a chunk, where the same hosts want that much: smaller ones reach a tenth of the rate."""

MOST_BYTES = 64 << 20
"""Most bytes of a chunk: it is verified before it is passed on, which should not take long."""

_CHUNKS = 1024  # of a model: a chunk takes five hops, and eight children wait for it at each; so these cost 4 %


def chunk_bytes(model: int) -> int:
    """The least bytes of a chunk; a chunk has less than twice as many. model: bytes that travel."""
    return max(LEAST_BYTES, min(MOST_BYTES // 2, model // _CHUNKS))


def join_pieces(sizes: Sequence[int], least: int) -> list[tuple[int, int]]:
    """Joins pieces to runs, [first, stop), of at least `least` bytes, and of less than twice as many where no piece is
    above `least`. A small rest is joined to the last run."""
    found: list[tuple[int, int]] = []
    start = total = 0
    for at, size in enumerate(sizes):
        total += size
        if total >= least:
            found.append((start, at + 1))
            start, total = at + 1, 0
    if total and found and total < min(least, LEAST_BYTES):
        start = found.pop()[0]
        total = sum(sizes[start:])
        if total > 2 * least:
            half = 0
            for at in range(start, len(sizes)):
                half += sizes[at]
                if 2 * half >= total:
                    found.append((start, at + 1))
                    start, total = at + 1, total - half
                    break
    if total:
        found.append((start, len(sizes)))
    return found
