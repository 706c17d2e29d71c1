"""Cells are no larger than what travels between hosts at a time, and whoever cuts along them cuts no finer."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_engine.core.boxes import Box, contains, overlap, uncovered, whole
from ckpt_engine.core.chunk_sizes import LEAST_BYTES, MOST_BYTES, chunk_bytes
from ckpt_engine.core.partition import Partition
from ckpt_engine.core.plan import compile_plans
from ckpt_engine.core.publication import Publication, merge_tables
from tests.core.core_tables import everything, table


def publication(**shapes: tuple[int, ...]) -> Publication:
    """One source that holds all of some tensors, which take no memory."""
    weights = {name: torch.empty(shape, dtype=torch.bfloat16, device="meta") for name, shape in shapes.items()}
    return merge_tables([table(0, weights, everything(weights))])


def test_a_large_tensor_is_cut_into_rows_and_a_small_one_is_not() -> None:
    made = publication(large=(5000, 4096), small=(1024, 1024), scalar=())
    assert chunk_bytes(made.bytes) == LEAST_BYTES
    plans = compile_plans(made, made.table_digests, [])
    large, scalar, small = plans.cells.tilings
    assert len(small.boxes) == len(scalar.boxes) == 1
    assert len(large.boxes) == 10
    assert all(2 * box.volume <= LEAST_BYTES for box in large.boxes)
    assert all(box.shape[1] == 4096 for box in large.boxes), "each lies in one run"
    assert [len(atoms.atoms) for atoms in plans.atoms.values()] == [12]


def test_what_was_sealed_in_large_cells_is_not_cut_again() -> None:
    made = publication(large=(5000, 4096))
    boxes = [[whole((5000, 4096))]]
    plans = compile_plans(made, made.table_digests, [], along=boxes)
    assert [list(tiling.boxes) for tiling in plans.cells.tilings] == boxes


def test_the_cells_of_a_terabyte_are_half_of_the_largest_chunk() -> None:
    assert [chunk_bytes(size) for size in (0, 1 << 30, 16 << 30, 1 << 40)] == [
        *(LEAST_BYTES, LEAST_BYTES),
        *(16 << 20, MOST_BYTES // 2),
    ]


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=3).flatmap(
        lambda shape: st.tuples(
            st.just(tuple(shape)),
            st.lists(st.tuples(*(st.tuples(st.integers(0, size), st.integers(0, size)) for size in shape)), max_size=4),
            st.integers(1, 40),
        )
    )
)
def test_cells_are_small_enough_and_stay_as_they_are_when_they_are_cut_along(
    drawn: tuple[tuple[int, ...], list[tuple[tuple[int, int], ...]], int],
) -> None:
    shape, spans, most = drawn
    boxes = [Box(tuple(map(min, span)), tuple(map(max, span))) for span in spans]
    needed = frozenset(box for box in boxes if box.volume)
    partition = Partition((whole(shape),))
    cells = partition.tiling(needed, most).boxes
    assert all(cell.volume <= most for cell in cells)
    assert overlap(cells) is None
    assert uncovered(whole(shape), cells) is None
    for need in needed:
        inside = [cell for cell in cells if contains(need, cell)]
        assert sum(cell.volume for cell in inside) == need.volume
    assert sorted(partition.tiling(needed | frozenset(cells)).boxes) == sorted(cells)
