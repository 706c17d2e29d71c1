"""What becomes of a plan when hosts die or turn out to be slow: the fewest new parents. Pure.

Only those whose parent was lost get another. The order of each tree stays as it is, so parents of an old plan and of a
new one never wait for each other in a circle, however late each host hears of the new one. It decides neither who is
dead nor how a rate is measured.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from ckpt_engine.core.fan_out import FROM_TRAINERS, FanOut, Tree, alternates_of, relative_rates, slow_hosts
from ckpt_engine.core.problems import invalid

_FULL = 1.02
"""Of what each host would send if all sent alike: with less than this a host may get one more child."""

_TOO_MUCH = 1.1
"""Of the same: a host with more, because it is slower than was thought, hands children on to others. So does one that
has adopted somebody while it was full."""

_SLOWER = 0.95
"""Of the rate that was thought: less than this is a change."""

_ROUNDING = 1 + 1e-9


def fallback(plan: FanOut, tree: int, host: str, lost: Collection[str]) -> str | None:
    """Whom a host reads a tree from by itself, until a new plan comes: its parent, or else its first alternate that is
    not lost. None: the trainers' hosts."""
    own = plan.trees[tree]
    place = own.place[plan.number[host]]
    for each in (own.parents[place], *own.alternates[place]):
        if each == FROM_TRAINERS or plan.hosts[each].name not in lost:
            return None if each == FROM_TRAINERS else plan.hosts[each].name
    return None


def replan(plan: FanOut, dead: Collection[str] = (), rates: Mapping[str, float] | None = None) -> FanOut:
    """The plan without hosts that died, and with nobody reading from those that are slow (`LEAF_BELOW`).

    rates: what hosts were measured to pass on while others waited for them, bytes/s; others keep the rate that they
    had. Who was slow stays a leaf. The same facts give the same plan, and facts that are known already the same object.

    Raises INVALID_ARGUMENT for a host that the plan does not have, and for a rate that is not positive.
    """
    measured = dict(rates or {})
    for name in (*dead, *measured):
        if name not in plan.number:
            raise invalid(f"the fan-out has no host {name!r}; plan anew for hosts that have come")
        if not 0 < measured.get(name, 1.0) < float("inf"):
            raise invalid(f"host {name!r} has a rate of {measured[name]} bytes/s; leave it out if it is not known")
    hosts = tuple(host._replace(rate=measured.get(host.name, host.rate)) for host in plan.hosts)
    gone = plan.dead | {plan.number[name] for name in dead}
    known = relative_rates(hosts)
    leaves = plan.leaves | slow_hosts({host: rate for host, rate in enumerate(known) if host not in gone})
    if (hosts, gone, leaves) == (plan.hosts, plan.dead, plan.leaves):
        return plan
    before = relative_rates(plan.hosts)
    slower = frozenset(host for host, rate in enumerate(known) if rate < _SLOWER * before[host])
    trees = _Repair(plan.trees, known, gone, leaves - gone, slower).trees()
    return replace(plan, hosts=hosts, trees=trees, dead=gone, leaves=leaves)


class _Repair:
    """One replanning. load: bytes that each host sends, in all trees, by its rate."""

    def __init__(
        self,
        trees: Sequence[Tree],
        rates: Sequence[float],
        gone: frozenset[int],
        slow: frozenset[int],
        slower: frozenset[int],
    ) -> None:
        self._slower = slower
        self._old, self._rates, self._gone, self._slow = trees, rates, gone, slow
        self._load = [0.0] * len(rates)
        sent = 0
        for tree in trees:
            for host, parent in zip(tree.hosts, tree.parents, strict=True):
                if host not in gone:
                    sent += tree.bytes
                    if self._passes(parent):
                        self._load[parent] += tree.bytes / rates[parent]
        self._had = list(self._load)
        self._adopters: set[int] = set()
        able = sum(rate for host, rate in enumerate(rates) if self._passes(host))
        self._full = _FULL * sent / able if able else 0.0

    def trees(self) -> tuple[Tree, ...]:
        """All of them, in their order. Those that lost nobody they need are the objects that they were."""
        return tuple(self._tree(tree) for tree in self._old)

    def _passes(self, host: int) -> bool:
        return host != FROM_TRAINERS and host not in self._gone and host not in self._slow

    def _strained(self, host: int) -> bool:
        if host in self._adopters:
            return self._load[host] > max(self._full, self._had[host]) * _ROUNDING
        return host in self._slower and self._load[host] > self._full * _TOO_MUCH / _FULL

    def _with_one_more(self, host: int, tree: Tree) -> float:
        return self._load[host] + tree.bytes / self._rates[host]

    def _tree(self, tree: Tree) -> Tree:
        self._adopters = set()
        lost = self._gone | self._slow
        named = {*tree.parents, *(each for alternates in tree.alternates for each in alternates)}
        if lost.isdisjoint(named) and self._gone.isdisjoint(tree.hosts) and not any(map(self._strained, tree.children)):
            return tree
        inner = {host for host in tree.parents if self._passes(host)}
        order: list[int] = []
        parents: list[int] = []
        before: list[int] = []  # may be read from
        for host, parent, alternates in zip(tree.hosts, tree.parents, tree.alternates, strict=True):
            if host in self._gone:
                continue
            if parent != FROM_TRAINERS and not self._passes(parent):
                parent = self._adopted(tree, before, alternates, inner)
                self._adopters.add(parent)
            order.append(host)
            parents.append(parent)
            if host not in self._slow:
                before.append(host)
        self._relieve(tree, order, parents, inner)
        kept = [tree.alternates[tree.place[host]] for host in order]
        found = alternates_of(order, parents, [host not in self._slow for host in order], kept)
        return replace(tree, hosts=tuple(order), parents=tuple(parents), alternates=tuple(found))

    def _adopted(self, tree: Tree, before: Sequence[int], alternates: Collection[int], inner: set[int]) -> int:
        """A new parent for an orphan: one of its alternates if that has time, or else who has most of it; of several
        one that passes on in this tree already, and the latest of these, who has the fewest behind him."""
        if not before:
            return FROM_TRAINERS

        def cost(place: int) -> tuple[bool, bool, bool, float, int]:
            host = before[place]
            load = self._with_one_more(host, tree)
            full = load > self._full
            return full, not full and host not in alternates, not full and host not in inner, load, -place

        host = before[min(range(len(before)), key=cost)]
        self._load[host] = self._with_one_more(host, tree)
        inner.add(host)
        return host

    def _relieve(self, tree: Tree, order: Sequence[int], parents: list[int], inner: set[int]) -> None:
        """Those who have more to do than others, since they have adopted somebody or are slower than was thought, hand
        children on to others who have less, leaves first. A new root would slow down everybody."""
        for leaves in (True, False):
            for at in range(len(order) - 1, 0, -1):
                parent = parents[at]
                if (order[at] in inner) == leaves or not self._passes(parent) or not self._strained(parent):
                    continue
                left = self._load[parent] - tree.bytes / self._rates[parent]
                others = [host for host in order[:at] if self._passes(host) and host != parent]
                others = [host for host in others if self._with_one_more(host, tree) <= left]
                if others:
                    parents[at] = self._adopted(tree, others, (), inner)
                    self._load[parent] = left
