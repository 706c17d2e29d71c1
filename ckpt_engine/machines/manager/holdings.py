"""What holders hold, and which of it a late replica can be brought up from.

All connected holders of one version are joined, and ranks that hold it still; each may have other boxes of it. A record
counts only if it hashes to the root by which the ledger, or the words of workers, know the version. Whoever brings
another one, or a table that does not fit, is told so and left out; the others are read.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import cast

from ckpt_engine.machines.events import Done, HeldOffer, Joined, JoinSources, Published
from ckpt_engine.machines.manager.members import Holder
from ckpt_engine.machines.manager.state import State
from ckpt_engine.machines.manager.versions import Latest
from ckpt_engine.v1 import manager_pb2


@dataclass
class Joining:
    """What holders of one version offer together. offers: what is joined. joined: None while that goes on, or if it
    failed."""

    offers: tuple[HeldOffer, ...]
    number: int
    joined: Joined | None = None
    failed: bool = False


@dataclass
class Holdings:
    """Joins what holders hold into sources of a version.

    by_lineage: what was joined last for the version of each lineage that was asked for last. step: the first word
    of its tasks' and timers' keys.
    """

    state: State
    step: str = "join"
    by_lineage: dict[str, Joining] = field(default_factory=dict)
    joins: int = 0

    def told(self, holder: Holder) -> None:
        """A holder says what it has. What was joined without it is joined again."""
        for held in holder.held:
            self.state.send(holder, manager_pb2.PublicationAccepted(table=held.table))
        for lineage, joining in list(self.by_lineage.items()):
            joined = joining.joined
            if joined is not None and holder.source in joined.refused:
                del self.by_lineage[lineage]

    def looking(self, latest: Latest) -> bool:
        """Whether that will be known soon."""
        known = self.by_lineage.get(latest.identity.lineage)
        return known is not None and known.joined is None and not known.failed

    def of(self, latest: Latest, ranks: Iterable[HeldOffer] = ()) -> tuple[Published, manager_pb2.BlobRef] | None:
        """Where a version lies and its record; None if nobody holds it, or as long as that is not known. ranks: what is
        known of trainer ranks that hold it too; equally near, holders are read before them."""
        lineage = latest.identity.lineage
        offers = self.state.members.offers(latest.identity)
        if not offers:
            self.by_lineage.pop(lineage, None)
            return None
        offers = (*offers, *ranks)
        known = self.by_lineage.get(lineage)
        if known is None or known.offers != offers:
            self.joins += 1
            self.by_lineage[lineage] = Joining(offers, self.joins)
            task = JoinSources(latest.identity, offers, latest.record, self.state.deadlines.merge)
            self.state.run((self.step, lineage, self.joins), task)
            return None
        joined = known.joined
        if joined is None or joined.published is None or joined.record is None:
            return None
        return joined.published, joined.record

    def ended(self, lineage: str, number: int, done: Done) -> None:
        """A join ended: tells those that were left out. One that failed altogether is tried again a little later."""
        known = self.by_lineage.get(lineage)
        if known is None or known.number != number:
            return
        if done.problem is not None:
            known.failed = True
            self.state.set_timer((self.step, lineage), self.state.deadlines.catch_up_retry)
            return
        known.joined = cast(Joined, done.result)
        for holder in self.state.members.connected_holders():
            problem = known.joined.refused.get(holder.source)
            if problem is not None:
                self.state.send(holder, manager_pb2.Refused(problem=problem))

    def again(self, lineage: str) -> None:
        """What failed a moment ago is tried again when it is asked for."""
        known = self.by_lineage.get(lineage)
        if known is not None and known.joined is None:
            del self.by_lineage[lineage]

    def blobs(self) -> dict[str, list[manager_pb2.BlobRef]]:
        """The blobs that must stay, by the holder that needs them."""
        used: dict[str, list[manager_pb2.BlobRef]] = {}
        for holder in self.state.members.holders.values():
            used[holder.source] = [ref for held in holder.held for ref in (held.table, held.record) if ref.digest]
        for lineage, joining in self.by_lineage.items():
            if joining.joined is not None and joining.joined.published is not None:
                used.setdefault(f"lineage {lineage!r}", []).append(joining.joined.published.manifest)
        return used
