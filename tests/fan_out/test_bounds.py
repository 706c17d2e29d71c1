"""Chunks in simulated time: each host has all that it wants within a bound of its own, whatever happens to others.

The bound is the longer of two: what the host wants at its own rate, and the whole model at what the origins send. Times
are simulated, so a busy machine changes none of them. What relays ask is decided by the code of production.
"""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.fan_out import network
from benchmarks.fan_out.network import NEVER, Outcome
from benchmarks.fan_out.plans import (
    RATE,
    World,
    all_pull,
    by_chunk,
    chain,
    even_world,
    from_rank_0,
    over_two_hosts,
    with_faults,
    worst,
)
from ckpt_engine.relay import chunk_search

SIZE = 16 * 10**9
"""Bytes: 683 chunks."""


def world(hosts: int, trainers: int = 1) -> World:
    return even_world(hosts, SIZE, trainers)


def models_sent(found: Outcome, of: World) -> float:
    """How many times the model left the origins."""
    return float(found.sent[len(of.rates) :].sum() / of.model)


@pytest.mark.parametrize("trainers", [1, 4])
@pytest.mark.parametrize("hosts", [1, 2, 8, 13])
def test_every_host_has_all_within_its_bound_and_each_byte_leaves_the_origins_once(hosts: int, trainers: int) -> None:
    of = world(hosts, trainers)
    found = by_chunk(of)
    assert worst(found, of) <= 1.2
    assert models_sent(found, of) == 1.0
    assert list(found.received) == pytest.approx([SIZE] * hosts)
    assert found.grants_again == 0


def test_others_take_as_many_times_as_long_as_there_are_hosts_or_as_the_chain_is_deep() -> None:
    """So the bound is none that any way keeps."""
    of = world(8, trainers=2)
    assert worst(from_rank_0(of), of) > 7
    assert worst(all_pull(of), of) > 3
    assert worst(chain(of), of) > 1.01
    slow = replace(of, rates=(of.rates[0] / 2, *of.rates[1:]))
    assert worst(chain(slow), slow) > 1.9
    assert worst(by_chunk(slow), slow) <= 1.3


@pytest.mark.parametrize("seed", range(3))
def test_a_slow_host_and_three_deaths_of_sixteen_cost_the_others_four_tenths_at_most(seed: int) -> None:
    of = with_faults(world(16, trainers=4), seed)
    found = by_chunk(of)
    assert worst(found, of) <= 1.4
    assert models_sent(found, of) <= 1.3
    assert all(host in of.died or when < NEVER for host, when in enumerate(found.done))


@pytest.mark.parametrize(("hosts", "trainers"), [(3, 1), (8, 1), (8, 4), (16, 4)])
def test_a_slow_host_that_is_not_known_as_one_costs_the_others_three_tenths_at_most(hosts: int, trainers: int) -> None:
    of = world(hosts, trainers)
    slow = replace(of, rates=(RATE / 2, *of.rates[1:]))
    assert worst(by_chunk(slow), slow) <= 1.3


@pytest.mark.parametrize(("behind", "enough"), [(NEVER, 4), (0.25, 0), (NEVER, 0)])
def test_each_of_the_two_rules_for_slow_hosts_is_needed(
    monkeypatch: pytest.MonkeyPatch, behind: float, enough: int
) -> None:
    of = world(16, trainers=4)
    slow = replace(of, rates=(RATE / 20, *of.rates[1:]))
    assert worst(by_chunk(slow), slow) <= 1.4
    monkeypatch.setattr(chunk_search, "BEHIND", behind)
    monkeypatch.setattr(chunk_search, "ENOUGH", enough)
    assert worst(by_chunk(slow), slow) > 5


def test_hosts_that_are_equally_slow_are_not_left() -> None:
    of = replace(world(8), rates=(RATE / 4,) * 8)
    found = by_chunk(of)
    assert worst(found, of) <= 1.1
    assert models_sent(found, of) == 1.0


@pytest.mark.parametrize("seed", range(6))
def test_relays_with_drawn_needs_and_deaths_never_wait_for_each_other(seed: int) -> None:
    """Every relay that lives gets all that it wants, whichever die and when, and whichever are slow."""
    dice = random.Random(seed)
    chunks, hosts = dice.randint(1, 200), dice.randint(2, 40)
    sets = [sorted(dice.sample(range(chunks), dice.randint(1, chunks))) for _ in range(dice.randint(1, 4))]
    rates = tuple(RATE / dice.choice((1, 1, 1, 2, 50)) for _ in range(hosts))
    of = World(
        (32 << 20,) * chunks,
        tuple(dice.randrange(2) for _ in range(chunks)),
        tuple(sets),
        tuple(dice.randrange(len(sets)) for _ in range(hosts)),
        rates,
        (RATE,) * 2,
        {host: dice.uniform(0, 2) for host in dice.sample(range(hosts), hosts // 2)},
        dice.sample(range(hosts), hosts // 8),
    )
    found = by_chunk(of)
    assert not np.isinf(found.done[[host for host in range(hosts) if host not in of.died]]).any()


def test_what_a_host_that_died_was_to_send_comes_from_others_and_from_the_origin_about_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    of = replace(world(16, trainers=4), died={0: 0.4, 9: 0.7})
    found = by_chunk(of)
    others = [host for host in range(16) if host not in of.died]
    assert not np.isinf(found.done[others]).any()
    assert np.isinf(found.done[list(of.died)]).all()
    assert models_sent(found, of) <= 1.1
    monkeypatch.setattr(network, "NOTICED", NEVER)
    monkeypatch.setattr(chunk_search, "BEHIND", NEVER)
    monkeypatch.setattr(chunk_search, "ENOUGH", 0)
    assert np.isinf(by_chunk(of).done[others]).all(), "the simulation notices a relay that does nothing about a death"


def test_servers_on_two_hosts_each_have_their_half_and_origins_send_each_byte_once() -> None:
    of = over_two_hosts(12, SIZE, trainers=4)
    found = by_chunk(of)
    assert worst(found, of) <= 1.3
    assert models_sent(found, of) == 1.0
    assert max(found.received) <= 0.53 * SIZE


def test_a_leaf_sends_nothing_and_has_all() -> None:
    of = replace(world(12), leaves=(3, 7))
    found = by_chunk(of)
    assert list(found.sent[[3, 7]]) == [0, 0]
    assert worst(found, of) <= 1.3
    assert models_sent(found, of) == 1.0


def test_a_chunk_is_passed_on_when_it_is_verified_and_not_before() -> None:
    """Hosts that verify at half the rate of the network take twice as long."""
    of = replace(world(8), verify=RATE / 2)
    assert 1.9 < worst(by_chunk(of), of) < 2.3


@pytest.mark.slow
@pytest.mark.parametrize(("size", "chunk", "most"), [(16 * 10**9, 0, 1.2), (10**12, 128 << 20, 1.15)])
def test_large_models_and_many_hosts_are_within_their_bounds(size: int, chunk: int, most: float) -> None:
    """A terabyte in chunks that are four times as large as real ones, which makes hosts later."""
    for trainers in (1, 4):
        of = even_world(64, size, trainers, chunk=chunk)
        found = by_chunk(of)
        assert worst(found, of) <= most
        assert models_sent(found, of) == 1.0
