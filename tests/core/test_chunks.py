"""Chunks of a version: they follow from its record, and each is found in any slot that has it."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_engine.core.boxes import Box, tile, whole
from ckpt_engine.core.chunk_places import ChunkPlaces
from ckpt_engine.core.chunk_sizes import LEAST_BYTES, join_pieces
from ckpt_engine.core.chunks import KEY_BYTES, Chunk, chunk_key, chunks_of, chunks_with
from ckpt_engine.core.partition import Partition
from ckpt_engine.core.plan import compile_plans
from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.core.relay_layout import SlotLayout, lay_out
from ckpt_engine.core.sealed_record import ProvenRecord, read_record
from ckpt_engine.v1.weights_pb2 import SealedRecord
from tests.core.relay_records import in_one, part_of, recorded
from tests.core.test_cells import publication
from tests.core.test_relay_layout import Needs, some_box

MEBIBYTE = 1 << 20


def grouped(record: ProvenRecord, groups: list[int]) -> ProvenRecord:
    message = SealedRecord()
    message.CopyFrom(record.record)
    message.groups[:] = groups
    return read_record(message, record.root)


@given(st.lists(st.integers(1, LEAST_BYTES), max_size=40), st.sampled_from([LEAST_BYTES, 2 * LEAST_BYTES]))
def test_runs_cover_all_and_none_is_twice_as_large_as_it_should_be(sizes: list[int], least: int) -> None:
    runs = join_pieces(sizes, least)
    assert [at for first, last in runs for at in range(first, last)] == list(range(len(sizes)))
    assert all(first < last and sum(sizes[first:last]) <= 2 * least for first, last in runs)
    assert all(sum(sizes[first:last]) >= min(least, sum(sizes)) for first, last in runs[:-1])


def test_a_small_rest_travels_with_the_chunk_before_it() -> None:
    assert join_pieces([2 * MEBIBYTE] * 3, LEAST_BYTES) == [(0, 3)]
    assert join_pieces([2 * MEBIBYTE] * 4, LEAST_BYTES) == [(0, 2), (2, 4)]


def test_chunks_have_all_cells_of_a_group_in_record_order_and_no_others() -> None:
    """Tensors of 2 MiB, two of which make a chunk."""
    record = in_one([(1024, 1024)] * 12)
    assert [chunk.cells for chunk in chunks_of(record)] == [(at, at + 1) for at in range(0, 12, 2)]
    groups = [0, 1, 0, 1, 0, 1, 0, 1, 2, 0, 1, 2]
    found = chunks_of(grouped(record, groups))
    assert {chunk.bytes for chunk in found} == {4 * MEBIBYTE, 6 * MEBIBYTE}
    assert sorted(cell for chunk in found for cell in chunk.cells) == list(range(12))
    assert all(len({groups[cell] for cell in chunk.cells}) == 1 for chunk in found)
    assert all(list(chunk.cells) == sorted(chunk.cells) for chunk in found)


def test_the_chunks_of_each_group_are_spread_over_the_whole_order() -> None:
    """Groups differ by their holders: without this the holders would send one after the other."""
    groups = [at // 8 for at in range(32)]
    found = chunks_of(grouped(in_one([(2048, 1024)] * 32), groups))
    assert [groups[chunk.cells[0]] for chunk in found] == [0, 1, 2, 3] * 8


def test_a_large_tensor_travels_in_chunks_of_rows() -> None:
    shape = (5000, 4096)
    made = publication(large=shape)
    (tiling,) = compile_plans(made, made.table_digests, []).cells.tilings
    sizes = [chunk.bytes for chunk in chunks_of(recorded([shape], [tiling.boxes]))]
    assert sum(sizes) == made.bytes
    assert LEAST_BYTES <= min(sizes) <= max(sizes) < 2 * LEAST_BYTES


def test_a_key_is_of_these_weights_in_these_chunks() -> None:
    record = in_one([(4, 4)] * 4)
    chunks = [Chunk((0, 1), 64), Chunk((2, 3), 64)]
    keys = {
        chunk_key(record, chunks),
        chunk_key(in_one([(4, 4)] * 5), chunks),
        chunk_key(grouped(record, [0, 0, 1, 1]), chunks),
        chunk_key(record, chunks[::-1]),
        chunk_key(record, [Chunk((0, 1, 2), 96), Chunk((3,), 32)]),
    }
    assert len(keys) == 5
    assert all(len(key) == KEY_BYTES for key in keys)
    assert chunk_key(record, chunks) == chunk_key(record, tuple(chunks))
    assert chunks_with(chunks, [3]) == [1]
    assert chunks_with(chunks, {1, 2}) == [0, 1]
    assert chunks_with(chunks, ()) == []


def slot_bytes(layout: SlotLayout, content: list[np.ndarray]) -> bytes:
    """A slot with a version in it. content: of each tensor, two bytes an element."""
    found = np.zeros(layout.size, dtype=np.uint8)
    for atom in layout.atoms:
        where = tuple(slice(*span) for span in zip(atom.box.start, atom.box.stop, strict=True))
        own = np.ascontiguousarray(content[atom.tensor][where]).reshape(-1).view(np.uint8)
        found[atom.offset : atom.offset + len(own)] = own
    return found.tobytes()


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_a_chunk_is_the_same_bytes_in_all_slots_and_a_slot_has_whole_chunks(data: st.DataObject) -> None:
    shapes = data.draw(st.lists(st.sampled_from([(8, 6), (4,), (), (2, 3, 4), (3, 2, 2, 4)]), min_size=1, max_size=5))
    cut = [data.draw(st.lists(some_box(shape), max_size=2)) for shape in shapes]
    record = recorded(shapes, [tile(whole(shape), boxes) for shape, boxes in zip(shapes, cut, strict=True)])
    cells = data.draw(st.permutations(range(len(record.values))))
    bounds = sorted({0, len(cells), *data.draw(st.lists(st.integers(0, len(cells)), max_size=4))})
    sizes = record.cut.sizes.tolist()
    chunks = [
        Chunk(tuple(cells[first:last]), sum(sizes[cell] for cell in cells[first:last]))
        for first, last in pairwise(bounds)
    ]
    content = [
        np.random.default_rng(at).integers(0, 1 << 16, shape, dtype=np.uint16) for at, shape in enumerate(shapes)
    ]
    travels = []
    for chunk in chunks:
        boxes = [(tensor, box) for tensor, boxes in enumerate(record.boxes) for box in boxes]
        parts = []
        for cell in chunk.cells:
            tensor, box = boxes[cell]
            parts.append(content[tensor][tuple(slice(*span) for span in zip(box.start, box.stop, strict=True))])
        travels.append(b"".join(np.ascontiguousarray(each).tobytes() for each in parts))
    tensors = st.integers(0, len(shapes) - 1)
    one = tensors.flatmap(lambda tensor: st.tuples(st.just(tensor), some_box(shapes[tensor])))
    for _ in range(2):
        readers: list[Needs] = data.draw(st.lists(st.lists(one, max_size=4), max_size=3))
        everything = data.draw(st.booleans())
        within = None
        if data.draw(st.booleans()):
            within = [Partition((data.draw(some_box(shape)),)) for shape in shapes]
        layout = lay_out(record, readers, everything, within, chunks)
        places = ChunkPlaces(layout, chunks)
        slot = slot_bytes(layout, content)
        for number in places.held:
            runs = places.runs(number)
            assert b"".join(slot[offset : offset + size] for offset, size in runs) == travels[number]
            assert all(sum(run) != following[0] for run, following in pairwise(runs))
            assert sum(size for _, size in runs) == chunks[number].bytes
            assert {layout.atoms[atom].cell for atom in places.atoms(number)} == set(chunks[number].cells)
        held = {atom.cell for atom in layout.atoms}
        assert held == {cell for number in places.held for cell in chunks[number].cells}
        if within is None:
            alone = {atom.cell for atom in lay_out(record, readers, everything).atoms}
            assert places.held == tuple(chunks_with(chunks, alone))


def test_of_a_part_that_is_all_there_will_ever_be_only_whole_chunks_are_held() -> None:
    shape = (16, 8)
    record = recorded([shape], [[part_of(shape, 0, number, 4) for number in range(4)]])
    chunks = [Chunk((0, 1), 128), Chunk((2, 3), 128)]
    layout = lay_out(record, [], True, [Partition((Box((0, 0), (12, 8)),))], chunks)
    assert ChunkPlaces(layout, chunks).held == (0,)
    with pytest.raises(CkptEngineError, match="chunk 1 has cell 2, and this slot is not laid out for that"):
        ChunkPlaces(layout, chunks).runs(1)


def test_cells_that_lie_side_by_side_are_one_run() -> None:
    record = in_one([(64, 32)] * 8)
    chunks = [Chunk(tuple(range(4)), 4 * 4096), Chunk(tuple(range(4, 8)), 4 * 4096)]
    places = ChunkPlaces(lay_out(record, [], True, None, chunks), chunks)
    assert [places.runs(number) for number in places.held] == [[(0, 16384)], [(16384, 16384)]]


def test_a_cell_that_late_readers_cut_is_rows_of_each_part() -> None:
    shape = (64, 32)
    record = in_one([shape])
    needs = [[(0, part_of(shape, 1, rank, 2))] for rank in range(2)]
    chunks = [Chunk((0,), 4096)]
    layout = lay_out(record, needs, False, None, chunks)
    runs = ChunkPlaces(layout, chunks).runs(0)
    offsets = sorted(atom.offset for atom in layout.atoms)
    assert runs == [(offset + 32 * row, 32) for row in range(64) for offset in offsets]
