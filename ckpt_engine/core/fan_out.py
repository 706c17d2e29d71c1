"""Which host reads which chunks from which other host, so that each byte leaves the trainers' hosts about once. Pure.

Chunks that the same hosts want are dealt to at most eight trees over these hosts. A host passes on in one of them and
is a leaf in the others, so it sends about as much as it receives (SplitStream, SOSP 2003). Each tree has an order that
never changes: the parent and alternates of a host come before it, so no host ever waits for itself, whichever of them
it reads from. If a host fails, its readers turn to their alternates. This module does not decide when a relay reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from heapq import heapify, heapreplace
from itertools import islice
from statistics import median
from typing import NamedTuple

from ckpt_engine.core.problems import invalid

TREES = 8
"""The most trees over hosts that want the same chunks."""

FROM_TRAINERS = -1
"""In place of a parent: the host reads each chunk from the trainers' host that `FanOut.feeders` names."""

LEAF_BELOW = 0.55
"""A host below this share of the median rate passes nothing on. Above one half, since a host at half the rate does not
measure as exactly that."""

ALTERNATES = 2

_TRIES = 8  # to find an alternate that no sibling has

_FEW_CHILDREN = 4  # of a host that passes on, even where fewer would do: a chain would be too deep

_ENOUGH = 0.95  # the sum of the trees' shares: no host sends more than 1 / 0.95 of what it receives


class Chunk(NamedTuple):
    """The unit that hosts read and pass on. Hosts and holders are numbers in two lists that come with the chunks,
    sorted."""

    bytes: int  # on the wire
    hosts: tuple[int, ...]  # that want it
    holders: tuple[int, ...]  # trainers' hosts that have it


class HostRate(NamedTuple):
    """A host and the rate of its network."""

    name: str
    rate: float | None = None  # bytes a second that it sends, and receives at the same time; None: unknown


@dataclass(frozen=True)
class Tree:
    """Which host reads from which. Hosts are numbers in `FanOut.hosts`."""

    hosts: tuple[int, ...]  # in the tree's order
    parents: tuple[int, ...]  # of each host, in the same order: an earlier host, or FROM_TRAINERS
    alternates: tuple[tuple[int, ...], ...]  # likewise
    chunks: tuple[int, ...]  # in the order in which they are read and passed on
    bytes: int  # of all chunks

    @cached_property
    def place(self) -> dict[int, int]:
        """The position of each host in the order."""
        return {host: place for place, host in enumerate(self.hosts)}

    @cached_property
    def children(self) -> dict[int, tuple[int, ...]]:
        """The readers of each host that passes on; those with the most hosts below them come first."""
        below = dict.fromkeys(self.hosts, 1)
        found: dict[int, list[int]] = {}
        for host, parent in zip(reversed(self.hosts), reversed(self.parents), strict=True):
            if parent != FROM_TRAINERS:
                below[parent] += below[host]
                found.setdefault(parent, []).append(host)
        return {
            parent: tuple(sorted(hosts, key=lambda host: (-below[host], self.place[host])))
            for parent, hosts in found.items()
        }


class TreePlace(NamedTuple):
    """What a host does in one tree."""

    tree: int  # its number
    parent: str | None  # a host's name; None: the trainers' hosts
    alternates: tuple[str | None, ...]  # likewise, in the order in which they are tried
    chunks: tuple[int, ...]  # in the order in which they come


