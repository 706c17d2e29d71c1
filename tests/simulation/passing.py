"""What a simulated relay sends to others of what it holds, slice by slice, and how it asks others. A slice is a chunk.

Like a real relay it sends what it has compared with the record, asks in the order of its table, then an origin, and in
the end every relay for what it has by then, and it compares what it is given. One that is cut off or stopped says
nothing; one that is dead is known to be.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ckpt_engine.core.chunk_order import ChunkOrder, ChunkRelay
from ckpt_engine.v1 import manager_pb2
from tests.simulation.weights import SLICES, HeldSource, Source
from tests.simulation.world import BrokenPromiseError, Steps

if TYPE_CHECKING:
    from tests.simulation.relays import RelayShell

STUCK = 1.0
"""How long it waits for a relay that gets nothing."""


@dataclass
class Passing:
    """One filling. root: of its version. verified: slices. over: whether nothing comes any more. waits: for which relay
    it waits now, and for which slice."""

    root: bytes
    slot: HeldSource
    verified: set[int] = field(default_factory=set)
    over: bool = False
    waits: tuple[RelayShell, int] | None = None
    sources: dict[str, int] = field(default_factory=dict)
    never: set[int] = field(default_factory=set)

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
            raise BrokenPromiseError(f"{self.slot.source} sends {found}, and {wanted} was sealed")
        return found


def order_of(
    table: manager_pb2.WantTable, name: str, sources: Mapping[bytes, Source]
) -> dict[int, list[manager_pb2.WantTable.Relay]]:
    """By slice, the relays that a relay asks, in this order: those before it, then origins of the slice. sources: by
    the digest of what each offers."""
    asking = {each.relay: each for each in table.relays if not each.origin}
    origins = [each for each in table.relays if each.origin and each.relay != name]
    relays = [ChunkRelay(each.relay, 0, 0.0 if each.leaf else 1.0) for each in asking.values()]
    order = ChunkOrder([1] * SLICES, [range(SLICES)], relays)
    return {
        index: [
            *(asking[other] for other in (order.before(name, index) if name in asking else ())),
            *(each for each in origins if _has(table.wants[each.wants], index, sources)),
        ]
        for index in range(SLICES)
    }


def _has(wants: manager_pb2.WantTable.Wants, index: int, sources: Mapping[bytes, Source]) -> bool:
    return not wants.within or any(index in sources[ref.digest].memory for ref in wants.within)


def ask(
    relay: RelayShell,
    passing: Passing,
    peers: Sequence[manager_pb2.WantTable.Relay],
    index: int,
    wanted: str,
    may_go_on: Callable[[], None],
) -> Steps:
    """A slice that one of these relays sends, or None."""
    world = relay.world
    for peer in peers:
        seen, until = -1, world.now + STUCK
        while world.now < until:
            may_go_on()
            other = relay.cluster.truth.passing.get(_where(peer))
            if other is None or not other.alive:
                break
            if relay.hears(other):
                if (found := passed(other, passing.root, index, wanted, peer.relay, passing)) is not None:
                    passing.waits = None
                    return found
                theirs = other.passing_of(passing.root)
                if theirs is not None and (theirs.over or index in theirs.never):
                    break
                if theirs is not None and len(theirs.verified) > seen:
                    seen, until = len(theirs.verified), world.now + STUCK
            passing.waits = other, index
            _no_circle(relay, passing.root, index)
            yield world.between(0.001, 0.03)
    passing.waits = None
    return None


def passed(other: RelayShell, root: bytes, index: int, wanted: str, name: str, passing: Passing) -> str | None:
    """A slice that another relay has now."""
    theirs = other.passing_of(root)
    found = None if theirs is None else theirs.passed(index, wanted)
    if found is not None:
        passing.came(name)
    return found


def ask_all(
    relay: RelayShell,
    passing: Passing,
    table: manager_pb2.WantTable,
    index: int,
    wanted: str,
    may_go_on: Callable[[], None],
) -> Steps:
    """A slice that some relay has by now, or None after a while. None of these questions waits."""
    passing.never.add(index)
    until = relay.world.now + STUCK
    while relay.world.now < until:
        may_go_on()
        for peer in table.relays:
            other = relay.cluster.truth.passing.get(_where(peer))
            if other is None or other is relay or not other.alive or not relay.hears(other):
                continue
            if (found := passed(other, passing.root, index, wanted, peer.relay, passing)) is not None:
                passing.never.discard(index)
                return found
        yield relay.world.between(0.01, 0.1)
    return None


def _where(peer: manager_pb2.WantTable.Relay) -> bytes:
    return peer.chunks.offers[0].locator if peer.chunks.offers else b""


def _no_circle(relay: RelayShell, root: bytes, index: int) -> None:
    seen = {relay.name}
    each = relay
    while (theirs := each.passing_of(root)) is not None and theirs.waits is not None and theirs.waits[1] == index:
        each = theirs.waits[0]
        if each.name in seen:
            raise BrokenPromiseError(f"{', '.join(sorted(seen))} wait for each other to send slice {index}")
        seen.add(each.name)
