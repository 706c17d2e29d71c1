"""The sum over what changed is the difference of two full digests, for every dtype and any slice of a tensor."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_engine.core.dtypes import ITEMSIZES
from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.digest import changes
from ckpt_engine.digest.boxes import digest_box
from ckpt_engine.digest.changes import changed_digest
from ckpt_engine.torch_dtypes import torch_dtype
from tests.digest.test_digest import random_tensor

MASK = (1 << 64) - 1


@pytest.fixture(params=["numba", "torch"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """By the kernel of the host, and by what a GPU computes."""
    if request.param == "torch":
        monkeypatch.setattr(changes, "_kernel", lambda: None)
        monkeypatch.setattr(changes, "_AT_ONCE", 5)
    return str(request.param)


def change_of(old: torch.Tensor, new: torch.Tensor, start: tuple[int, ...]) -> int:
    """By the sum over the elements whose bits differ."""
    flat = [each.reshape(-1).contiguous() for each in (old, new)]
    bits = [each.view(torch.uint8).reshape(each.numel(), each.itemsize) for each in flat]
    places = (bits[0] != bits[1]).any(1).nonzero().reshape(-1)
    return changed_digest(start, tuple(old.shape), places, flat[0][places], flat[1][places])


@st.composite
def pairs(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, tuple[int, ...]]:
    """A slice of a tensor before and after, and where it starts in a larger one."""
    shape = tuple(draw(st.lists(st.sampled_from([1, 2, 5, 9]), min_size=0, max_size=4)))
    dtype = torch_dtype(draw(st.sampled_from(sorted(ITEMSIZES))))
    number = draw(st.integers(0, 1 << 30))
    old, other = random_tensor(shape, dtype, number), random_tensor(shape, dtype, number + 1)
    share = draw(st.sampled_from([0.0, 0.01, 0.3, 1.0]))
    changes = torch.rand(shape, generator=torch.Generator().manual_seed(number)) < share
    new = torch.where(changes, other.view(old.dtype), old) if dtype != torch.bool else old ^ changes
    for axis in range(len(shape)):
        first = draw(st.integers(0, shape[axis] - 1))
        cut = (slice(None),) * axis + (slice(first, draw(st.integers(first + 1, shape[axis]))),)
        old, new = old[cut], new[cut]
    return old, new, tuple(draw(st.integers(0, 1 << 40)) for _ in shape)


@settings(deadline=None, max_examples=150)
@given(pairs())
def test_it_is_the_difference_of_full_digests(pair: tuple[torch.Tensor, torch.Tensor, tuple[int, ...]]) -> None:
    old, new, start = pair
    expected = (digest_box(new, start) - digest_box(old, start)) & MASK
    assert change_of(old, new, start) == expected


@settings(deadline=None, max_examples=100)
@given(pairs())
def test_torch_sums_the_same_as_a_gpu_would(pair: tuple[torch.Tensor, torch.Tensor, tuple[int, ...]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(changes, "_kernel", lambda: None)
        patch.setattr(changes, "_AT_ONCE", 5)
        old, new, start = pair
        expected = (digest_box(new, start) - digest_box(old, start)) & MASK
        assert change_of(old, new, start) == expected


def test_a_sign_of_zero_counts_and_a_nan_is_its_bits(way: str) -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        old = torch.tensor([0.0, -0.0, torch.nan, 1.0, torch.inf], dtype=dtype)
        new = torch.tensor([-0.0, -0.0, torch.nan, torch.nan, -torch.inf], dtype=dtype)
        for before, after in ((old, new), (new, old)):
            expected = (digest_box(after, (3,)) - digest_box(before, (3,))) & MASK
            assert expected
            assert change_of(before, after, (3,)) == expected


def test_changes_of_parts_add_up(way: str) -> None:
    old = random_tensor((30, 40), torch.bfloat16, 1)
    new = old.clone()
    new[::3, ::7] = random_tensor((10, 6), torch.bfloat16, 2)
    whole = change_of(old, new, (0, 0))
    parts = [((0, 0), (11, 40)), ((11, 0), (30, 13)), ((11, 13), (30, 40))]
    found = sum(change_of(old[a:c, b:d], new[a:c, b:d], (a, b)) for (a, b), (c, d) in parts)
    assert found & MASK == whole != 0


def test_what_does_not_fit_is_refused(way: str) -> None:
    places, elements = torch.tensor([0]), torch.zeros(1)
    for arguments in (
        ((0,), (1, 1), places, elements, elements),
        ((0,), (1,), places.int(), elements, elements),
        ((0,), (1,), places, elements, elements.half()),
        ((0,), (1,), places, elements, torch.zeros(2)),
    ):
        with pytest.raises(CkptEngineError, match=r"changes of a box|places have"):
            changed_digest(*arguments)
