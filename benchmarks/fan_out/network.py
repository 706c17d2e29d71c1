"""A network of hosts in simulated time: who has which chunk when, if each reads what a plan says.

Every host sends and receives at the same time, each at its own rate; a byte takes `latency` to arrive. A chunk is
passed on when all of it has arrived and is verified. The one who reads hears that a chunk is there (one latency), asks
for it (one more) and gets it (a third): of each tree at most `window` chunks at a time, and `ahead` times as many of
the tree in which it passes on. A sender serves one request after the other, as they came. Hosts die at given times, and
what a dead one was sending is lost; at given times everybody reads from other parents.

The same function runs interpreted, for tests, and compiled by numba, for large ones.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

NEVER = np.inf
OUTSIDE = -2
FROM_FEEDER = -1

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Streams:
    """What travels. sizes, feeders: of all chunks, tree after tree. first: where each tree's chunks begin, and one
    more. feeders: the trainers' host that a root reads a chunk from."""

    sizes: Floats
    feeders: Integers
    first: Integers


@dataclass(frozen=True)
class Network:
    """up, down, verify: bytes/s, of hosts and then of trainers' hosts. latency: seconds. died: when, or NEVER.
    window: [tree, host], chunks. ahead: by host."""

    up: Floats
    down: Floats
    verify: Floats
    latency: float
    died: Floats
    window: Integers
    ahead: Integers


