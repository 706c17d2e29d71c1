"""The dtypes of core/dtypes.py as torch has them, for processes that hold tensors."""

from __future__ import annotations

from functools import cache

import torch

from ckpt_engine.core.dtypes import ITEMSIZES, UnsupportedDtypeError, itemsize
from ckpt_engine.core.strides import span


@cache
def torch_dtype(name: str) -> torch.dtype:
    """The dtype called ``name``. Raises UnsupportedDtypeError, also if this torch is too old to know it."""
    itemsize(name)
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise UnsupportedDtypeError(name, f"is unknown to torch {torch.__version__}")
    return found


def halves(view: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The lower and the upper two bytes of each element of a float32 tensor of any strides, as bfloat16 views of its
    memory: numbers that `core.dtypes.widens` have zeros in the lower ones."""
    if not view.numel():
        nothing = view.to(torch.bfloat16)
        return nothing, nothing
    elements = view.as_strided((span(view.shape, view.stride()),), (1,)).view(torch.bfloat16)
    first, stride = elements.storage_offset(), [2 * step for step in view.stride()]
    return elements.as_strided(view.shape, stride, first), elements.as_strided(view.shape, stride, first + 1)


def dtype_name(dtype: torch.dtype) -> str:
    """The name of ``dtype``. Raises UnsupportedDtypeError."""
    name = str(dtype).removeprefix("torch.")
    if name not in ITEMSIZES:
        raise UnsupportedDtypeError(name, typed=False)
    return name
