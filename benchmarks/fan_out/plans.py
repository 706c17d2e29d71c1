"""Plans as the simulated network takes them: fan-out, and what others do instead."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.fan_out.network import (
    FROM_FEEDER,
    NEVER,
    OUTSIDE,
    Epoch,
    Floats,
    Integers,
    Network,
    Outcome,
    Streams,
    simulate,
)
from benchmarks.fan_out.repair import fallback, replan
from ckpt_engine.core.chunk_sizes import MOST_BYTES, chunk_bytes
from ckpt_engine.core.fan_out import FROM_TRAINERS, Chunk, FanOut, HostRate, Tree, plan_fan_out

RATE = 12.5e9
"""Bytes/s: 100 Gbit/s."""

VERIFY = 20e9
LATENCY = 50e-6

NOTICED = 0.05
"""Seconds after which the children of a host that died read from others: a killed process closes its connections."""

REPLANNED = 0.15
"""Seconds after that, or after the start if hosts turn out to be slow, until all have a new plan."""


AT_ONCE = 16
"""Chunks that a host asks for at a time, dealt to its trees by their bytes; two of each at least. One whose network is
slower than others' asks for twice as many of the tree in which it passes on, so that others wait for it less."""


@dataclass(frozen=True)
class World:
    """A run. chunks: as for plan_fan_out. rates: of hosts. egress: of trainers' hosts. died: seconds, by host."""

    chunks: tuple[Chunk, ...]
    rates: tuple[float, ...]
    egress: tuple[float, ...]
    died: Mapping[int, float]
    latency: float = LATENCY
    at_once: int = AT_ONCE
    noticed: float = NOTICED
    replanned: float = REPLANNED
    verify: float = VERIFY

    @property
    def names(self) -> list[HostRate]:
        return [HostRate(f"host-{number}") for number in range(len(self.rates))]

    @property
    def trainers(self) -> list[HostRate]:
        return [HostRate(f"trainer-{number}") for number in range(len(self.egress))]

    def network(self, window: Integers) -> Network:
        both = np.array([*self.rates, *self.egress])
        died = np.full(len(self.rates), NEVER)
        for host, when in self.died.items():
            died[host] = when
        died = np.concatenate([died, np.full(len(self.egress), NEVER)])
        ahead = np.where(np.array([*self.rates]) < 0.9 * np.median(self.rates), 2, 1)
        return Network(both, both, np.full(len(both), self.verify), self.latency, died, window, ahead)

    def bounds(self) -> Floats:
        """Of each host: what it wants at its own rate, or all of the model at what the trainers' hosts send."""
        need = np.zeros(len(self.rates))
        model = 0
        for hosts, size in self.by_class().items():
            need[list(hosts)] += size
            model += size
        found: Floats = np.maximum(need / np.array(self.rates), model / sum(self.egress))
        return found

    def by_class(self) -> dict[tuple[int, ...], int]:
        found: dict[tuple[int, ...], int] = {}
        for chunk in self.chunks:
            found[chunk.hosts] = found.get(chunk.hosts, 0) + chunk.bytes
        return found