@dataclass(frozen=True)
class FanOut:
    """A plan: which host reads which chunk from which other."""

    chunks: tuple[Chunk, ...]
    hosts: tuple[HostRate, ...]
    trainers: tuple[HostRate, ...]
    trees: tuple[Tree, ...]
    feeders: tuple[int, ...]  # for each chunk, the trainers' host that it is read from: a number in `trainers`
    dead: frozenset[int] = field(default=frozenset())  # hosts that take no part any more
    leaves: frozenset[int] = field(default=frozenset())  # hosts that pass nothing on, because they are slow

    @cached_property
    def number(self) -> dict[str, int]:
        """The number of each host, by name."""
        return {host.name: number for number, host in enumerate(self.hosts)}

    def upstreams(self, name: str) -> tuple[TreePlace, ...]:
        """What a host reads, tree by tree. The tree in which it passes on comes first: others wait for it."""
        host = self.number[name]
        found = []
        for number, tree in enumerate(self.trees):
            place = tree.place.get(host)
            if place is not None:
                alternates = tuple(map(self._name, tree.alternates[place]))
                found.append(TreePlace(number, self._name(tree.parents[place]), alternates, tree.chunks))
        return tuple(sorted(found, key=lambda each: host not in self.trees[each.tree].children))

    def _name(self, host: int) -> str | None:
        return None if host == FROM_TRAINERS else self.hosts[host].name


def plan_fan_out(
    chunks: Sequence[Chunk],
    hosts: Sequence[HostRate],
    trainers: Sequence[HostRate],
    leaves: frozenset[int] = frozenset(),
) -> FanOut:
    """Makes the plan for chunks whose `hosts` and `holders` are numbers in `hosts` and `trainers`.

    leaves: hosts that are known to be slow, whatever their rates; they pass nothing on, unless all that want a chunk
    are slow. An unknown rate counts as the median of the known ones. The same arguments give the same plan.

    Raises INVALID_ARGUMENT for two hosts with one name, a rate that is not positive, a chunk without a holder, and a
    chunk that names a host that does not exist.
    """
    _check(chunks, hosts, trainers)
    rates = relative_rates(hosts)
    slow = slow_hosts(dict(enumerate(rates))) | leaves
    classes: dict[tuple[int, ...], list[int]] = {}
    for number, chunk in enumerate(chunks):
        if chunk.hosts:
            classes.setdefault(chunk.hosts, []).append(number)
    load = [0.0] * len(hosts)  # bytes that each host will send, by its rate
    trees: list[Tree] = []
    by_bytes = sorted(classes.items(), key=lambda each: (-sum(chunks[number].bytes for number in each[1]), each[0]))
    for members, numbers in by_bytes:
        trees += _forest(members, _interleaved(numbers, chunks), chunks, rates, slow, load)
    feeders = _feeders(trees, chunks, relative_rates(trainers))
    return FanOut(tuple(chunks), tuple(hosts), tuple(trainers), tuple(trees), feeders, frozenset(), slow)


def relative_rates(hosts: Sequence[HostRate]) -> list[float]:
    """The rate of each host, as a multiple of the median of those that are known; 1 if it is not known."""
    known = [host.rate for host in hosts if host.rate is not None]
    usual = median(known) if known else 1.0
    return [1.0 if host.rate is None else host.rate / usual for host in hosts]


def slow_hosts(rates: dict[int, float]) -> frozenset[int]:
    """The hosts that must pass nothing on. rates: of hosts that are alive."""
    if not rates:
        return frozenset()
    least = LEAF_BELOW * median(rates.values())
    return frozenset(host for host, rate in rates.items() if rate < least)


def alternates_of(
    order: Sequence[int], parents: Sequence[int], able: Sequence[bool], former: Sequence[Sequence[int]] = ()
) -> list[tuple[int, ...]]:
    """Chooses two alternates for each host, to read from if its parent is lost: earlier in the order, able to pass on,
    and if possible not below that parent, since those are orphans then too. The trainers' hosts stand in for a lack.

    order: hosts. For each of them, parents: its parent; able: whether it may pass on; former: its alternates before,
    which stay if they can.
    """
    place = {host: at for at, host in enumerate(order)}
    upper = [place.get(parent, FROM_TRAINERS) for parent in parents]
    inner = set(upper) - {FROM_TRAINERS}
    inner_places = sorted(inner)
    deep = sorted(inner - {upper[at] for at in inner}) or inner_places  # a delay there reaches few others
    pairs: set[tuple[int, int]] = set()  # the orphans of one parent go to different hosts
    found: list[tuple[int, ...]] = []
    turn = 0
    for at, parent in enumerate(upper):
        if parent == FROM_TRAINERS:
            found.append(())
            continue
        former_places = [place.get(each, FROM_TRAINERS) for each in former[at]] if former else []
        chosen = [each for each in former_places if each not in (FROM_TRAINERS, parent) and able[each]]
        for pool in (inner_places if at in inner else deep, range(at)):
            for _ in range(min(len(pool), _TRIES)):
                each = pool[turn % len(pool)]
                turn += 1
                free = each < at and able[each] and each not in chosen and (parent, each) not in pairs
                if len(chosen) < ALTERNATES and free and not _below(each, parent, upper):
                    chosen.append(each)
                    pairs.add((parent, each))
        others = (each for each in range(at - 1, -1, -1) if able[each] and each != parent and each not in chosen)
        chosen += islice(others, ALTERNATES - len(chosen))
        trainers = (FROM_TRAINERS,) if len(chosen) < ALTERNATES else ()
        found.append((*(order[each] for each in chosen), *trainers))
    return found


