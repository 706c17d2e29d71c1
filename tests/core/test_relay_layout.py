"""A relay's layout: every cell that somebody needs is there once, and whoever reads finds long runs."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_engine.core.boxes import Box, contains, intersect, overlap, tile, uncovered, whole
from ckpt_engine.core.manifest import blob_digest, canonical
from ckpt_engine.core.partition import Partition
from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.core.relay_layout import (
    ATOM_BYTES,
    GROUP_BYTES,
    SlotLayout,
    check_memory,
    check_room,
    lay_out,
    needed_boxes,
)
from ckpt_engine.v1.weights_pb2 import Need, Problem, WorkerNeeds
from tests.core.relay_records import in_one, part_of, recorded

Needs = list[tuple[int, Box]]


def some_box(shape: tuple[int, ...]) -> st.SearchStrategy[Box]:
    spans = [st.tuples(st.integers(0, size), st.integers(0, size)).map(sorted) for size in shape]
    return st.tuples(*spans).map(lambda found: Box(tuple(each[0] for each in found), tuple(each[1] for each in found)))


def runs(layout: SlotLayout, needs: Needs) -> list[tuple[int, int]]:
    """[start, end) of what a reader reads, in bytes of the slot; gaps within a cache line do not count."""
    found: list[tuple[int, int]] = []
    for atom in layout.atoms:
        if any(tensor == atom.tensor and intersect(box, atom.box) for tensor, box in needs):
            end = atom.offset + atom.box.volume * 2
            if found and atom.offset - found[-1][1] < ATOM_BYTES:
                found[-1] = found[-1][0], end
            else:
                found.append((atom.offset, end))
    return found


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_every_cell_that_a_reader_touches_lies_there_once(data: st.DataObject) -> None:
    shapes = data.draw(st.lists(st.sampled_from([(8, 6), (4,), (), (2, 3, 4), (0, 3)]), min_size=1, max_size=5))
    cut = [data.draw(st.lists(some_box(shape), max_size=2)) for shape in shapes]
    cells = [tile(whole(shape), boxes) for shape, boxes in zip(shapes, cut, strict=True)]
    record = recorded(shapes, cells)
    tensors = st.integers(0, len(shapes) - 1)
    one = tensors.flatmap(lambda tensor: st.tuples(st.just(tensor), some_box(shapes[tensor])))
    readers = data.draw(st.lists(st.lists(one, max_size=4), max_size=4))
    everything = data.draw(st.booleans())
    layout = lay_out(record, readers, everything)

    held: list[list[Box]] = [[] for _ in shapes]
    for atom in layout.atoms:
        held[atom.tensor].append(atom.box)
        assert contains(record.boxes[atom.tensor][atom.cell - record.first[atom.tensor]], atom.box)
    needed = [box for needs in readers for box in needs]
    for tensor, boxes in enumerate(held):
        assert overlap(boxes) is None, "each element lies there once"
        for cell in record.boxes[tensor]:
            wanted = everything or any(at == tensor and intersect(cell, box) for at, box in needed)
            inside = [box for box in boxes if contains(cell, box)]
            assert sum(box.volume for box in inside) == (cell.volume if wanted else 0)
        for at, box in needed:
            if at == tensor:
                assert uncovered(box, boxes) is None
                touched = [each for each in boxes if intersect(box, each)]
                assert all(contains(box, each) for each in touched), "a need is a union of whole atoms"
    assert layout.bytes == 2 * sum(atom.box.volume for atom in layout.atoms)
    for atom, following in pairwise(layout.atoms):
        assert atom.offset + 2 * atom.box.volume <= following.offset
    for atom in layout.atoms:
        group = layout.groups[atom.group]
        assert atom.offset % ATOM_BYTES == 0
        assert group.offset <= atom.offset <= atom.offset + 2 * atom.box.volume <= group.offset + group.size
    assert [group.offset % GROUP_BYTES for group in layout.groups] == [0] * len(layout.groups)
    assert layout.size == sum(group.size for group in layout.groups)
    assert lay_out(record, readers, everything).atoms == layout.atoms


def test_tensor_parallel_workers_of_one_host_need_whole_rows_and_each_reads_two_runs() -> None:
    """One half of each row of a hundred matrices is a hundred thousand small rows where they lie in a trainer."""
    shapes = [(64, 32), (32,)] * 100
    needs = [[(index, part_of(shape, 1, rank, 2)) for index, shape in enumerate(shapes)] for rank in range(2)]
    layout = lay_out(in_one(shapes), needs)
    assert [group.readers for group in layout.groups] == [(0,), (0, 1), (1,)]
    for own in needs:
        assert len(runs(layout, own)) == 2, "its halves, and what both need"
    together = needs[0] + needs[1]
    assert layout.bytes == sum(2 * math.prod(shape) for shape in shapes), "together they need everything, once"
    assert len(runs(layout, together)) == len(layout.groups)


def test_a_rank_on_a_host_of_its_own_reads_its_atoms_in_one_run() -> None:
    shapes = [(64, 32)] * 100
    mine = [(index, part_of(shape, 1, 1, 2)) for index, shape in enumerate(shapes)]
    record = recorded(shapes, [[part_of(shape, 1, rank, 2) for rank in range(2)] for shape in shapes])
    layout = lay_out(record, [mine])
    assert layout.bytes == 100 * 64 * 16 * 2
    assert len(runs(layout, mine)) == 1


def test_replicas_with_equal_needs_share_what_they_read() -> None:
    shapes = [(16, 8)] * 3
    needs: Needs = [(index, whole(shape)) for index, shape in enumerate(shapes)]
    layout = lay_out(in_one(shapes), [needs, list(needs), needs])
    assert [group.readers for group in layout.groups] == [(0,)]
    assert layout.bytes == 3 * 16 * 8 * 2


def test_what_nobody_needs_lies_behind_the_rest_and_only_where_everything_is_held() -> None:
    shapes = [(16, 8)] * 3
    record = in_one(shapes)
    assert {atom.tensor for atom in lay_out(record, [[(1, whole((16, 8)))]]).atoms} == {1}
    layout = lay_out(record, [[(1, whole((16, 8)))]], everything=True)
    assert [atom.tensor for atom in layout.atoms] == [1, 0, 2]
    assert [group.readers for group in layout.groups] == [(0,), ()]
    assert lay_out(record, [], everything=True).bytes == 3 * 16 * 8 * 2
    assert lay_out(record, []).size == 0


def test_of_a_part_that_is_all_there_will_ever_be_only_whole_cells_are_held() -> None:
    shapes = [(16, 8), (16,), (4, 8)]
    record = recorded(shapes, [[part_of(shape, 0, number, 4) for number in range(4)] for shape in shapes])
    needs = [[(tensor, part_of(shape, 1, number, 2)) for tensor, shape in enumerate(shapes)] for number in range(2)]
    within = [Partition((Box((0, 0), (4, 8)), Box((4, 0), (10, 8)))), Partition((Box((8,), (16,)),)), Partition(())]
    for everything in (False, True):
        layout = lay_out(record, needs, everything, within)
        cells = {(atom.tensor, atom.cell - record.first[atom.tensor]) for atom in layout.atoms}
        assert cells == {(0, 0), (0, 1), (1, 2), (1, 3)}, "half of a cell could not be compared with what was sealed"
        assert layout.bytes == 2 * (8 * 8 + 8)
    assert lay_out(record, needs, within=[Partition(())] * 3).size == 0


@pytest.mark.slow
def test_fifty_thousand_tensors_are_laid_out_without_looking_at_each_pair() -> None:
    """Eight workers; a square of their number would not end within the test's own limit."""
    shapes = [(64, 32), (32,)] * 25_000
    needs = [[(index, part_of(shape, 1, rank, 8)) for index, shape in enumerate(shapes)] for rank in range(8)]
    layout = lay_out(in_one(shapes), needs)
    assert len(layout.atoms) == 25_000 * 9
    assert len(layout.groups) == 9


