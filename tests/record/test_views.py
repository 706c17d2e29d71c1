"""Decoding strided views, compared with what torch itself shows for every element."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckpt_engine.record.views import Digit, Undecodable, ViewBlock, blocks, copy_of, row_major, through, view_of


@st.composite
def viewed(draw: st.DrawFn, base: torch.Tensor, *, expand: bool = True) -> torch.Tensor:
    """A chain of view operations, as weight loaders chain them."""
    tensor = base
    for _ in range(draw(st.integers(0, 5))):
        kinds = ["narrow", "transpose", "unsqueeze", "step", "flatten", "unflatten", "select"]
        kind = draw(st.sampled_from(kinds))
        if tensor.dim() == 0:
            tensor = tensor.unsqueeze(0)
            continue
        axis = draw(st.integers(0, tensor.dim() - 1))
        size = tensor.shape[axis]
        if kind == "narrow":
            start = draw(st.integers(0, size - 1))
            tensor = tensor.narrow(axis, start, draw(st.integers(1, size - start)))
        elif kind == "transpose":
            tensor = tensor.transpose(axis, draw(st.integers(0, tensor.dim() - 1)))
        elif kind == "unsqueeze" and tensor.dim() < 5:
            tensor = tensor.unsqueeze(axis)
        elif kind == "step":
            start, step = draw(st.integers(0, size - 1)), draw(st.integers(1, 3))
            tensor = tensor[(slice(None),) * axis + (slice(start, None, step),)]
        elif kind == "flatten" and tensor.is_contiguous():
            tensor = tensor.view(-1)
        elif kind == "unflatten" and tensor.dim() < 5:
            divisors = [d for d in range(1, size + 1) if size % d == 0]
            tensor = tensor.unflatten(axis, (draw(st.sampled_from(divisors)), -1))
        elif kind == "select" and tensor.dim() > 1:
            tensor = tensor.select(axis, draw(st.integers(0, size - 1)))
        if expand and draw(st.integers(0, 9)) == 0 and tensor.dim() < 5:
            tensor = tensor.unsqueeze(0).expand(2, *tensor.shape)
    return tensor


shapes = st.lists(st.integers(1, 6), min_size=0, max_size=4)


def replay(found: list[ViewBlock], base: torch.Tensor, destination: torch.Tensor) -> None:
    """Copies box by box, as an install does."""
    for block in found:
        box = base[tuple(slice(a, b) for a, b in zip(block.start, block.stop, strict=True))]
        destination.as_strided(box.shape, block.partner_stride, block.partner_offset).copy_(box)


@given(st.data(), shapes)
def test_replaying_the_boxes_of_a_view_is_copying_the_view(data: st.DataObject, shape: list[int]) -> None:
    base = torch.arange(torch.Size(shape).numel(), dtype=torch.int64).reshape(shape)
    view = data.draw(viewed(base))
    order = data.draw(st.permutations(range(view.dim())))
    padding = data.draw(st.lists(st.integers(0, 2), min_size=view.dim(), max_size=view.dim()))
    room = torch.full([view.shape[axis] + padding[axis] for axis in order], -1)
    expected = torch.full_like(room, -1)
    backwards = [order.index(axis) for axis in range(view.dim())]

    def target(whole: torch.Tensor) -> torch.Tensor:
        return whole.permute(backwards)[tuple(slice(0, size) for size in view.shape)]

    target(expected).copy_(view)
    into = target(room)
    copy = copy_of(view.shape, view.stride(), view.storage_offset(), into.stride(), into.storage_offset())
    replay(blocks(copy, row_major(shape)), base, room)
    assert torch.equal(room, expected)


@given(st.data(), shapes)
def test_a_view_of_a_clone_is_found_in_what_was_cloned(data: st.DataObject, shape: list[int]) -> None:
    base = torch.arange(torch.Size(shape).numel(), dtype=torch.int64).reshape(shape)
    original = data.draw(viewed(base))
    clone = original.clone(memory_format=torch.contiguous_format)
    view = data.draw(viewed(clone))
    result = torch.full(view.shape, -1)
    copy = copy_of(view.shape, view.stride(), view.storage_offset(), result.stride(), 0)
    for each in through(copy, row_major(clone.shape), original.stride(), original.storage_offset()):
        replay(blocks(each, row_major(shape)), base, result)
    assert torch.equal(result, view)


@given(st.data(), st.lists(st.integers(1, 5), min_size=1, max_size=3))
def test_boxes_of_a_tensor_that_is_not_contiguous(data: st.DataObject, shape: list[int]) -> None:
    """Parameters may be transposed or have rows with gaps between them; coverage is computed in their axes."""
    storage = torch.zeros([size + 1 for size in shape], dtype=torch.int64)
    owner = storage[tuple(slice(0, size) for size in shape)]
    owner = owner.permute(data.draw(st.permutations(range(len(shape)))))
    view = data.draw(viewed(owner, expand=False))
    digits = list(map(Digit, owner.shape, owner.stride()))
    found = blocks(view_of(view.shape, view.stride(), view.storage_offset()), digits)
    for block in found:
        owner[tuple(slice(a, b) for a, b in zip(block.start, block.stop, strict=True))] += 1
    assert view.min() == view.max() == 1
    assert owner.sum() == view.numel()


def test_common_views_are_one_box() -> None:
    """Anything that a real loader does with a weight must not fall apart into many pieces."""
    base = torch.empty(12, 10)
    destination = torch.empty(12, 10)
    for view, into in [
        (base.narrow(0, 3, 4), destination[:4]),
        (base.narrow(1, 5, 5), destination[:, :5]),
        (base.t(), torch.empty(10, 12)),
        (base.view(3, 4, 10)[1], destination[:4]),
        (base.view(3, 4, 10), destination.view(3, 4, 10)),
        (base.view(-1), destination.view(-1)),
        (base[4:8].reshape(-1), destination.view(-1)[40:80]),
        (base.unsqueeze(0), destination.unsqueeze(0)),
    ]:
        copy = copy_of(view.shape, view.stride(), view.storage_offset(), into.stride(), into.storage_offset())
        assert len(blocks(copy, row_major(base.shape))) == 1


def test_interleaved_heads_are_one_box_a_head() -> None:
    base = torch.empty(4 * 3 * 5, 7)
    query = base.view(4, 3, 5, 7)[:, 0]
    copy = copy_of(query.shape, query.stride(), query.storage_offset(), (35, 7, 1), 0)
    found = blocks(copy, row_major(base.shape))
    assert sorted(block.start for block in found) == [(head * 15, 0) for head in range(4)]
    assert {tuple(b - a for a, b in zip(block.start, block.stop, strict=True)) for block in found} == {(5, 7)}


def test_ragged_ends_of_a_flat_view() -> None:
    base = torch.arange(30).reshape(5, 6)
    for start, stop in itertools.combinations(range(31), 2):
        view = base.view(-1)[start:stop]
        found = blocks(copy_of(view.shape, view.stride(), start, (1,), 0), row_major(base.shape))
        result = torch.full(view.shape, -1)
        replay(found, base, result)
        assert torch.equal(result, view)
        assert len(found) <= 3


def test_axes_that_carry_only_together() -> None:
    base = torch.arange(18).reshape(2, 9)
    for start in range(11):
        view = base.view(-1)[start : start + 8].view(2, 2, 2)
        found = blocks(copy_of(view.shape, view.stride(), start, (4, 2, 1), 0), row_major(base.shape))
        result = torch.full((2, 2, 2), -1)
        replay(found, base, result)
        assert torch.equal(result, view)


def test_too_many_boxes_are_refused() -> None:
    view = torch.empty(5000, 4)[:, 0:1].t()
    everything = torch.empty(10000, 4)[::2]
    assert len(blocks(view_of(view.shape, view.stride(), 0), row_major((5000, 4)))) == 1
    with pytest.raises(Undecodable, match="more than 4096 boxes"):
        blocks(view_of(everything.shape, everything.stride(), 0), row_major((10000, 4)))


def test_views_beyond_the_tensor_are_refused() -> None:
    with pytest.raises(Undecodable):
        blocks(view_of((3,), (4,), 0), row_major((2, 4)))
    with pytest.raises(Undecodable):
        blocks(view_of((2,), (1,), 8), row_major((2, 4)))
