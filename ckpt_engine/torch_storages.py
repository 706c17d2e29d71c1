"""Identifies tensors that share memory."""

from __future__ import annotations

import torch


def storage_key(tensor: torch.Tensor) -> int:
    """A key of a tensor's storage, valid while the storage lives; equal only for tensors that share memory. Negative:
    the tensor is opaque, such as oneDNN's, and has no storage."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):
        return -id(tensor)