def test_memory_is_refused_with_both_numbers() -> None:
    check_memory(100, 100, "version 7")
    with pytest.raises(CkptEngineError, match=r"version 7 takes 101 bytes of a relay's slot, and a slot has 100.*202"):
        check_memory(101, 100, "version 7")
    with pytest.raises(CkptEngineError, match=r"version 7 takes 5 more bytes of memory, .* has 4 left") as caught:
        check_room(5, 4, "version 7")
    assert caught.value.problem.code == Problem.CODE_UNAVAILABLE


def test_needs_are_of_the_record_or_refused_by_name() -> None:
    record = in_one([(4, 4)])
    own = blob_digest(canonical(record.record.manifest))

    def needs(tensor: int, *stop: int, of: bytes = own) -> WorkerNeeds:
        return WorkerNeeds(manifest_digest=of, needs=[Need(tensor=tensor, start=[0] * len(stop), stop=stop)])

    assert needed_boxes(needs(0, 2, 4), record) == [(0, Box((0, 0), (2, 4)))]
    for wrong, why in (
        (needs(0, 2, 4, of=b"other"), "has to prepare again"),
        (needs(1, 2, 4), "needs tensor 1"),
        (needs(0, 2, 5), r"t000000, whose shape is \[4, 4\]"),
        (needs(0, 2), "t000000"),
    ):
        with pytest.raises(CkptEngineError, match=why):
            needed_boxes(wrong, record)