@dataclass(frozen=True)
class Epoch:
    """From `start` on, seconds, each host reads each tree from a parent: parents[tree, host]; OUTSIDE: the host is not
    in that tree. children: those of each parent and tree, in the order in which they are served."""

    start: float
    parents: Integers
    children: dict[tuple[int, int], Sequence[int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """done: when each host had all it wants, verified; NEVER: it never had. sent, received: bytes, by host. busy_up,
    busy_down: seconds for which it sent, or received, while somebody waited. events: how many there were."""

    done: Floats
    sent: Floats
    received: Floats
    busy_up: Floats
    busy_down: Floats
    events: int


def simulate(
    streams: Streams, network: Network, epochs: Sequence[Epoch], until: float = NEVER, compiled: bool = False
) -> Outcome:
    """What comes of it. until: the simulation ends then, at the latest."""
    nodes = len(network.up)
    trees = len(streams.first) - 1
    hosts = epochs[0].parents.shape[1]
    parents = np.stack([epoch.parents for epoch in epochs])
    begins = np.zeros((len(epochs), trees * nodes + 1), dtype=np.int64)
    lists: list[int] = []
    for index, epoch in enumerate(epochs):
        for tree in range(trees):
            for node in range(nodes):
                begins[index, tree * nodes + node] = len(lists)
                if (tree, node) in epoch.children:
                    lists.extend(epoch.children[tree, node])
        begins[index, -1] = len(lists)
    children = np.array(lists or [0], dtype=np.int64)
    starts = np.array([epoch.start for epoch in epochs], dtype=np.float64)
    run = _compiled() if compiled else _run
    found = run(
        *(streams.sizes, streams.feeders, streams.first, network.up, network.down, network.verify, network.latency),
        *(network.died, network.window, network.ahead, starts, parents, begins, children, hosts, until),
    )
    return Outcome(*found)


@cache
def _compiled() -> Any:
    import numba

    return numba.njit(cache=True)(_run)


def _run(
    sizes: Floats,
    feeders: Integers,
    first: Integers,
    up: Floats,
    down: Floats,
    verify: Floats,
    latency: float,
    died: Floats,
    window: Integers,
    ahead: Integers,
    starts: Floats,
    parents: Integers,
    begins: Integers,
    children: Integers,
    hosts: int,
    until: float,
) -> Any:
    nodes = len(up)
    trees = len(first) - 1
    ask, queue, free, verified, switch, death = 0, 1, 2, 3, 4, 5
    epoch = 0
    got = np.zeros((trees, hosts), dtype=np.int64)  # chunks verified, from the first on
    wanted = np.zeros((trees, hosts), dtype=np.int64)  # chunks asked for, from the first on
    valid = np.zeros((trees, hosts), dtype=np.int64)  # rises whenever what was asked for is void
    missing = np.zeros(hosts, dtype=np.int64)
    done = np.full(hosts, np.inf)
    sent = np.zeros(nodes)
    received = np.zeros(hosts)
    busy_up = np.zeros(nodes)
    busy_down = np.zeros(hosts)
    sending = np.zeros(nodes, dtype=np.bool_)
    down_until = np.zeros(hosts)
    verify_until = np.zeros(hosts)
    # Requests that wait at senders: lists of (tree, host, chunk, valid), threaded through one pool.
    pool = np.zeros((int((window * ahead).sum()) * 2 * (len(starts) + 1) + 1, 5), dtype=np.int64)
    for entry in range(len(pool)):
        pool[entry, 4] = entry + 1
    unused = 1
    head = np.zeros(nodes, dtype=np.int64)
    tail = np.zeros(nodes, dtype=np.int64)
    number = 0  # of events, so that those of one moment come in a fixed order
    heap = [(0.0, 0, 0, 0, 0, 0, 0, 0)]  # when, number, kind, tree, host, chunk, valid, node
    heap.pop()
    for version in range(len(starts)):
        heapq.heappush(heap, (starts[version], version - len(starts), switch, version, 0, 0, 0, 0))
    for host in range(hosts):
        if died[host] < np.inf:
            number += 1
            heapq.heappush(heap, (died[host], number, death, 0, host, 0, 0, 0))
        for tree in range(trees):
            if parents[0, tree, host] != OUTSIDE:
                missing[host] += 1
    while len(heap) > 0:
        now, _, kind, tree, host, chunk, mark, node = heapq.heappop(heap)
        if now > until:
            break
        asks = False
        sender = -1
        if kind == switch:
            epoch = tree
            for each in range(trees):
                for child in range(hosts):
                    parent = parents[epoch, each, child]
                    if parent != OUTSIDE and (epoch == 0 or parent != parents[epoch - 1, each, child]):
                        valid[each, child] += 1
                        wanted[each, child] = got[each, child]
                        number += 1
                        heapq.heappush(heap, (now, number, ask, each, child, 0, valid[each, child], 0))
        elif kind == death:
            for each in range(trees):
                for child in range(hosts):
                    if parents[epoch, each, child] == host:  # what was on its way never arrives
                        valid[each, child] += 1
                        wanted[each, child] = got[each, child]
        elif kind == ask:
            asks = mark == valid[tree, host]
        elif kind == queue:
            if mark == valid[tree, host] and now < died[node]:
                entry = unused
                unused = pool[entry, 4]
                pool[entry, 0], pool[entry, 1], pool[entry, 2], pool[entry, 3] = tree, host, chunk, mark
                pool[entry, 4] = 0
                if head[node] == 0:
                    head[node] = entry
                else:
                    pool[tail[node], 4] = entry
                tail[node] = entry
                if not sending[node]:
                    sender = node
        elif kind == free:
            sending[node] = False
            sender = node
        elif mark == valid[tree, host] and now < died[host]:
            got[tree, host] += 1
            asks = True
            if got[tree, host] == first[tree + 1] - first[tree]:
                missing[host] -= 1
                if missing[host] == 0:
                    done[host] = now
            at = tree * nodes + host
            for place in range(begins[epoch, at], begins[epoch, at + 1]):
                child = children[place]
                following = wanted[tree, child]
                below = tree * nodes + child
                most = window[tree, child] * (ahead[child] if begins[epoch, below + 1] > begins[epoch, below] else 1)
                if following < got[tree, host] and following - got[tree, child] < most:
                    wanted[tree, child] += 1
                    number += 1
                    later = now + 2 * latency
                    heapq.heappush(heap, (later, number, queue, tree, child, following, valid[tree, child], host))
        if asks:
            parent = parents[epoch, tree, host]
            there = first[tree + 1] - first[tree]
            if parent >= 0:
                there = got[tree, parent] if now < died[parent] else 0
            below = tree * nodes + host
            most = window[tree, host] * (ahead[host] if begins[epoch, below + 1] > begins[epoch, below] else 1)
            while wanted[tree, host] < min(there, got[tree, host] + most):
                following = wanted[tree, host]
                wanted[tree, host] += 1
                to = parent if parent >= 0 else hosts + feeders[first[tree] + following]
                number += 1
                later = now + latency
                heapq.heappush(heap, (later, number, queue, tree, host, following, valid[tree, host], to))
        while sender >= 0 and not sending[sender] and head[sender] != 0:
            entry = head[sender]
            tree, host, chunk, mark, head[sender] = pool[entry]
            pool[entry, 4] = unused
            unused = entry
            if mark != valid[tree, host] or now >= died[host]:
                continue  # reads from another now
            length = sizes[first[tree] + chunk]
            takes = length / up[sender]
            sending[sender] = True
            sent[sender] += length
            busy_up[sender] += takes
            number += 1
            heapq.heappush(heap, (now + takes, number, free, 0, 0, 0, 0, sender))
            # All who send to a host share its network; it is busy for as long as it needs for the bytes.
            down_until[host] = max(down_until[host], now + latency) + length / down[host]
            received[host] += length
            busy_down[host] += length / down[host]
            whole = max(down_until[host], now + latency + takes)
            verify_until[host] = max(verify_until[host], whole) + length / verify[host]
            number += 1
            heapq.heappush(heap, (verify_until[host], number, verified, tree, host, chunk, mark, 0))
    return done, sent, received, busy_up, busy_down, number