def _below(place: int, above: int, upper: Sequence[int]) -> bool:
    while place != FROM_TRAINERS:
        if place == above:
            return True
        place = upper[place]
    return False


def _check(chunks: Sequence[Chunk], hosts: Sequence[HostRate], trainers: Sequence[HostRate]) -> None:
    for kind, several in (("host", hosts), ("trainers' host", trainers)):
        names: set[str] = set()
        for name, rate in several:
            if name in names:
                raise invalid(f"{kind} {name!r} is listed twice; each needs a name of its own")
            if rate is not None and not 0 < rate < float("inf"):
                raise invalid(f"{kind} {name!r} has a rate of {rate} bytes/s; leave it out if it is not known")
            names.add(name)
    checked_keys: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()
    for number, chunk in enumerate(chunks):
        key = chunk.hosts, chunk.holders
        if key in checked_keys:
            continue
        checked_keys.add(key)
        if not chunk.holders:
            raise invalid(f"no trainers' host holds chunk {number}; its version is not sealed as a whole")
        for kind, numbers, several in (("host", chunk.hosts, hosts), ("trainers' host", chunk.holders, trainers)):
            for each in numbers:
                if not 0 <= each < len(several):
                    raise invalid(f"chunk {number} names {kind} number {each}, and there are {len(several)}")


def _interleaved(numbers: Sequence[int], chunks: Sequence[Chunk]) -> list[int]:
    """Spreads the chunks of each holder over the whole order, so that all trainers' hosts send at all times."""
    by_holders: dict[tuple[int, ...], list[int]] = {}
    for number in numbers:
        by_holders.setdefault(chunks[number].holders, []).append(number)
    spread = [
        ((index + 0.5) / len(own), holders, number)
        for holders, own in by_holders.items()
        for index, number in enumerate(own)
    ]
    return [number for _, _, number in sorted(spread)]


def _forest(
    members: Sequence[int],
    numbers: Sequence[int],
    chunks: Sequence[Chunk],
    rates: Sequence[float],
    slow: frozenset[int],
    load: list[float],
) -> Iterator[Tree]:
    """Makes the trees of hosts that want the same chunks, and adds to `load` what each host sends."""
    able = [host for host in members if host not in slow] or list(members)
    able.sort(key=lambda host: (load[host], -rates[host], host))
    counts = _inner_counts(len(members), len(able), min(TREES, len(able), len(numbers)))
    inner = _deal(able, counts)
    shapes = [_shape(passing, members, shift, rates) for shift, passing in enumerate(inner)]
    weights = [1.0 / (max(kids[host] / rates[host] for host in kids) or 1.0) for _, _, kids in shapes]
    chunks_of_tree: list[list[int]] = [[] for _ in shapes]
    sums = [0] * len(shapes)
    for number in numbers:
        size = chunks[number].bytes
        tree = min(range(len(shapes)), key=lambda each: ((sums[each] + size) / weights[each], each))
        chunks_of_tree[tree].append(number)
        sums[tree] += size
    for (order, parents, kids), own, total in zip(shapes, chunks_of_tree, sums, strict=True):
        if not own:
            continue
        for host, children in kids.items():
            load[host] += children * total / rates[host]
        may = set(able)
        alternates = alternates_of(order, parents, [host in may for host in order])
        yield Tree(tuple(order), tuple(parents), tuple(alternates), tuple(own), total)


