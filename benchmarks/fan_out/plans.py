"""Worlds for the simulated network: the order of relays, and what others do instead."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from benchmarks.fan_out.network import NEVER, Floats, Host, Outcome, Relay, simulate
from ckpt_engine.core.chunk_order import ChunkOrder, ChunkRelay
from ckpt_engine.core.chunk_sizes import MOST_BYTES, chunk_bytes
from ckpt_engine.relay.chunk_search import Trail, trails_of

RATE = 12.5e9
"""Bytes/s: 100 Gbit/s."""

VERIFY = 20e9


@dataclass(frozen=True)
class World:
    """A run."""

    sizes: tuple[int, ...]  # bytes of each chunk
    origins: tuple[int, ...]  # of each chunk, the origin that has it
    sets: tuple[Collection[int], ...]  # distinct sets of chunks
    wants: tuple[int, ...]  # of each relay, the number of its set
    rates: tuple[float, ...]  # of each relay, bytes/s
    egress: tuple[float, ...]  # of each origin, bytes/s
    died: Mapping[int, float] = field(default_factory=dict)  # when, seconds, by relay
    leaves: Collection[int] = ()  # relays that are known to be slow
    verify: float = VERIFY

    @property
    def relays(self) -> list[ChunkRelay]:
        return [ChunkRelay(f"relay {at:04}", each, float(at not in self.leaves)) for at, each in enumerate(self.wants)]

    def host(self, relay: int) -> Host:
        """A relay's host."""
        rate = self.rates[relay]
        return Host(rate, rate, self.verify, self.died.get(relay, NEVER))

    def origin_hosts(self) -> dict[str, Host]:
        """The hosts of origins, by name."""
        return {f"origin {number}": Host(rate) for number, rate in enumerate(self.egress)}

    def bounds(self) -> Floats:
        """Of each relay: what it wants at its own rate, or all that it shares an origin with at what that sends."""
        needs = np.array([sum(self.sizes[chunk] for chunk in self.sets[each]) for each in self.wants])
        found: Floats = np.maximum(needs / np.array(self.rates), self.model / sum(self.egress))
        return found

    @property
    def model(self) -> int:
        """Bytes of all chunks that some relay wants."""
        wanted = {chunk for each in set(self.wants) for chunk in self.sets[each]}
        return sum(self.sizes[chunk] for chunk in wanted)


def even_world(hosts: int, size: int, trainers: int = 1, rate: float = RATE, chunk: int = 0) -> World:
    """Every host wants all of a model, in chunks of so many bytes, or else as long as real ones are on the average;
    each of the origins holds a part, and the parts alternate."""
    each = chunk or min(MOST_BYTES, chunk_bytes(size) * 3 // 2)
    count = max(1, -(-size // each))
    sizes = tuple(size * (at + 1) // count - size * at // count for at in range(count))
    origins = tuple(at % trainers for at in range(count))
    return World(sizes, origins, (range(count),), (0,) * hosts, (rate,) * hosts, (rate,) * trainers)


def over_two_hosts(hosts: int, size: int, trainers: int = 1, rate: float = RATE) -> World:
    """Every server is on two hosts: each wants its half and, of the rest, a fiftieth that both need."""
    whole = even_world(hosts, size, trainers, rate)
    count = len(whole.sizes)
    common = max(1, count // 50)
    both = range(0, count, count // common)
    sets = [sorted({*range(rank, count, 2), *both}) for rank in range(2)]
    origins = tuple(at // 2 % trainers for at in range(count))
    return replace(whole, sets=tuple(sets), wants=tuple(at % 2 for at in range(hosts)), origins=origins)


def with_faults(whole: World, seed: int) -> World:
    """One host in a hundred at half the rate, one at least, which nobody knows; three deaths, any time."""
    dice = random.Random(seed)
    count = len(whole.rates)
    chosen = dice.sample(range(count), max(1, count // 100) + 3)
    best = float(np.median(whole.bounds()))
    rates = tuple(rate / 2 if host in chosen[3:] else rate for host, rate in enumerate(whole.rates))
    return replace(whole, rates=rates, died={host: dice.uniform(0, 1) * best for host in chosen[:3]})


def worst(found: Outcome, of: World) -> float:
    """The latest host as a multiple of its bound, without those that died or are slow."""
    usual = np.median(of.rates)
    others = [host for host, rate in enumerate(of.rates) if host not in of.died and rate == usual]
    return float((found.done / of.bounds())[others].max())


def by_chunk(world: World) -> Outcome:
    """The order of relays, with the grants of origins."""
    order = ChunkOrder(world.sizes, world.sets, world.relays)
    sets = [frozenset(each) for each in world.sets]
    by_origin = [
        (f"origin {number}", frozenset(chunk for chunk, origin in enumerate(world.origins) if origin == number))
        for number in range(len(world.egress))
    ]
    relays = {}
    for at, relay in enumerate(world.relays):
        trails = trails_of(order, sets[relay.wants], by_origin, relay.name)(sets[relay.wants])
        relays[relay.name] = Relay(world.host(at), trails, relay.rate == 0)
    return simulate(world.sizes, relays, world.origin_hosts())


def _all_want_all(world: World, upstream: Sequence[str]) -> Outcome:
    """Each relay asks one other for all chunks; empty: the origins, and passes nothing on that these would know of."""
    relays = {
        relay.name: Relay(
            world.host(at),
            {
                chunk: Trail((), (f"origin {origin}",)) if not upstream[at] else Trail((upstream[at],), ())
                for chunk, origin in enumerate(world.origins)
            },
            is_leaf=not upstream[at],
        )
        for at, relay in enumerate(world.relays)
    }
    return simulate(world.sizes, relays, world.origin_hosts())


def all_pull(world: World) -> Outcome:
    """Each host reads all from the origins."""
    return _all_want_all(world, [""] * len(world.rates))


def from_rank_0(world: World) -> Outcome:
    """Rank 0 has gathered all weights, and sends each host all of them."""
    return all_pull(replace(world, origins=(0,) * len(world.sizes)))


def chain(world: World) -> Outcome:
    """Each host passes everything on to the next, chunk by chunk."""
    return _all_want_all(world, ["", *(relay.name for relay in world.relays[:-1])])
