"""Chunks: each host gets what it wants, nothing else, in pieces that can be verified."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_engine.core.boxes import Box, intersect, overlap, tile, whole
from ckpt_engine.core.chunks import LEAST_BYTES, MOST_BYTES, ChunkTable, chunk_bytes, cut_chunks, rows_of
from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.core.sealed_record import Recorded
from tests.core.relay_records import in_one, part_of, recorded

Needs = tuple[tuple[int, Box], ...]
SHAPES = [(8, 6), (4,), (), (2, 3, 4), (0, 3), (64, 2), (1, 40)]


def some_box(shape: tuple[int, ...]) -> st.SearchStrategy[Box]:
    spans = [st.tuples(st.integers(0, size), st.integers(0, size)).map(sorted) for size in shape]
    return st.tuples(*spans).map(lambda found: Box(tuple(each[0] for each in found), tuple(each[1] for each in found)))


def elements(box: Box) -> set[int]:
    """Numbers of the elements of a box, in a tensor that is large enough."""
    return {sum(at) for at in _points(box)}


def _points(box: Box) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = [()]
    for axis, (start, stop) in enumerate(zip(box.start, box.stop, strict=True)):
        found = [(*point, index * 1000**axis) for point in found for index in range(start, stop)]
    return found


def wanted(needs: list[Needs]) -> set[tuple[int, int]]:
    return {(tensor, each) for own in needs for tensor, box in own for each in elements(box)}


def delivered(table: ChunkTable, host: str) -> list[tuple[int, int]]:
    number = table.hosts.index(host)
    pieces = [
        piece for chunk in table.chunks if number in chunk.hosts for piece in table.pieces[chunk.first : chunk.stop]
    ]
    return [(piece.tensor, each) for piece in pieces for each in elements(piece.box)]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_each_host_gets_each_element_that_it_wants_once_and_no_other(data: st.DataObject) -> None:
    """So bytes over the wire are those needed, also where the ranks of a server are on two hosts."""
    shapes = data.draw(st.lists(st.sampled_from(SHAPES), min_size=1, max_size=5))
    record = recorded(
        shapes, [tile(whole(shape), data.draw(st.lists(some_box(shape), max_size=2))) for shape in shapes]
    )
    tensors = st.integers(0, len(shapes) - 1)
    one = tensors.flatmap(lambda tensor: st.tuples(st.just(tensor), some_box(shapes[tensor])))
    worker = st.lists(one, max_size=4).map(tuple)
    needs = {
        f"h{index}": each for index, each in enumerate(data.draw(st.lists(st.lists(worker, max_size=3), max_size=4)))
    }
    everything = data.draw(st.sets(st.sampled_from(["h0", "h1", "all"]), max_size=2))
    cells = range(len(record.values))
    held = {"t0": set(cells), "h0": data.draw(st.sets(st.sampled_from(cells) if cells else st.nothing()))}
    target = data.draw(st.sampled_from([2, 16, 1000]))
    table = cut_chunks(record, needs, held, everything, target)

    model = wanted([tuple((tensor, whole(shape)) for tensor, shape in enumerate(shapes))])
    there = wanted([tuple((record_cell(record.first, cell), cell_box(record, cell)) for cell in held["h0"])])
    for host in table.hosts:
        asked = model if host in everything else wanted(needs[host])
        got = delivered(table, host)
        assert sorted(got) == sorted(asked - there if host == "h0" else asked)
    for chunk in table.chunks:
        pieces = table.pieces[chunk.first : chunk.stop]
        assert chunk.hosts
        assert chunk.bytes == 2 * sum(piece.box.volume for piece in pieces) > 0
        for piece in pieces:
            cell = cell_box(record, piece.cell)
            assert intersect(cell, piece.box) == piece.box
            assert piece.whole == (cell == piece.box)
            assert [name for name in table.trainers if piece.cell in held[name]] == [
                table.trainers[each] for each in chunk.holders
            ]
    assert [chunk.first for chunk in table.chunks[1:]] == [chunk.stop for chunk in table.chunks[:-1]]
    turned = {host: list(reversed(needs[host])) for host in reversed(needs)}
    assert cut_chunks(record, turned, dict(reversed(held.items())), everything, target) == table
    assert len(table.unsealed) == sum(not piece.whole for piece in table.pieces)


def record_cell(first: tuple[int, ...], cell: int) -> int:
    return max(tensor for tensor, begin in enumerate(first[:-1]) if begin <= cell)


def cell_box(record: Recorded, cell: int) -> Box:
    return [box for boxes in record.boxes for box in boxes][cell]


def test_the_ranks_of_a_server_on_two_hosts_get_half_each_and_what_both_need() -> None:
    shapes = [(64, 32), (32,)] * 50
    needs = [tuple((index, part_of(shape, 1, rank, 2)) for index, shape in enumerate(shapes)) for rank in range(2)]
    cells = [[part_of(shape, 1, rank, 2) for rank in range(2 if len(shape) > 1 else 1)] for shape in shapes]
    record = recorded(shapes, cells)
    hosts = {f"{server}-{rank}": [needs[rank]] for server in range(3) for rank in range(2)}
    table = cut_chunks(record, hosts, {"t": range(len(record.values))}, target=4096)
    assert not table.unsealed
    sets = {tuple(table.hosts[each].split("-")[1] for each in chunk.hosts) for chunk in table.chunks}
    assert sets == {("0", "0", "0"), ("1", "1", "1"), ("0", "1", "0", "1", "0", "1")}
    assert sum(chunk.bytes for chunk in table.chunks) == 50 * (64 * 32 + 32) * 2
    each = 50 * (64 * 16 + 32) * 2
    for host in range(6):
        assert sum(chunk.bytes for chunk in table.chunks if host in chunk.hosts) == each


def test_chunks_have_4_to_64_mib_whatever_the_tensors_are() -> None:
    """Thousands of norms, matrices, an embedding of a GiB that is one cell, and a shard that nearly fills a chunk."""
    shapes = [(2048,)] * 3000 + [(1024, 2048)] * 40 + [(262144, 2048), (33_000_000,), (33_554_432,), (1, 1, 50_000_000)]
    needs = [tuple((index, whole(shape)) for index, shape in enumerate(shapes))]
    record = in_one(shapes)
    held = {"t": range(len(record.values))}
    for target in (0, LEAST_BYTES, MOST_BYTES // 2):
        table = cut_chunks(record, {"a": needs, "b": needs}, held, target=target)
        sizes = [chunk.bytes for chunk in table.chunks]
        assert LEAST_BYTES <= min(sizes) <= max(sizes) <= MOST_BYTES
        assert sum(sizes) == 2 * sum(map(math.prod, shapes))
        again = recorded(shapes, cells_of(table, len(shapes)))
        sealed = cut_chunks(again, {"a": needs}, {"t": range(len(again.values))}, target=target)
        assert not sealed.unsealed, "sealed along the pieces, each chunk can be verified by the record alone"
    assert len(table.pieces) < 4000


def cells_of(table: ChunkTable, tensors: int) -> list[list[Box]]:
    found: list[list[Box]] = [[] for _ in range(tensors)]
    for piece in table.pieces:
        found[piece.tensor].append(piece.box)
    return found


def test_what_makes_no_sense_is_refused() -> None:
    record = in_one([(4, 4)])
    with pytest.raises(CkptEngineError, match="hold cell 1, and the record has 1"):
        cut_chunks(record, {}, {"t": [0, 1]}, ["a"])
    with pytest.raises(CkptEngineError, match="would be larger than 67108864"):
        cut_chunks(record, {}, {"t": [0]}, ["a"], target=MOST_BYTES)


def test_a_small_rest_travels_with_the_chunk_before_it() -> None:
    record = in_one([(1 << 20,)] * 3)
    needs = [tuple((index, whole((1 << 20,))) for index in range(3))]
    assert [chunk.bytes for chunk in cut_chunks(record, {"a": needs}, {"t": range(3)}).chunks] == [6 << 20]


def test_how_large_chunks_are() -> None:
    assert [chunk_bytes(size) for size in (0, 1 << 30, 16 << 30, 1 << 40)] == [
        *(LEAST_BYTES, LEAST_BYTES),
        *(16 << 20, MOST_BYTES // 2),
    ]


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(SHAPES).flatmap(some_box), st.integers(1, 20))
def test_a_piece_that_is_too_large_is_cut_into_runs_of_its_own_order(box: Box, most: int) -> None:
    parts = list(rows_of(box, most))
    assert sum(part.volume for part in parts) == box.volume
    assert overlap(parts) is None or not box.rank
    assert all(0 < part.volume <= most for part in parts)
    flat = [place for part in parts for place in _points(part)]
    assert flat == _points(box), "rows first, one part after the other"
    assert all(a <= b for a, b in pairwise(parts))


@pytest.mark.slow
def test_a_model_of_a_terabyte_on_a_thousand_hosts_is_cut_without_looking_at_each_pair() -> None:
    """34 thousand experts; the ranks of each server are on two hosts. A square of hosts by tensors would not end."""
    shapes = [(2048, 7168)] * 34_000
    parts = [tuple((index, part_of(shape, 0, rank, 2)) for index, shape in enumerate(shapes)) for rank in range(2)]
    cells = [[part_of(shape, 0, rank, 2) for rank in range(2)] for shape in shapes]
    record = recorded(shapes, cells)
    held = {f"t{number}": range(number, len(record.values), 8) for number in range(8)}
    table = cut_chunks(record, {f"{number:04}": [parts[number % 2]] for number in range(1024)}, held)
    assert sum(chunk.bytes for chunk in table.chunks) == 34_000 * 2048 * 7168 * 2
    assert 16_000 < len(table.chunks) < 34_000