def _inner_counts(members: int, able: int, trees: int) -> list[int]:
    """How many hosts pass on in each tree, so that the busiest host sends as little as possible.

    A host with c children sends c times the bytes of its tree, so a tree may have 1/c of all bytes. If these shares add
    up to one, no host sends more than it receives. Of such counts those with the fewest children a host are taken.
    """
    others = members - 1
    if others <= 0:
        return [1]
    most = max(1, -(-others // min(_FEW_CHILDREN, others)))
    candidates = {-(-others // children) for children in (*range(max(1, trees // 2), 4 * trees + 1), others)}
    best: tuple[tuple[float, int, float], list[int]] | None = None
    for first in sorted(candidates):
        for many in range(trees + 1):
            rest = trees - many
            second = min(most, (able - many * first) // rest) if rest else 0
            if first > most or many * first > able or (rest and second < 1):
                continue
            counts = [first] * many + [second] * rest
            children = [-(-others // each) for each in counts]
            shares = sum(1 / each for each in children)
            key = -min(shares, _ENOUGH), max(children), -shares
            if best is None or key < best[0]:
                best = key, counts
    return best[1] if best is not None else [1] * trees


def _deal(able: Sequence[int], counts: Sequence[int]) -> list[list[int]]:
    """Deals the hosts that pass on to the trees, each to one. The first of `able` become roots."""
    inner: list[list[int]] = [[] for _ in counts]
    waiting = iter(able)
    for _ in range(max(counts)):
        for tree, most in enumerate(counts):
            if len(inner[tree]) < most:
                inner[tree].append(next(waiting))
    return inner


def _shape(
    passing: Sequence[int], members: Sequence[int], shift: int, rates: Sequence[float]
) -> tuple[list[int], list[int], dict[int, int]]:
    """Makes a tree as flat as possible. Returns its order, the parent of each host, and by host that passes on its
    number of children."""
    if len(members) == 1:
        return list(passing), [FROM_TRAINERS], {passing[0]: 0}
    kids = _apportioned(len(members) - 1, {host: rates[host] for host in passing})
    inner = set(passing)
    leaves = [host for host in members if host not in inner]
    rotation = shift * len(leaves) // TREES
    order = [*passing, *leaves[rotation:], *leaves[:rotation]]
    parents = [FROM_TRAINERS]
    upper, children = 0, 0
    for _ in order[1:]:
        while children == kids[order[upper]]:
            upper, children = upper + 1, 0
        parents.append(order[upper])
        children += 1
    return order, parents, kids


def _apportioned(total: int, rates: dict[int, float]) -> dict[int, int]:
    """Deals children to hosts by the hosts' rates, at least one each. total: at least as many as hosts."""
    kids = dict.fromkeys(rates, 1)
    waiting = [(2 / rate, host) for host, rate in rates.items()]
    heapify(waiting)
    for _ in range(total - len(kids)):
        host = waiting[0][1]
        kids[host] += 1
        heapreplace(waiting, ((kids[host] + 1) / rates[host], host))
    return kids


def _feeders(trees: Sequence[Tree], chunks: Sequence[Chunk], rates: Sequence[float]) -> tuple[int, ...]:
    """For each chunk the holder that has least to send; the first holder for a chunk that no host wants."""
    found = [chunk.holders[0] for chunk in chunks]
    busy = [0.0] * len(rates)
    for tree in trees:
        for number in tree.chunks:
            chunk = chunks[number]
            holder = min(chunk.holders, key=lambda each: (busy[each] + chunk.bytes / rates[each], each))
            busy[holder] += chunk.bytes / rates[holder]
            found[number] = holder
    return tuple(found)
