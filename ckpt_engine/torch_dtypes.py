"""The dtypes of core/dtypes.py as torch has them, for processes that hold tensors."""

from __future__ import annotations

from functools import cache

import torch

from ckpt_engine.core.dtypes import ITEMSIZES, UnsupportedDtypeError, itemsize


@cache
def torch_dtype(name: str) -> torch.dtype:
    """The dtype called ``name``. Raises UnsupportedDtypeError, also if this torch is too old to know it."""
    itemsize(name)
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise UnsupportedDtypeError(name, f"is unknown to torch {torch.__version__}")
    return found


def dtype_name(dtype: torch.dtype) -> str:
    """The name of ``dtype``. Raises UnsupportedDtypeError."""
    name = str(dtype).removeprefix("torch.")
    if name not in ITEMSIZES:
        raise UnsupportedDtypeError(name)
    return name
