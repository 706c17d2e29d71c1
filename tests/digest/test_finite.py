"""NaN and infinity are found while weights are digested, whatever their dtype, shape and strides."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckpt_engine.core.dtypes import ITEMSIZES
from ckpt_engine.digest.finite import RULES
from ckpt_engine.digest.host import HostDigests
from ckpt_engine.digest.prepared import prepare_digests
from ckpt_engine.torch_dtypes import torch_dtype
from tests.digest.test_digest import random_tensor, views, way

__all__ = ["way"]

FLOATS = sorted(name for name in ITEMSIZES if torch_dtype(name).is_floating_point or torch_dtype(name).is_complex)


def is_finite(tensor: torch.Tensor) -> torch.Tensor:
    """What torch says of each element. Of 8-bit floats it says nothing: they are cast, and 2^128 to infinity."""
    if not tensor.is_floating_point() and not tensor.is_complex():
        return torch.ones(tensor.shape, dtype=torch.bool)
    if tensor.dtype == torch.float8_e8m0fnu:
        return ~tensor.float().isnan()
    return (tensor.float() if tensor.itemsize == 1 else tensor).isfinite()


def looked(view: torch.Tensor) -> bool:
    digests = HostDigests([(view, (0,) * view.dim())], finite=True)
    plain = HostDigests([(view, (0,) * view.dim())])
    assert digests.run() == plain.run(), "looking changes no digest"
    assert plain.not_finite == [False]
    return digests.not_finite[0]


def test_each_dtype_that_can_be_neither_has_a_rule() -> None:
    assert sorted(RULES) == FLOATS


@pytest.mark.parametrize("name", [name for name in FLOATS if ITEMSIZES[name] <= 2])
def test_each_pattern_of_bits_is_judged_as_torch_does(name: str, way: str) -> None:
    """Alone, and as one among many: in each lane of a line, of a line that is not whole, and of what follows."""
    size = ITEMSIZES[name]
    every = torch.arange(1 << 8 * size, dtype=torch.int32).to(torch.uint8 if size == 1 else torch.uint16)
    patterns = every.view(torch_dtype(name))
    finite = is_finite(patterns)
    assert looked(patterns[finite]) is False, "all that are, at once"
    wrong = patterns[~finite]
    assert len(wrong)
    for number, each in enumerate(wrong[:: max(len(wrong) // 40, 1)]):
        assert looked(each.reshape(()))
        for length in (1, 31, 33, 100, 700):
            row = patterns[:1].repeat(3 * length).view(3, length)
            row[number % 3, number * 7 % length] = each
            assert looked(row)
            assert looked(row.t())
            assert not looked(row[:, :0])


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(drawn=views(), data=st.data())
def test_any_shape_and_strides(drawn: tuple[torch.Tensor, tuple[int, ...]], data: st.DataObject, way: str) -> None:
    view, _ = drawn
    name = str(view.dtype).removeprefix("torch.")
    if data.draw(st.booleans()) and name in FLOATS:  # random bits nearly always have one
        real = view.resolve_conj().real if view.is_complex() else view.to(torch.float64)
        view.copy_(torch.where(is_finite(view), real, 1.0))
    expected = name in FLOATS and bool((~is_finite(view)).any())
    assert looked(view) is expected


@pytest.mark.parametrize("name", ["float32", "float64", "complex64"])
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_wide_elements(name: str, value: float, way: str) -> None:
    tensor = torch.full((5, 1003), 3e38 if name != "float64" else 1e308, dtype=torch_dtype(name))
    tensor.view(torch.uint8)[:, ::16] = 255  # the lowest bits of each, none of which is of an exponent
    assert not looked(tensor)
    tensor[4, 1002] = complex(1, value) if name == "complex64" else value
    assert looked(tensor)
    assert not looked(tensor[:, :-1])


def test_small_weights_are_passed_over_and_large_ones_are_not(way: str) -> None:
    """The guard: what has no bit of it is not looked at again."""
    small = (torch.rand(64, 512) - 0.5).bfloat16()
    assert not looked(small)
    for place, value in (((0, 0), 2.0), ((63, 511), -1e30)):
        small[place] = value
        assert not looked(small)
    small[31, 7] = float("inf")
    assert looked(small)


def test_integers_are_neither(way: str) -> None:
    for name in sorted(set(ITEMSIZES) - set(FLOATS)):
        assert not looked(random_tensor((3, 70), torch_dtype(name)).view(torch.uint8).fill_(1).view(torch_dtype(name)))
        if name != "bool":
            assert not looked(torch.full((300,), 255, dtype=torch.uint8)[:296].view(torch_dtype(name)))


def test_what_a_cast_makes_infinite_is_found() -> None:
    """70000 is no float16. What is served counts, not what is kept."""
    boxes = [(torch.tensor([1.0, 70000.0]), (0,)), (torch.tensor([1.0, 60000.0]), (0,)), (torch.ones(3), (0,))]
    prepared = prepare_digests(boxes, served=[torch.float16, torch.float16, None], finite=True)
    prepared.run()
    assert prepared.not_finite == [True, False, False]
    boxes[2][0][1] = float("nan")
    prepared.run()
    assert prepared.not_finite == [True, False, True]
