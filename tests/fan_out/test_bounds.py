"""Fan-out in simulated time: each host has all it wants within a bound of its own, whatever happens to others.

The bound is the longer of two: what the host wants at its own rate, and the whole model at what the trainers' hosts
send. Times are those of the simulation, so a busy machine changes none of them.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.fan_out.network import NEVER, Outcome
from benchmarks.fan_out.plans import (
    RATE,
    World,
    all_pull,
    chain,
    even_chunks,
    fan_out,
    from_rank_0,
    run,
    with_faults,
    worst,
)
from ckpt_engine.core.fan_out import plan_fan_out

SMALL = 1_600_000_000
"""Bytes: a tenth of 16 GB, at a tenth of the rate. It makes 255 chunks and 16 GB make 640, so hosts wait longer for a
first chunk, as a share of all."""


def world(hosts: int, size: int = SMALL, trainers: int = 1, rate: float = RATE / 10) -> World:
    chunks = even_chunks(range(hosts), size, trainers)
    return World(tuple(chunks), (rate,) * hosts, (rate,) * trainers, {})


def models_sent(found: Outcome, of: World) -> float:
    """How many times the model left the trainers' hosts."""
    return float(found.sent[len(of.rates) :].sum() / sum(chunk.bytes for chunk in of.chunks))


@pytest.mark.parametrize("trainers", [1, 4])
@pytest.mark.parametrize("hosts", [1, 2, 3, 8, 13, 24])
def test_every_host_has_all_within_its_bound_and_each_byte_leaves_the_trainers_once(hosts: int, trainers: int) -> None:
    of = world(hosts, trainers=trainers)
    found = fan_out(of)
    assert worst(found, of) <= 1.2
    assert models_sent(found, of) == 1.0
    assert list(found.received) == pytest.approx([SMALL] * hosts)


def test_others_take_as_many_times_as_long_as_there_are_hosts_or_as_the_chain_is_deep() -> None:
    """So the bound is none that any plan keeps."""
    of = world(16, trainers=2)
    assert worst(from_rank_0(of), of) > 15
    assert worst(all_pull(of), of) > 7
    slow = replace(of, rates=(of.rates[0] / 2, *of.rates[1:]))
    assert worst(chain(slow), slow) > 1.9
    assert worst(fan_out(slow), slow) <= 1.3


@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_a_slow_host_and_three_deaths_cost_the_others_less_than_a_third(seed: int, told: bool) -> None:
    of = with_faults(world(24), seed)
    found = fan_out(of, told=told)
    assert worst(found, of) <= 1.3
    assert models_sent(found, of) <= 1.3
    assert all(
        (host in of.died and of.died[host] < found.done[host]) or when < NEVER for host, when in enumerate(found.done)
    )


def test_without_a_new_plan_orphans_wait_for_ever() -> None:
    """The simulation notices who does nothing about a death."""
    of = replace(world(16), died={0: 0.1})
    plan = plan_fan_out(of.chunks, of.names, of.trainers)
    found = run(of, [(0.0, plan)])
    assert np.isinf(found.done[1:]).all()
    assert not np.isinf(fan_out(of).done[1:]).any()


def test_servers_on_two_hosts_each_have_their_half_in_the_time_that_a_half_takes() -> None:
    """Chunks of one half, of the other, and of what both need; two trainers' hosts, so that a half may be faster."""
    halves = [even_chunks(range(rank, 16, 2), SMALL // 2, 2) for rank in range(2)]
    common = even_chunks(range(16), SMALL // 50, 2)
    of = replace(world(16, trainers=2), chunks=(*halves[0], *halves[1], *common))
    found = fan_out(of)
    assert worst(found, of) <= 1.3
    assert models_sent(found, of) == 1.0
    need = SMALL // 2 + SMALL // 50
    assert max(found.received) <= 1.02 * need


def test_a_chunk_is_passed_on_when_it_is_verified_and_not_before() -> None:
    """Whoever verifies at half the rate of the network needs twice as long, and so do all behind him."""
    of = replace(world(8), verify=RATE / 20)
    assert 1.9 < worst(fan_out(of), of) < 2.3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hosts", "size", "most"),
    [
        *((hosts, 16 * 10**9, 1.5) for hosts in (1, 8, 64, 256, 1024)),
        *((hosts, 10**12, 1.15) for hosts in (1, 8, 64)),
        *(pytest.param(hosts, 10**12, 1.15, marks=pytest.mark.hours) for hosts in (256, 1024)),  # half a minute
    ],
)
def test_large_models_and_many_hosts_are_within_their_bounds(hosts: int, size: int, most: float) -> None:
    for trainers in (1, 4):
        of = world(hosts, size, trainers, RATE)
        found = fan_out(of, compiled=True)
        assert worst(found, of) <= most
        assert models_sent(found, of) == 1.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hosts", "size", "seeds"),
    [(16, 16, 40), (64, 16, 40), (200, 16, 20), (1024, 16, 6), pytest.param(256, 1000, 3, marks=pytest.mark.hours)],
)
def test_faults_in_large_runs_cost_the_others_less_than_a_third(hosts: int, size: int, seeds: int) -> None:
    for seed in range(seeds):
        for told in (False, True):
            of = with_faults(world(hosts, size * 10**9, 1 + 3 * (seed % 2), RATE), seed)
            assert worst(fan_out(of, compiled=True, told=told), of) <= 1.3, (seed, told)


@pytest.mark.slow
def test_the_compiled_simulation_is_the_same_as_the_interpreted_one() -> None:
    of = with_faults(world(24), 1)
    one, other = fan_out(of), fan_out(of, compiled=True)
    assert list(one.done) == list(other.done)
    assert one.events == other.events
