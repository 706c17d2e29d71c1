"""The geometry of copies: blocks name exactly the bytes that torch's copy would move, in as few rows as there are."""

from __future__ import annotations

import torch
from hypothesis import given, settings

from ckpt_engine.copy.blocks import RowBlock, align, blocks_of, cut, merge
from tests.copy.test_copying import layouts, view


def expanded(blocks: list[RowBlock]) -> list[tuple[int, int]]:
    """(destination, source) of every byte; equal item sizes."""
    return [
        (block.destination + row * block.destination_pitch + byte, block.source + row * block.source_pitch + byte)
        for block in blocks
        for row in range(block.rows)
        for byte in range(block.length)
    ]


def bytes_of(destination: torch.Tensor, source: torch.Tensor) -> list[tuple[int, int]]:
    places = []
    for index in torch.cartesian_prod(*map(torch.arange, destination.shape)).reshape(-1, destination.dim()).tolist():
        ends = [
            side.data_ptr() + side.element_size() * sum(i * step for i, step in zip(index, side.stride(), strict=True))
            for side in (destination, source)
        ]
        places += [(ends[0] + byte, ends[1] + byte) for byte in range(destination.element_size())]
    return places


@given(layouts())
@settings(max_examples=200, deadline=None)
def test_blocks_are_the_bytes_of_the_pair(drawn: tuple) -> None:
    dtype, shape, sides = drawn
    if 0 in shape or not shape:
        return
    _, destination = view(dtype, shape, sides[0])
    _, source = view(dtype, shape, sides[1])
    blocks = blocks_of(destination, source)
    if blocks is not None:
        wanted = sorted(bytes_of(destination, source))
        assert sorted(expanded(blocks)) == wanted
        assert sorted(expanded([part for block in merge(blocks) for part in align(block)])) == wanted


def test_what_lies_together_is_one_block() -> None:
    weights = torch.zeros(64, 32)
    fused = torch.zeros(96, 32)
    assert blocks_of(fused[:64], weights) == [RowBlock(fused.data_ptr(), weights.data_ptr(), 64 * 32 * 4)]
    half = torch.zeros(64, 16)
    assert blocks_of(half, weights[:, 16:]) == [RowBlock(half.data_ptr(), weights.data_ptr() + 64, 64, 64, 64, 128)], (
        "a row-parallel slice"
    )
    experts = torch.zeros(8, 48, 32)
    gates = torch.zeros(8, 24, 32)
    assert blocks_of(experts[:, :24], gates) == [
        RowBlock(experts.data_ptr(), gates.data_ptr(), 24 * 32 * 4, 8, 48 * 32 * 4, 24 * 32 * 4)
    ], "the gates of all experts"
    assert blocks_of(torch.zeros(32, 64), weights.t()) is None, "a transposed matrix is scattered"


def test_touching_runs_become_one() -> None:
    runs = [RowBlock(100, 500, 8), RowBlock(92, 492, 8), RowBlock(108, 600, 4), RowBlock(200, 608, 4)]
    assert merge(runs) == [RowBlock(92, 492, 16), RowBlock(108, 600, 4), RowBlock(200, 608, 4)]


def test_a_misaligned_run_is_copied_aligned_but_for_its_ends() -> None:
    parts = align(RowBlock(1003, 2011 - 16, 10_000))
    assert [part.alignment for part in parts] == [1, 8 if (1003 - 1995) % 16 else 16, 1]
    assert sum(part.length for part in parts) == 10_000
    short = RowBlock(1003, 2011, 100)
    assert align(short) == [short]


def test_a_run_is_cut() -> None:
    assert list(cut(RowBlock(0, 100, 25), 10)) == [RowBlock(0, 100, 10), RowBlock(10, 110, 10), RowBlock(20, 120, 5)]
