"""Worlds for the simulated network: the order of relays, and what others do instead."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from benchmarks.fan_out.network import NEVER, NO_RELAY, OWN_COLUMN, Floats, Network, Outcome, Rules, Traffic, simulate
from ckpt_engine.core.chunk_order import ChunkOrder, ChunkRelay
from ckpt_engine.core.chunk_sizes import MOST_BYTES, chunk_bytes

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
    rules: Rules = field(default_factory=Rules)

    @property
    def relays(self) -> list[ChunkRelay]:
        return [ChunkRelay(f"relay {at:04}", each, float(at not in self.leaves)) for at, each in enumerate(self.wants)]

    def network(self) -> Network:
        both = np.array([*self.rates, *self.egress])
        died = np.full(len(self.rates), NEVER)
        for relay, when in self.died.items():
            died[relay] = when
        return Network(both, np.array(self.rates), np.full(len(self.rates), self.verify), died)

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

    def traffic(self) -> Traffic:
        """What travels, by the order of relays."""
        names = {relay.name: at for at, relay in enumerate(self.relays)}
        order = ChunkOrder(self.sizes, self.sets, self.relays)
        wanted = np.zeros((len(names), len(self.sizes)), dtype=np.bool_)
        for relay, each in enumerate(self.wants):
            wanted[relay, list(self.sets[each])] = True
        columns: dict[tuple[int, int], int] = {}
        column = np.array([columns.setdefault(order.column(each), len(columns)) for each in range(len(self.sizes))])
        firsts = [order.first(chunk) for chunk in range(len(self.sizes))]
        asks = np.full((2, len(columns), len(names)), NO_RELAY, dtype=np.int64)
        for at in range(len(columns)):
            chunk = int(np.flatnonzero(column == at)[0])
            for name, relay in names.items():
                if not wanted[relay, chunk] or name == firsts[chunk]:
                    asks[0, at, relay] = OWN_COLUMN
                    continue
                before = [names[each] for each in order.before(name, chunk)]
                asks[: len(before), at, relay] = before
                if before == [names[firsts[chunk]]]:
                    asks[0, at, relay] = OWN_COLUMN
        first = np.array([names.get(name, NO_RELAY) for name in firsts], dtype=np.int64)
        return self.travels(wanted, first, column, asks)

    def travels(self, wanted: object, first: object, column: object, asks: object) -> Traffic:
        return Traffic(np.array(self.sizes, dtype=np.float64), np.array(self.origins), wanted, first, column, asks)  # type: ignore[arg-type]


def even_world(hosts: int, size: int, trainers: int = 1, rate: float = RATE) -> World:
    """Every host wants all of a model, in chunks as long as real ones are on the average; each of the origins holds a
    part, and the parts alternate."""
    each = min(MOST_BYTES, chunk_bytes(size) * 3 // 2)
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


def by_chunk(world: World, compiled: bool = False) -> Outcome:
    """The order of relays, with the grants of origins."""
    return simulate(world.traffic(), world.network(), world.rules, compiled)
