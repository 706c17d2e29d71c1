"""Copying: any pair of views, in any number of pieces and threads, is what torch's own copy makes of it."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_engine.copy import host_copy, rows
from ckpt_engine.copy.copying import TensorCopy

DTYPES = [torch.bfloat16, torch.uint8, torch.float32, torch.int64, torch.complex64, torch.complex128, torch.float8_e5m2]


@st.composite
def layouts(draw: st.DrawFn) -> tuple[torch.dtype, list[int], list[tuple[list[int], list[int], int]]]:
    """A dtype, a shape, and for source and destination: order of axes in memory, padding of each, first element."""
    shape = draw(st.lists(st.integers(0, 9), max_size=4))
    sides = []
    for _ in range(2):
        order = draw(st.permutations(range(len(shape))))
        padding = draw(st.lists(st.integers(0, 3), min_size=len(shape), max_size=len(shape)))
        sides.append((list(order), padding, draw(st.integers(0, 5))))
    return draw(st.sampled_from(DTYPES)), shape, sides


def view(dtype: torch.dtype, shape: list[int], side: tuple[list[int], list[int], int]) -> tuple[torch.Tensor, ...]:
    """Random bytes, and the view of them."""
    order, padding, first = side
    strides, step = [0] * len(shape), 1
    for axis in order:
        strides[axis] = step
        step *= shape[axis] + padding[axis]
    raw = torch.randint(0, 256, ((step + first + 1) * dtype.itemsize,), dtype=torch.uint8)
    return raw, raw.view(dtype).as_strided(shape, strides, first)


@given(
    st.lists(layouts(), min_size=1, max_size=4),
    st.sampled_from([1, 7, 64, 1 << 20]),
    st.sampled_from([2, 8, 64, 2048]),
    st.integers(1, 4),
)
@settings(max_examples=150, deadline=None)
def test_it_is_what_copy_makes_of_it(
    layouts: list[tuple[torch.dtype, list[int], list[tuple[list[int], list[int], int]]]],
    limit: int,
    row_bytes: int,
    threads: int,
) -> None:
    before = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_copy, "PIECE_ELEMENTS", limit)
        patch.setattr(host_copy, "BATCH_BYTES", max(limit, 16))
        patch.setattr(rows, "ROW_BYTES", row_bytes)
        torch.set_num_threads(threads)
        pairs, wanted, raws, size = [], [], [], 0
        for dtype, shape, (source_side, destination_side) in layouts:
            _, source = view(dtype, shape, source_side)
            raw, destination = view(dtype, shape, destination_side)
            expected = raw.clone()
            same = expected.view(dtype).as_strided(shape, destination.stride(), destination.storage_offset())
            same.copy_(source)
            pairs.append((destination, source))
            wanted.append(expected)
            raws.append(raw)
            size += destination.numel() * dtype.itemsize
        told: list[int] = []
        copied = TensorCopy(pairs)
        assert copied.run(told.append) == copied.bytes == sum(told) == size
        torch.set_num_threads(before)
    for raw, expected in zip(raws, wanted, strict=True):
        assert torch.equal(raw, expected)


@pytest.mark.parametrize("in_helper", [True, False])
def test_a_failing_piece_fails_the_run_and_leaves_no_thread(monkeypatch: pytest.MonkeyPatch, in_helper: bool) -> None:
    monkeypatch.setattr(host_copy, "BATCH_BYTES", 4096)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    copied = TensorCopy([(torch.zeros(1 << 20, dtype=torch.uint8), torch.ones(1 << 20, dtype=torch.uint8))])
    caller, copy, reached = threading.get_ident(), torch._foreach_copy_, threading.Event()

    def fail(*arguments: object, **options: object) -> None:
        if (threading.get_ident() != caller) == in_helper:
            reached.set()
            raise RuntimeError("a piece failed")
        assert reached.wait(timeout=60)
        copy(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(torch, "_foreach_copy_", fail)
    before = threading.active_count()
    with pytest.raises(RuntimeError, match="a piece failed"):
        copied.run()
    assert threading.active_count() == before


def test_other_dtypes_are_cast_as_torch_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_copy, "PIECE_ELEMENTS", 1000)
    source = torch.randn(70, 300)
    destination = torch.zeros(300, 70, dtype=torch.bfloat16)
    assert TensorCopy([(destination.t(), source)]).run() == 42000
    assert torch.equal(destination.t(), source.bfloat16())


def test_it_can_be_run_again_with_other_bytes() -> None:
    source, destination = torch.zeros(300, 1000), torch.zeros(300, 1500)
    copied = TensorCopy([(destination[:, 200:1200], source)])
    for value in (1.0, 2.0):
        source.fill_(value)
        copied.run()
        assert (destination[:, 200:1200] == value).all()
    assert not destination[:, :200].any()
    assert not destination[:, 1200:].any()
