"""Names and sizes of dtypes, and what appending zero bits does to a number, are torch's."""

from __future__ import annotations

import pytest
import torch

from ckpt_engine.core.dtypes import CASTABLE, ITEMSIZES, UnsupportedDtypeError, itemsize, widens
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
        assert caught.value.problem.code == Problem.CODE_INVALID_ARGUMENT
    with pytest.raises(UnsupportedDtypeError, match="complex128"):
        dtype_name(torch.complex128)


@pytest.mark.parametrize("have", ITEMSIZES)
@pytest.mark.parametrize("want", ITEMSIZES)
def test_what_widens_is_the_same_number_with_zero_bits_appended(have: str, want: str) -> None:
    wider = 8 * (itemsize(want) - itemsize(have))
    if wider <= 0 or not {have, want} <= CASTABLE:
        assert not widens(have, want)
        return
    bits = torch.arange(1 << 16, dtype=torch.int64)
    bits = bits << 8 * itemsize(have) - 16  # all numbers of two bytes; of more, those with the upper bits set
    of_size = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    narrow = bits.to(of_size[itemsize(have)]).view(torch_dtype(have))
    wide = (bits << wider).to(of_size[itemsize(want)]).view(torch_dtype(want))
    assert widens(have, want) == torch.equal(narrow.to(torch.float64).nan_to_num(1e99), wide.double().nan_to_num(1e99))


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("bf16", "bfloat16"),
        ("torch.bfloat16", "bfloat16"),
        ("FP16", "float16"),
        ("bflot16", "bfloat16"),
        ("fp8", "float8_e4m3fn"),
    ],
)
def test_a_short_or_mistyped_name_is_answered_with_the_right_one(given: str, meant: str) -> None:
    with pytest.raises(UnsupportedDtypeError, match=f"did you mean '{meant}'\\?"):
        itemsize(given)
    with pytest.raises(UnsupportedDtypeError) as caught:
        itemsize("colour")
    assert "did you mean" not in str(caught.value)
