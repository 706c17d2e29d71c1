"""Chunks of a slot, their trees, and what relays are told of a plan."""

from __future__ import annotations

from graphlib import TopologicalSorter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_engine.core import relay_chunks
from ckpt_engine.core.chunk_sizes import LEAST_BYTES, join_pieces
from ckpt_engine.core.fan_out_orders import SHARES, fan_out_orders
from ckpt_engine.core.relay_chunks import SlotChunk, deal_chunks
from ckpt_engine.v1.manager_pb2 import FanOut
from ckpt_engine.v1.weights_pb2 import Region


def orders(count: int, about: bytes = b"1") -> dict[str, FanOut]:
    return fan_out_orders({f"relay {each}": Region(locator=b"%d" % each) for each in range(count)}, about)


@given(st.lists(st.integers(1, LEAST_BYTES), max_size=40), st.sampled_from([LEAST_BYTES, 2 * LEAST_BYTES]))
def test_runs_cover_all_and_none_is_twice_as_large_as_it_should_be(sizes: list[int], least: int) -> None:
    runs = join_pieces(sizes, least)
    assert [at for first, last in runs for at in range(first, last)] == list(range(len(sizes)))
    assert all(first < last and sum(sizes[first:last]) <= 2 * least for first, last in runs)
    assert all(sum(sizes[first:last]) >= min(least, sum(sizes)) for first, last in runs[:-1])


def test_a_small_rest_travels_with_the_chunk_before_it() -> None:
    mebibyte = 1 << 20
    assert join_pieces([2 * mebibyte] * 3, LEAST_BYTES) == [(0, 3)]
    assert join_pieces([2 * mebibyte] * 4, LEAST_BYTES) == [(0, 2), (2, 4)]


@pytest.mark.parametrize("count", [2, 3, 8, 12, 40])
def test_nobody_waits_for_himself_whomever_each_asks(count: int) -> None:
    told = orders(count)
    trees = {len(each.trees) for each in told.values()}
    assert trees == {min(8, count)}
    for tree in range(min(trees)):
        asks = {name: {each.peers[peer].relay for peer in each.trees[tree].ask} for name, each in told.items()}
        tuple(TopologicalSorter(asks).static_order())  # raises for a circle
        assert sum(not each for each in asks.values()) == 1, "one reads those who hold the version"
        assert all(len(each) <= 3 for each in asks.values())


def test_all_are_told_the_same_shares_and_the_same_name_of_the_plan() -> None:
    told = orders(12)
    assert len({each.plan for each in told.values()}) == 1
    shares = {tuple(tree.share for tree in each.trees) for each in told.values()}
    assert len(shares) == 1
    assert sum(*shares) == SHARES
    assert orders(12) == told
    assert orders(12, b"2")["relay 0"].plan != told["relay 0"].plan
    assert all(peer.region.locator == peer.relay.removeprefix("relay ").encode() for peer in told["relay 3"].peers)


def test_chunks_are_dealt_by_their_bytes() -> None:
    sizes = [300, 1, 1, 1, 50, 50, 50, 50, 50, 50]
    chunks = [SlotChunk((number,), (number,), ((0, size),), size) for number, size in enumerate(sizes)]
    found = deal_chunks(chunks, [1, 1])
    assert sorted(number for tree in found for number in tree) == list(range(len(sizes)))
    assert found[0] == [0]
    assert deal_chunks(chunks, [1]) == [list(range(len(sizes)))]
    assert [len(tree) for tree in deal_chunks(chunks[4:], [2, 1])] == [4, 2]


def test_what_lies_elsewhere_or_is_another_plan_has_another_key() -> None:
    chunks = [SlotChunk((0,), (0,), ((0, 64),), 64)]
    moved = [SlotChunk((0,), (0,), ((64, 64),), 64)]
    keys = [
        relay_chunks.filling_key(plan, root, each)
        for plan, root, each in ((b"1", b"r", chunks), (b"2", b"r", chunks), (b"1", b"s", chunks), (b"1", b"r", moved))
    ]
    assert len(set(keys)) == 4
    assert all(len(key) == relay_chunks.KEY_BYTES for key in keys)
