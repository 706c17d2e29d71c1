"""Sealed records for tests of relays, cut by hand, and what tensor-parallel workers need of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ckpt_engine.core.boxes import Box, whole
from ckpt_engine.core.manifest import RootHasher
from ckpt_engine.core.sealed_record import ProvenRecord, read_record
from ckpt_engine.v1.weights_pb2 import Manifest, SealedRecord, TensorSpec

Shapes = Sequence[tuple[int, ...]]


def recorded(shapes: Shapes, cells: Sequence[Sequence[Box]], dtype: str = "bfloat16") -> ProvenRecord:
    """A record of tensors with these cells; digests are their numbers."""
    specs = [TensorSpec(name=f"t{index:06}", dtype=dtype, shape=shape) for index, shape in enumerate(shapes)]
    record = SealedRecord(manifest=Manifest(tensors=specs))
    sums = np.zeros(len(shapes), dtype=np.uint64)
    for tensor, boxes in enumerate(cells):
        for box in sorted(boxes):
            sums[tensor] += np.uint64(len(record.cells))
            record.digests.append(len(record.cells))
            record.cells.add(tensor=tensor, start=box.start, stop=box.stop)
    return read_record(record, RootHasher(record.manifest).root(sums.astype("<u8").tobytes()))


def in_one(shapes: Shapes) -> ProvenRecord:
    """A record with one cell a tensor."""
    return recorded(shapes, [[whole(shape)] if whole(shape).volume else [] for shape in shapes])


def part_of(shape: tuple[int, ...], axis: int, number: int, count: int) -> Box:
    """One of `count` equal parts along an axis; everything if the tensor has no such axis."""
    box = whole(shape)
    if len(shape) <= axis:
        return box
    each = shape[axis] // count
    start = (*box.start[:axis], number * each, *box.start[axis + 1 :])
    return Box(start, (*box.stop[:axis], (number + 1) * each, *box.stop[axis + 1 :]))
