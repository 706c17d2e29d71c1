"""From which relays each relay asks for a chunk: no circle, equal work, few peers, the same everywhere."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Sequence
from graphlib import TopologicalSorter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_engine.core.chunk_order import ChunkOrder, ChunkRelay
from ckpt_engine.core.problems import CkptEngineError

MEBIBYTE = 1 << 20

Table = tuple[list[int], list[frozenset[int]], list[ChunkRelay]]


@st.composite
def tables(draw: st.DrawFn) -> Table:
    sizes = draw(st.lists(st.integers(1, 64 * MEBIBYTE), min_size=1, max_size=24))
    chunks = st.frozensets(st.integers(0, len(sizes) - 1))
    sets = draw(st.lists(chunks, min_size=1, max_size=4))
    wants = draw(st.lists(st.integers(0, len(sets) - 1), max_size=40))
    rates = st.sampled_from([0.0, 0.25, 1.0, 1.0, 1.0, 3.0])
    return sizes, sets, [ChunkRelay(f"relay {at}", each, draw(rates)) for at, each in enumerate(wants)]


def wanting(sets: Sequence[Collection[int]], relays: Sequence[ChunkRelay], chunk: int) -> list[ChunkRelay]:
    return [relay for relay in relays if chunk in sets[relay.wants]]


@settings(max_examples=100, deadline=None)
@given(tables())
def test_no_circle_no_leaf_and_no_relay_that_wants_another_chunk_is_asked(table: Table) -> None:
    sizes, sets, relays = table
    order = ChunkOrder(*table)
    for chunk in range(len(sizes)):
        own = {relay.name: relay for relay in wanting(sets, relays, chunk)}
        asked = {name: order.before(name, chunk) for name in own}
        tuple(TopologicalSorter(asked).static_order())  # raises for a circle
        passing = {name for name, relay in own.items() if relay.rate > 0}
        assert all(set(each) <= passing and len(set(each)) == len(each) <= 2 for each in asked.values())
        alone = [name for name, each in asked.items() if not each]
        assert len(alone) == 1 if passing else len(alone) == len(own), "one brings it from the origin, if any can"


@settings(max_examples=100, deadline=None)
@given(tables(), st.randoms())
def test_the_order_of_relays_and_sets_in_the_table_is_nothing_to_it(table: Table, dice: object) -> None:
    sizes, sets, relays = table
    shuffle = dice.shuffle  # type: ignore[attr-defined]
    numbers = list(range(len(sets)))
    shuffle(numbers)
    moved = [relay.__class__(relay.name, numbers.index(relay.wants), relay.rate) for relay in relays]
    shuffle(moved)
    one, other = ChunkOrder(*table), ChunkOrder(sizes, [sets[number] for number in numbers], moved)
    for chunk in range(len(sizes)):
        for relay in wanting(sets, relays, chunk):
            assert one.before(relay.name, chunk) == other.before(relay.name, chunk)


def order_of(count: int, chunks: int, rates: Sequence[float] = ()) -> ChunkOrder:
    relays = [ChunkRelay(name, 0, rates[at] if rates else 1.0) for at, name in enumerate(names(count))]
    return ChunkOrder([64 * MEBIBYTE] * chunks, [range(chunks)], relays)


def names(count: int) -> list[str]:
    return [f"relay {at:04}" for at in range(count)]


def sent(order: ChunkOrder, names: Sequence[str], chunks: Sequence[int]) -> Counter[str]:
    """Chunks that each relay sends if none fails."""
    found: Counter[str] = Counter(dict.fromkeys(names, 0))
    for name in names:
        for chunk in chunks:
            found.update(order.before(name, chunk)[:1])
    return found


@pytest.mark.parametrize(("count", "chunks"), [(2, 64), (8, 640), (9, 640), (23, 640), (64, 640), (100, 700)])
def test_with_equal_rates_all_send_alike(count: int, chunks: int) -> None:
    found = sent(order_of(count, chunks), names(count), range(chunks))
    assert max(found.values()) <= 1.15 * sum(found.values()) / count
    assert sum(found.values()) == chunks * (count - 1), "all but one chunk a relay comes from relays"


def test_a_thousand_relays_have_62_peers_each_and_send_alike() -> None:
    chunks = 1024
    order = order_of(1024, chunks)
    found: Counter[str] = Counter()
    asking: dict[str, set[str]] = {name: set() for name in names(1024)}
    for name in names(1024):
        asked = [other for chunk in range(chunks) for other in order.before(name, chunk)[:1]]
        found.update(asked)
        asking[name].update(asked)
        for other in set(asked):
            asking[other].add(name)
    assert max(found.values()) <= 1.15 * sum(found.values()) / 1024
    assert {len(each) for each in asking.values()} == {62}, "those that it asks, and those that ask it"


@pytest.mark.parametrize("count", [6, 30])
def test_relays_send_by_their_rates(count: int) -> None:
    rates = [2.0 if at % 3 == 0 else 0.5 if at % 3 == 1 else 1.0 for at in range(count)]
    found = sent(order_of(count, 1200, rates), names(count), range(1200))
    usual = sum(found.values()) / sum(rates)
    for rate, name in zip(rates, names(count), strict=True):
        assert found[name] / rate == pytest.approx(usual, rel=0.15)


def test_relays_with_several_sets_of_chunks_send_alike_over_all() -> None:
    """Two halves of a model on two hosts each, and twenty small sets of chunks that all want: one relay would be the
    first of each if these were dealt alone."""
    sizes = [64 * MEBIBYTE] * 200
    sets = [[*range(90), *range(180, 200)], [*range(90, 180), *range(180, 200)]]
    relays = [ChunkRelay(f"relay {at}", at % 2) for at in range(16)]
    order = ChunkOrder(sizes, sets, relays)
    found: Counter[str] = Counter()
    for relay in relays:
        for chunk in sets[relay.wants]:
            found.update(order.before(relay.name, chunk)[:1])
    assert max(found.values()) <= 1.15 * sum(found.values()) / 16


def test_those_that_ask_one_member_of_a_column_go_on_to_different_ones() -> None:
    order = order_of(64, 64)
    lost = order.before("relay 0063", 0)[0]
    others = [each for name in names(64) for first, *each in [order.before(name, 0) or ("",)] if first == lost and each]
    assert len(others) == 7
    assert len({second for (second,) in others}) == 7


def test_an_order_of_a_thousand_relays_is_quick() -> None:
    """No time is asserted: a square of their number would not end within the test's own limit."""
    begun = time.process_time()
    order = order_of(1024, 15_000)
    found = [order.before("relay 0511", chunk) for chunk in range(15_000)]
    assert sum(not each for each in found) in (14, 15), "it is the first of its share"
    print(f"{time.process_time() - begun:.2f} s")


