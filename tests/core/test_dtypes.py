"""Names and sizes of dtypes are torch's."""

from __future__ import annotations

import pytest
import torch

from ckpt_engine.core.dtypes import ITEMSIZES, UnsupportedDtypeError, itemsize
from ckpt_engine.torch_dtypes import dtype_name, torch_dtype
from ckpt_engine.v1.weights_pb2 import Problem


@pytest.mark.parametrize("name", ITEMSIZES)
def test_names_and_sizes_are_those_of_torch(name: str) -> None:
    dtype = torch_dtype(name)
    assert (dtype_name(dtype), dtype.itemsize) == (name, itemsize(name))


@pytest.mark.parametrize("name", ["float4", "", "torch.float32", "nn"])
def test_an_unknown_dtype_is_named(name: str) -> None:
    for call in (itemsize, torch_dtype):
        with pytest.raises(UnsupportedDtypeError, match=f"dtype '{name}' is not supported") as caught:
            call(name)
        assert caught.value.problem.code == Problem.INVALID_ARGUMENT
    with pytest.raises(UnsupportedDtypeError, match="complex128"):
        dtype_name(torch.complex128)
