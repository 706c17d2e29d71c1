"""Whether a relay is to bring a version before anything is paused. One rule, which says why.

What it costs: a copy more, and the time that the trainer is held for it. What it gains: several replicas of a host
read bytes that were brought there once, a pause covers no disk, and a trainer may go on when relays hold the version.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ckpt_engine.core.reach import Distance
from ckpt_engine.v1 import manager_pb2


class Decision(NamedTuple):
    """Whether a relay is filled, and for whom.

    replicas: those that are to be installed from the relay; none: it is not filled. why: a sentence for people.
    """

    replicas: tuple[str, ...]
    why: str


def prefetch_decision(
    relay: str, prefetch: manager_pb2.Prefetch, until: manager_pb2.Until, readers: Mapping[str, int | None]
) -> Decision:
    """What a relay is filled for.

    readers: the replicas that lack the version and reach the relay, each with the distance of the farthest source that
    it would read without it (`reach.Distance`); None: there is a source that it does not reach.
    """
    everybody = tuple(sorted(readers))
    names = ", ".join(everybody)
    if not everybody:
        return Decision((), f"{relay} is not filled: no replica that lacks the version is within its reach")
    if prefetch == manager_pb2.NEVER:
        return Decision((), f"{relay} is not filled: prefetch is 'never'")
    if until == manager_pb2.HELD:
        return Decision(everybody, f"{relay} is filled for {names}: the trainer goes on once relays hold the version")
    if prefetch == manager_pb2.ALWAYS:
        return Decision(everybody, f"{relay} is filled for {names}: prefetch is 'always'")
    far = tuple(name for name in everybody if (distance := readers[name]) is None or distance >= Distance.HOST_MEMORY)
    cut_off = [name for name in far if readers[name] is None]
    slow = [name for name in far if (distance := readers[name]) is not None and distance > Distance.HOST_MEMORY]
    if cut_off:
        why = f"{', '.join(cut_off)} cannot read the trainer's weights directly"
    elif slow:
        why = f"otherwise the pause of {', '.join(slow)} would wait for files or a network"
    elif len(far) > 1:
        why = f"these {len(far)} replicas would read the same memory of their host"
    elif far:
        why = f"{far[0]} alone reads the trainer's memory, so filling would add a copy"
        return Decision((), f"{relay} is not filled: {why}")
    else:
        return Decision((), f"{relay} is not filled: {names} read the trainer's GPUs, nearer than memory of the host")
    return Decision(far, f"{relay} is filled for {', '.join(far)}: {why}")


def in_between(relay: str, children: Sequence[str], whom: str) -> str:
    """Why a relay is filled that has no replicas to install. whom: those whose weights these relays do not reach."""
    verb = "does" if len(children) == 1 else "do"
    return f"{relay} is filled for {_and(children)}, which {verb} not reach {whom}"


def by_way_of(upstream: Sequence[str], whom: str, partly: bool) -> str:
    """A sentence on whom a relay is filled from that does not reach all sources itself. partly: it reaches some."""
    reached = f"all of {whom}" if partly else whom
    return f"it is filled from {_and(upstream)}{' too' if partly else ''}, since it does not reach {reached}"


def _and(names: Sequence[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last
