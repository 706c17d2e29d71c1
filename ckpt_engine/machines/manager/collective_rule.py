"""Which replicas are updated by a collective, GPU to GPU, in one schedule with the trainer. One rule, which says why.

What it costs: all its replicas are paused together, and one failure after they have begun leaves all of them dirty.
What it gains: weights of a GPU on another host, where no relay brings them. So it is taken where it is asked for (the
trainer publishes for nothing else), and where a replica has no other way.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

TRANSPORT = "nccl"


class Candidate(NamedTuple):
    """A replica that lacks the version. direct: it reads all that it needs itself. relay: one is within its reach.
    unable: why it cannot take part in a collective, as the end of a sentence; empty: it can."""

    direct: bool
    relay: bool
    unable: str = ""


class Decision(NamedTuple):
    """Which replicas a collective updates.

    replicas: those that are updated by a collective; none: there is none. why: a sentence for people.
    """

    replicas: tuple[str, ...]
    why: str


def collective_decision(asked: bool, held: bool, late: bool, candidates: Mapping[str, Candidate]) -> Decision:
    """Who takes part. asked: all that is published is offered over nccl alone. held: callers return when relays hold
    the version. late: a late replica is brought to a version that replicas have already."""
    if late:
        return Decision((), "no collective: a late replica is brought up without the others")
    if held:
        return Decision((), "no collective: the trainer goes on when relays hold the version")
    wanting = {name: each for name, each in candidates.items() if asked or not (each.direct or each.relay)}
    able = tuple(sorted(name for name, each in wanting.items() if not each.unable))
    unable = "; ".join(f"{name} {wanting[name].unable}" for name in sorted(wanting) if wanting[name].unable)
    if not wanting:
        who = "every replica reads the weights itself or has a relay" if candidates else "no replica lacks the version"
        return Decision((), f"no collective: {who}")
    if not able:
        return Decision((), f"no collective: {unable}")
    verb = "is" if len(able) == 1 else "are"
    reason = "the trainer publishes for it alone" if asked else "nothing else brings weights there, and no relay"
    return Decision(able, f"{_and(able)} {verb} updated by a collective: {reason}" + (f"; {unable}" if unable else ""))


def _and(names: Collection[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last
