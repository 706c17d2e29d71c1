"""Elements of a box that are read, written and summed where they lie, against tensors and full digests."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_engine.core.dtypes import ITEMSIZES
from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.digest.boxes import digest_box
from ckpt_engine.digest.placed import Elements, PlacedBox, _DeviceBox, placed_box
from ckpt_engine.torch_dtypes import torch_dtype
from tests.digest.test_digest import random_tensor

MASK = (1 << 64) - 1


def box_of(view: torch.Tensor, start: tuple[int, ...], way: str) -> PlacedBox:
    """By the kernels of the host, or by what a GPU computes."""
    found = placed_box(view, start) if way == "numba" else _DeviceBox(view, start)
    assert found is not None
    return found


def bits(view: torch.Tensor) -> Elements:
    """A copy of the elements, row-major."""
    plain = torch.empty(view.shape, dtype=view.dtype).copy_(view)
    return plain.view(-1).view(torch.uint8).numpy().view(f"u{view.itemsize}")


@st.composite
def views(draw: st.DrawFn) -> tuple[torch.Tensor, tuple[int, ...], int]:
    """A part of a tensor, maybe transposed, and where it starts in a larger one."""
    shape = tuple(draw(st.lists(st.sampled_from([1, 2, 5, 9]), min_size=1, max_size=4)))
    number = draw(st.integers(0, 1 << 30))
    view = random_tensor(shape, torch_dtype(draw(st.sampled_from(sorted(ITEMSIZES)))), number)
    for axis, length in enumerate(shape):
        first = draw(st.integers(0, length - 1))
        view = view.narrow(axis, first, draw(st.integers(first + 1, length)) - first)
    view = view.permute(draw(st.permutations(range(view.dim()))))
    return view, tuple(draw(st.integers(0, 1 << 40)) for _ in range(view.dim())), number


@pytest.mark.parametrize("way", ["numba", "torch"])
@settings(deadline=None, max_examples=100)
@given(drawn=views(), share=st.sampled_from([0.0, 0.2, 1.0]))
def test_what_is_written_is_what_the_digest_gains(
    way: str, drawn: tuple[torch.Tensor, tuple[int, ...], int], share: float
) -> None:
    view, start, number = drawn
    box, before = box_of(view, start, way), digest_box(view, start)
    generator = np.random.default_rng(number)
    places = np.flatnonzero(generator.random(view.numel()) < share).astype(np.uint32)
    plain = bits(view)
    old = box.read(places)
    assert (old == plain[places]).all()
    new = bits(random_tensor(tuple(view.shape), view.dtype, number + 1))[places]
    box.write(places, new)
    expected = plain.copy()
    expected[places] = new
    assert (bits(view) == expected).all()
    assert box.gain(places, old) == (digest_box(view, start) - before) & MASK


@pytest.mark.parametrize("way", ["numba", "torch"])
@pytest.mark.parametrize("places", [[3, 3], [4, 2], [0, 12], [1 << 31, (1 << 32) - 1]])
def test_places_that_cannot_be_are_refused(way: str, places: list[int]) -> None:
    box = box_of(torch.zeros(3, 4, dtype=torch.bfloat16), (0, 0), way)
    with pytest.raises(CkptEngineError, match="DATA_LOSS"):
        box.read(np.array(places, dtype=np.uint32))


def test_what_cannot_be_placed_is_none() -> None:
    assert placed_box(torch.zeros((), dtype=torch.bfloat16), ()) is None
    assert placed_box(torch.zeros(0, 4), (0, 0)) is None
    assert placed_box(torch.zeros(4, dtype=torch.complex64).conj(), (0,)) is None
