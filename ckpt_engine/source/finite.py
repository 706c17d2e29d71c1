"""Whether weights are numbers: training that has diverged leaves NaN or infinity in them."""

from __future__ import annotations

from collections.abc import Iterable

import torch

ELEMENTS = 1 << 24
"""Looked at in one go: the memory that looking takes is a few times this many bytes."""


def not_finite(tensors: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
    """The names of those that hold NaN or infinity. Reads every element; needs room for a part of the largest."""
    return [name for name, tensor in tensors if not _finite(tensor)]


def _finite(tensor: torch.Tensor) -> bool:
    if not tensor.is_floating_point():
        return True
    # An 8-bit float may have no operations of its own.
    parts = tensor.reshape(-1).split(ELEMENTS) if tensor.is_contiguous() else (tensor,)
    return all(bool(torch.isfinite(part.float() if part.itemsize == 1 else part).all()) for part in parts)
