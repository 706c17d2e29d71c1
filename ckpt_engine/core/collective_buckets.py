"""What travels in a collective: buckets of bounded size, each with the chain of members that it passes. Pure.

The boxes that workers want of one source are cut so that each of them is a union of parts. Parts that the same workers
want go into the same buckets: no byte goes to a worker that does not need it, and no byte leaves its source twice.
Workers that want the same form a chain: each passes a bucket on once it has it. It does not decide when a bucket moves
(core/collective.py) nor where its bytes lie in a member's memory.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ckpt_engine.core.boxes import Box, contains, refine
from ckpt_engine.core.problems import invalid
from ckpt_engine.v1.weights_pb2 import WorkerNeeds, WorkerPlan

BUCKET_BYTES = 64 << 20
"""Most bytes of a bucket: large enough for the full rate of NVLink, small enough to be passed on soon."""

LEAST_BUCKET_BYTES = 1 << 10
"""A smaller bound would make too many buckets to send."""

ALIGNMENT = 64
"""Alignment of the parts in a bucket, bytes."""


class BoxWant(NamedTuple):
    """A box of a tensor that a worker reads from a source."""

    worker: int  # a member, by number
    source: int  # a member, by number
    tensor: int  # its index in the manifest
    box: Box


class BucketPiece(NamedTuple):
    """A box in a bucket, row-major, in the served dtype."""

    tensor: int
    box: Box
    offset: int  # bytes from the start of the bucket


class Bucket(NamedTuple):
    """What travels at once."""

    chain: tuple[int, ...]  # members that it passes, by number: its source, then those that want all of it
    bytes: int
    pieces: tuple[BucketPiece, ...]


def wants_of(
    plan: WorkerPlan, needs: WorkerNeeds, worker: int, sources: Mapping[str, int], transport: str
) -> list[BoxWant]:
    """What a worker reads over a collective: the pieces of those edges of its plan that `transport` serves.

    sources: by SourceTable.id, the member's number. Raises INVALID_ARGUMENT for an edge whose source is not a member,
    and for pieces that name a source or need that does not exist.
    """
    found: list[BoxWant] = []
    for piece in plan.pieces:
        if piece.source >= len(plan.sources) or piece.need >= len(needs.needs):
            raise invalid(
                f"a piece of the plan is of source {piece.source} and need {piece.need}, and one of them is missing"
            )
        edge = plan.sources[piece.source]
        if edge.transport != transport:
            continue
        if edge.source not in sources:
            raise invalid(f"source {edge.source} is read over {transport}, but is not a member of the collective")
        box = Box(tuple(piece.start), tuple(piece.stop))
        found.append(BoxWant(worker, sources[edge.source], needs.needs[piece.need].tensor, box))
    return found


def cut_buckets(wants: Iterable[BoxWant], widths: Sequence[int], most: int = BUCKET_BYTES) -> list[list[Bucket]]:
    """Cuts the wants into buckets: one list for each chain, in the order in which its source sends them.

    widths: bytes of an element of each tensor, in the served dtype. most: bytes of a bucket. The same wants in any
    order give the same buckets. Raises INVALID_ARGUMENT for a bound that is too small, or a tensor that does not exist.
    """
    if most < LEAST_BUCKET_BYTES:
        raise invalid(f"buckets of {most} bytes are too small; give them at least {LEAST_BUCKET_BYTES}")
    boxes: dict[tuple[int, int], dict[Box, set[int]]] = defaultdict(lambda: defaultdict(set))
    for worker, source, tensor, box in wants:
        if not 0 <= tensor < len(widths):
            raise invalid(f"a worker wants tensor {tensor}, but there are {len(widths)}")
        boxes[source, tensor][box].add(worker)
    streams: dict[tuple[int, ...], list[tuple[int, Box]]] = defaultdict(list)
    for (source, tensor), workers_by_box in sorted(boxes.items()):
        for part, workers in _parts(workers_by_box):
            streams[source, *sorted(workers)].append((tensor, part))
    return [_fill(chain, parts, widths, most) for chain, parts in sorted(streams.items())]


def _parts(workers_by_box: Mapping[Box, set[int]]) -> Iterator[tuple[Box, set[int]]]:
    """Disjoint boxes, each with the workers that want it."""
    for part in refine(workers_by_box):
        workers = workers_by_box.get(part)
        if workers is None or len(workers_by_box) > 1:
            workers = {worker for box, readers in workers_by_box.items() if contains(box, part) for worker in readers}
        yield part, workers


def _fill(chain: tuple[int, ...], parts: Sequence[tuple[int, Box]], widths: Sequence[int], most: int) -> list[Bucket]:
    """Fills the buckets of one chain. All but the last are nearly full: a part that does not fit is cut between
    lines."""
    buckets: list[Bucket] = []
    pieces: list[BucketPiece] = []
    used = 0

    def close() -> None:
        nonlocal used
        buckets.append(Bucket(chain, used, tuple(pieces)))
        pieces.clear()
        used = 0

    for tensor, part in parts:
        width = widths[tensor]
        pending = [part]
        while pending:
            box = pending.pop()
            offset = -(-used // ALIGNMENT) * ALIGNMENT
            room = max(0, most - offset) // width
            fits, rest = (box, None) if box.volume <= room else _split(box, room)
            if fits is None and pieces:
                close()
                pending.append(box)
                continue
            if fits is None:  # not even one line fits an empty bucket, so lines are cut
                line, rest = _split(box, box.volume // _lines(box))
                pending += [each for each in (rest, line) if each is not None]
                continue
            pieces.append(BucketPiece(tensor, fits, offset))
            used = offset + fits.volume * width
            if rest is not None:
                close()
                pending.append(rest)
    if pieces:
        close()
    return buckets


def _axis(box: Box) -> int:
    return next(axis for axis, extent in enumerate(box.shape) if extent > 1)


def _lines(box: Box) -> int:
    return box.shape[_axis(box)]


def _split(box: Box, elements: int) -> tuple[Box | None, Box | None]:
    """Splits a box between lines: the lines that have at most so many elements together, and the rest. None: no
    lines."""
    if box.volume == 1:
        return None, box
    axis = _axis(box)
    lines = elements // (box.volume // box.shape[axis])
    if lines == 0:
        return None, box
    cut = box.start[axis] + lines
    if cut >= box.stop[axis]:
        return box, None
    start, stop = box
    return (
        Box(start, (*stop[:axis], cut, *stop[axis + 1 :])),
        Box((*start[:axis], cut, *start[axis + 1 :]), stop),
    )
