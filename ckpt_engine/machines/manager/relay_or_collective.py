"""Two rules for how replicas get weights that they do not read where they are published. Each decision says why.

The first decides whether a relay is filled before anything is paused. That costs another copy, and time that the
trainer waits. It gains that replicas of one host read bytes that were brought there once, that no pause covers a disk,
and that a trainer may go on when relays hold the version.

The second decides which replicas are updated by a collective, GPU to GPU, in one schedule with the trainer. That costs
that all its replicas are paused together, and that one failure after they have begun leaves all of them dirty. It gains
weights of a GPU on another host where no relay brings them. So a collective is used where it is asked for (the trainer
publishes for nothing else), and where a replica has no other way.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from ckpt_engine.core.reach import Distance
from ckpt_engine.v1 import manager_pb2


class WayDecision(NamedTuple):
    """The replicas for which a relay is filled, or which a collective updates."""

    replicas: tuple[str, ...]  # empty: the relay is not filled, or there is no collective
    why: str  # a sentence for people


def prefetch_decision(
    relay: str, prefetch: manager_pb2.Prefetch, until: manager_pb2.Until, readers: Mapping[str, int | None]
) -> WayDecision:
    """Chooses the replicas for which a relay is filled.

    readers: the replicas that lack the version and reach the relay, each with the distance of the farthest source that
    it would read without it (`reach.Distance`); None: there is a source that it does not reach.
    """
    names_in_reach = tuple(sorted(readers))
    names = ", ".join(names_in_reach)
    if not names_in_reach:
        return WayDecision((), f"{relay} is not filled: no replica that lacks the version is within its reach")
    if prefetch == manager_pb2.PREFETCH_NEVER:
        return WayDecision((), f"{relay} is not filled: prefetch is 'never'")
    if until == manager_pb2.UNTIL_HELD:
        return WayDecision(
            names_in_reach, f"{relay} is filled for {names}: the trainer goes on once relays hold the version"
        )
    if prefetch == manager_pb2.PREFETCH_ALWAYS:
        return WayDecision(names_in_reach, f"{relay} is filled for {names}: prefetch is 'always'")
    far = tuple(
        name for name in names_in_reach if (distance := readers[name]) is None or distance >= Distance.HOST_MEMORY
    )
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
        return WayDecision((), f"{relay} is not filled: {why}")
    else:
        return WayDecision(
            (), f"{relay} is not filled: {names} read the trainer's GPUs, nearer than memory of the host"
        )
    return WayDecision(far, f"{relay} is filled for {', '.join(far)}: {why}")


def in_between(relay: str, children: Sequence[str], origin: str) -> str:
    """A sentence on why a relay is filled for other relays only. origin: what these do not reach, for people."""
    verb = "does" if len(children) == 1 else "do"
    return f"{relay} is filled for {_and(children)}, which {verb} not reach {origin}"


def by_way_of(upstream: Sequence[str], origin: str, partly: bool) -> str:
    """A sentence on the relays that a relay reads, since it does not reach all sources. origin: the sources, for
    people. partly: it reaches some of them."""
    reached = f"all of {origin}" if partly else origin
    return f"it is filled from {_and(upstream)}{' too' if partly else ''}, since it does not reach {reached}"


class CollectiveCandidate(NamedTuple):
    """A replica that lacks the version."""

    direct: bool  # it can read all that it needs from the sources
    relay: bool  # it reaches a relay
    unable: str = ""  # why it cannot take part in a collective, as the end of a sentence; empty: it can


def collective_decision(
    collective_only: bool, until_held: bool, is_late: bool, candidates: Mapping[str, CollectiveCandidate]
) -> WayDecision:
    """Chooses the replicas that take part.

    collective_only: all that is published is offered over a collective alone. until_held: callers return when relays
    hold the version. is_late: a late replica is brought to a version that other replicas have.
    """
    if is_late:
        return WayDecision((), "no collective: a late replica is brought up without the others")
    if until_held:
        return WayDecision((), "no collective: the trainer goes on when relays hold the version")
    relevant = {name: each for name, each in candidates.items() if collective_only or not (each.direct or each.relay)}
    able = tuple(sorted(name for name, each in relevant.items() if not each.unable))
    unable = "; ".join(f"{name} {relevant[name].unable}" for name in sorted(relevant) if relevant[name].unable)
    if not relevant:
        why = "every replica reads the weights itself or has a relay" if candidates else "no replica lacks the version"
        return WayDecision((), f"no collective: {why}")
    if not able:
        return WayDecision((), f"no collective: {unable}")
    verb = "is" if len(able) == 1 else "are"
    why = "the trainer publishes for it alone" if collective_only else "nothing else brings weights there, and no relay"
    words = f"{_and(able)} {verb} updated by a collective: {why}"
    return WayDecision(able, f"{words}; {unable}" if unable else words)


def _and(names: Collection[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last