@pytest.mark.parametrize(
    ("sets", "relays", "why"),
    [
        ([[0]], [ChunkRelay("relay a", 1)], "has 1 sets of chunks, and relay a wants set 1"),
        ([[0]], [ChunkRelay("relay a", 0), ChunkRelay("relay a", 0)], "has relay a twice"),
        ([[2]], [ChunkRelay("relay a", 0)], "set 0 of a table of relays names chunk 2, and there are 2"),
        ([[0]], [ChunkRelay("relay a", 0, float("nan"))], "gives relay a a rate of nan"),
        ([[0]], [ChunkRelay("relay a", 0, -1)], "gives relay a a rate of -1"),
    ],
)
def test_a_table_that_contradicts_itself_is_refused(sets: list[list[int]], relays: list[ChunkRelay], why: str) -> None:
    with pytest.raises(CkptEngineError, match=why):
        ChunkOrder([1, 1], sets, relays)


def test_what_a_relay_does_not_want_it_does_not_ask_for() -> None:
    order = ChunkOrder([1, 1], [[0]], [ChunkRelay("relay a", 0)])
    assert order.before("relay a", 0) == ()
    with pytest.raises(CkptEngineError, match="a chunk that it does not want"):
        order.before("relay a", 1)
    assert ChunkOrder([1], [], []).first(0) == ""
