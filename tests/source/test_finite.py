"""Which tensors hold NaN or infinity, of every dtype and layout that can be published."""

from __future__ import annotations

import pytest
import torch

from ckpt_engine.source.finite import not_finite

WRONG = (float("nan"), float("inf"), float("-inf"))
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_one_wrong_element_is_found_wherever_it_stands(dtype: torch.dtype) -> None:
    for value in WRONG:
        for place in (0, 36, 72):
            tensor = torch.linspace(-9, 9, 73)
            tensor[place] = value
            largest = torch.full((4,), torch.finfo(dtype).max, dtype=torch.float64).to(dtype)
            found = not_finite([("fine", largest), ("wrong", tensor.to(dtype)), ("last", largest)])
            assert found == ["wrong"], (value, place)


def test_infinities_that_cancel_each_other_are_found() -> None:
    assert not_finite([("a", torch.tensor([float("inf"), 1.0, float("-inf")]))]) == ["a"]


def test_what_is_no_float_is_not_looked_at_and_layouts_do_not_matter() -> None:
    matrix = torch.zeros(4, 6)
    matrix[1, 3] = float("nan")
    parameter = torch.nn.Parameter(matrix.clone())
    tensors = [
        ("transposed", matrix.T),
        ("beside it", matrix[:, ::2]),
        ("columns", matrix[:, 1::2]),
        ("complex", torch.complex(torch.ones(2), torch.tensor([0.0, float("inf")]))),
        ("count", torch.tensor([1])),
        ("mask", torch.tensor([True])),
        ("empty", torch.empty(0)),
        ("scalar", torch.tensor(float("nan"))),
        ("parameter", parameter),
    ]
    assert not_finite(tensors) == ["transposed", "columns", "complex", "scalar", "parameter"]
