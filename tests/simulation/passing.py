"""What a simulated relay passes on while it is being filled, slice by slice, and how it waits for what others pass on.

A slice is a chunk. Like a real relay it passes on what it has compared with the record, asks its parent first and then
the alternates, and compares what it is given. Who is cut off or stopped says nothing; who is dead is known to be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ckpt_engine.core.relay_chunks import SlotChunk, deal_chunks
from ckpt_engine.v1 import manager_pb2
from tests.simulation.weights import SLICES, HeldSource
from tests.simulation.world import BrokenPromiseError, Steps

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.simulation.relays import RelayShell

STUCK = 1.0
"""How long one waits for somebody who has nothing."""


@dataclass
class Passing:
    """One filling. key: plan and root. verified: slices. over: whether nothing comes any more. waits: for whom it waits
    now, and for which slice."""

    key: tuple[bytes, bytes]
    slot: HeldSource
    verified: set[int] = field(default_factory=set)
    over: bool = False
    waits: tuple[RelayShell, int] | None = None
    sources: dict[str, int] = field(default_factory=dict)

    def came(self, source: str) -> None:
        """A slice was brought from there."""
        self.sources[source] = self.sources.get(source, 0) + 1

    def brought(self) -> list[manager_pb2.RelayFilled.Brought]:
        """As a relay reports it; a slice counts as a byte."""
        return [manager_pb2.RelayFilled.Brought(source=name, bytes=count) for name, count in self.sources.items()]

    def end(self) -> None:
        """It has failed: nothing of it is sent any more."""
        self.over = True
        self.verified.clear()

    def passed(self, index: int, wanted: str) -> str | None:
        """A slice, if it may be read now."""
        if index not in self.verified:
            return None
        found = self.slot.memory.get(index)
        if found != wanted:
            raise BrokenPromiseError(f"{self.slot.source} passes on {found}, and {wanted} was sealed")
        return found


def asked_for(told: manager_pb2.FanOut) -> dict[int, list[manager_pb2.FanOut.Peer]]:
    """By slice, whom a relay asks, in this order; nobody: it reads those who hold the version."""
    chunks = [SlotChunk((index,), (), (), 1) for index in range(SLICES)]
    trees = zip(told.trees, deal_chunks(chunks, [tree.share for tree in told.trees]), strict=True)
    return {index: [told.peers[number] for number in tree.ask] for tree, own in trees for index in own}


def wait_for(
    relay: RelayShell,
    passing: Passing,
    peers: Sequence[manager_pb2.FanOut.Peer],
    index: int,
    wanted: str,
    may_go_on: Callable[[], None],
) -> Steps:
    """A slice that somebody passes on, or None."""
    world = relay.world
    for peer in peers:
        until = world.now + STUCK
        while world.now < until:
            may_go_on()
            other = relay.cluster.truth.passing.get(peer.region.locator)
            if other is None or not other.alive:
                break
            if relay.hears(other) and (theirs := other.passing) is not None and theirs.key == passing.key:
                found = theirs.passed(index, wanted)
                if found is not None:
                    passing.waits = None
                    passing.came(peer.relay)
                    return found
                if theirs.over:
                    break
            passing.waits = other, index
            _no_circle(relay, index)
            yield world.between(0.001, 0.03)
    passing.waits = None
    return None


def _no_circle(relay: RelayShell, index: int) -> None:
    seen = {relay.name}
    each = relay
    while each.passing is not None and each.passing.waits is not None and each.passing.waits[1] == index:
        each = each.passing.waits[0]
        if each.name in seen:
            raise BrokenPromiseError(f"{', '.join(sorted(seen))} wait for each other to pass on slice {index}")
        seen.add(each.name)