def even_chunks(hosts: Sequence[int], size: int, trainers: int = 1, target: int = 0) -> list[Chunk]:
    """Chunks of `size` bytes that the same hosts want, as long as real ones are on the average; each is held by one of
    the trainers' hosts."""
    each = target or min(MOST_BYTES, chunk_bytes(size) * 3 // 2)
    count = max(1, -(-size // each))
    return [
        Chunk(size * (at + 1) // count - size * at // count, tuple(hosts), (at * trainers // count,))
        for at in range(count)
    ]


def with_faults(whole: World, seed: int) -> World:
    """One host in a hundred at half the rate, one at least; three deaths, any time."""
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


def run(world: World, epochs: Sequence[tuple[float, FanOut]], until: float = NEVER, compiled: bool = False) -> Outcome:
    """Everybody reads as the plans say, each from its moment on."""
    trees = epochs[0][1].trees
    found = [Epoch(start, *_parents(plan.trees, len(world.rates))) for start, plan in epochs]
    feeders = epochs[0][1].feeders
    numbers = [number for tree in trees for number in tree.chunks]
    streams = Streams(
        np.array([float(world.chunks[number].bytes) for number in numbers]),
        np.array([feeders[number] for number in numbers], dtype=np.int64),
        np.cumsum([0, *(len(tree.chunks) for tree in trees)]),
    )
    return simulate(streams, world.network(_windows(world, trees)), found, until, compiled)


def _windows(world: World, trees: Sequence[Tree]) -> Integers:
    sizes = np.zeros((len(trees), len(world.rates)))
    for number, tree in enumerate(trees):
        sizes[number, list(tree.hosts)] = tree.bytes
    found: Integers = np.maximum(2, np.round(world.at_once * sizes / sizes.sum(axis=0))).astype(np.int64)
    return found


def _parents(trees: Sequence[Tree], hosts: int) -> tuple[Integers, dict[tuple[int, int], Sequence[int]]]:
    parents = np.full((len(trees), hosts), OUTSIDE, dtype=np.int64)
    children: dict[tuple[int, int], Sequence[int]] = {}
    for number, tree in enumerate(trees):
        for host, parent in zip(tree.hosts, tree.parents, strict=True):
            parents[number, host] = FROM_FEEDER if parent == FROM_TRAINERS else parent
        children.update({(number, parent): found for parent, found in tree.children.items()})
    return parents, children


def fan_out(world: World, compiled: bool = False, told: bool = False) -> Outcome:
    """Fan-out, with what the relays and the manager do when hosts die or are slow.

    told: rates are known from an update before; otherwise all are taken to be alike until they were measured.
    """
    rates = world.rates if told else [None] * len(world.rates)
    hosts = [host._replace(rate=rate) for host, rate in zip(world.names, rates, strict=True)]
    plan = plan_fan_out(world.chunks, hosts, world.trainers)
    epochs = [(0.0, plan)]
    for when, why in sorted([(world.replanned, "rates"), *_news(world)]):
        dead = [world.names[host].name for host, died in world.died.items() if died + world.noticed <= when]
        if why == "noticed":
            epochs.append((when, _fallen_back(epochs[-1][1], dead)))
            continue
        rates = measured(world, run(world, epochs, when, compiled)) if why == "rates" else {}
        plan = replan(plan, dead, rates)
        epochs.append((when, plan))
    return run(world, epochs, compiled=compiled)


def _news(world: World) -> list[tuple[float, str]]:
    noticed = [died + world.noticed for died in world.died.values()]
    return [(when, "noticed") for when in noticed] + [(when + world.replanned, "replanned") for when in noticed]


def _fallen_back(plan: FanOut, dead: Sequence[str]) -> FanOut:
    """Orphans read from their alternates: what each host does by itself before the manager has a new plan."""
    trees = []
    for number, tree in enumerate(plan.trees):
        names = [fallback(plan, number, plan.hosts[host].name, dead) for host in tree.hosts]
        parents = tuple(FROM_TRAINERS if name is None else plan.number[name] for name in names)
        trees.append(
            tree if parents == tree.parents else Tree(tree.hosts, parents, tree.alternates, tree.chunks, tree.bytes)
        )
    return FanOut(plan.chunks, plan.hosts, plan.trainers, tuple(trees), plan.feeders, plan.dead, plan.leaves)


def measured(world: World, seen: Outcome) -> dict[str, float]:
    """What a relay can tell of itself: bytes by the seconds for which somebody waited for them, the slower way."""
    found = {}
    for number, host in enumerate(world.names):
        ways = [
            float(size / busy)
            for size, busy in (
                (seen.sent[number], seen.busy_up[number]),
                (seen.received[number], seen.busy_down[number]),
            )
            if busy > 0
        ]
        if ways:
            found[host.name] = min(ways)
    return found


def _single(parents_of: Callable[[int], int], first_trainer_only: bool) -> Callable[[World, bool], Outcome]:
    def run_it(world: World, compiled: bool = False) -> Outcome:
        plan = plan_fan_out(world.chunks, world.names, world.trainers)
        trees = []
        streams: dict[tuple[tuple[int, ...], int], list[int]] = {}
        for number, chunk in enumerate(world.chunks):
            streams.setdefault((chunk.hosts, plan.feeders[number]), []).append(number)
        for (hosts, _), numbers in streams.items():
            upper = map(parents_of, range(len(hosts)))
            parents = tuple(FROM_TRAINERS if at < 0 else hosts[at] for at in upper)
            total = sum(world.chunks[number].bytes for number in numbers)
            trees.append(Tree(hosts, parents, ((),) * len(hosts), tuple(numbers), total))
        feeders = (0,) * len(world.chunks) if first_trainer_only else plan.feeders
        other = FanOut(plan.chunks, plan.hosts, plan.trainers, tuple(trees), feeders)
        return run(world, [(0.0, other)], compiled=compiled)

    return run_it


from_rank_0 = _single(lambda at: -1, first_trainer_only=True)
"""Rank 0 has gathered all weights, and sends each host what it wants."""

all_pull = _single(lambda at: -1, first_trainer_only=False)
"""Each host reads all it wants from the trainers' hosts that hold it."""

chain = _single(lambda at: at - 1, first_trainer_only=False)
"""Each host passes everything on to the next, chunk by chunk."""
