"""Copies of long rows out of longer ones, such as a row-parallel worker's half of each row.

It decides which pairs are such copies, and copies a row as one opaque element: the C library moves it at nearly the
speed of a contiguous copy, where torch's strided loop reaches two thirds of it. It does not decide which thread copies.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

import numpy
import torch

ROW_BYTES = 2048
"""Shorter rows are left to torch, which is faster there."""

Array = numpy.ndarray[Any, Any]


class Rows:
    """Rows of equal length at both ends; `copy` releases the interpreter's lock."""

    __slots__ = ("_destination", "_source", "bytes")

    def __init__(self, destination: Array, source: Array) -> None:
        self._destination = destination
        self._source = source
        self.bytes = int(destination.nbytes)

    def copy(self) -> None:
        numpy.copyto(self._destination, self._source)

    def parts(self, most_bytes: int) -> Iterator[Rows]:
        """Splits the rows along the first axis into parts of about `most_bytes`."""
        step = max(1, most_bytes * len(self._destination) // max(1, self.bytes))
        for first in range(0, len(self._destination), step):
            yield Rows(self._destination[first : first + step], self._source[first : first + step])


def as_rows(destination: torch.Tensor, source: torch.Tensor) -> Rows | None:
    """The pair as rows; None if it is not made of rows of ROW_BYTES or more, or is one row from end to end.

    Both on a CPU, of one dtype and shape, not empty.
    """
    size = destination.element_size()
    axes = destination.dim()
    run = 1
    while axes > 0 and destination.stride(axes - 1) == source.stride(axes - 1) == run:
        axes -= 1
        run *= destination.shape[axes]
    if axes in (0, destination.dim()) or run * size < ROW_BYTES or prod(destination.shape[:axes]) == 1:
        return None
    row = numpy.dtype((numpy.void, run * size))
    return Rows(_opaque(destination, axes, row), _opaque(source, axes, row))


def _opaque(tensor: torch.Tensor, axes: int, row: numpy.dtype[Any]) -> Array:
    flat = tensor.flatten(axes) if tensor.dim() > axes + 1 else tensor
    return flat.view(torch.uint8).numpy().view(row)[..., 0]
