"""Which tensors share memory."""

from __future__ import annotations

import torch


def storage_key(tensor: torch.Tensor) -> int:
    """Names the storage of a tensor for as long as it lives; equal only for tensors that share memory. Negative: the
    tensor is opaque, such as oneDNN's, and has no storage."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):
        return -id(tensor)
