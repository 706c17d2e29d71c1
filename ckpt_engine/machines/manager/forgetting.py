"""When a member that does not say goodbye is forgotten, and with it what it holds of the manager's memory.

A rank that says goodbye is forgotten at once. One that was killed only loses its session, so it is forgotten
- `forget` seconds after that, if it has not come back (that costs nothing: a hello brings all of it again);
- as soon as no rank of its run is connected and updates of other runs have taken over every replica that its own were
  for;
- when an operator evicts its run.
So is a holder that was killed, `forget` seconds later, and a replica that no update ever reached. A replica that was
prepared for a version, or holds one, stays until it is evicted: it may go on serving that one.

Names cost nothing to make, so a stranger must not leave any. A member that has brought nothing is forgotten as soon as
its session ends: a replica that never had a worker, a holder that holds nothing and can hold nothing, a rank of a
lineage without a version that has published nothing. Of the other replicas that no update reached, `MOST_LOST` wait
for `forget`; beyond that the one that was lost first goes. What a member says of itself is believed: one that lies
about what it holds is kept out by tokens only.

What the run published goes with its last rank, unless it can be read without it (files) and there is a replica that is
to hold it: then it stays for late ones, until other updates have taken over the last of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ckpt_engine.core.version import Version
from ckpt_engine.machines.manager.members import Holder, Member, MemberId, Replica, Trainer, member_id
from ckpt_engine.machines.manager.state import State

MOST_LOST = 1024
"""Replicas without a session that have workers and were never prepared for a version: far more than an outage takes
before a first update."""


@dataclass(frozen=True, slots=True)
class ForgetTimer:
    """Key of the timer after which a lost member is forgotten."""

    member: MemberId


@dataclass
class Forgetting:
    """Says which members are to be forgotten; the manager's machine then tells all that must know."""

    state: State
    unreached: dict[str, None] = field(
        default_factory=dict
    )  # lost replicas that no update reached; the first one first

    def lost(self, member: Member) -> Member | None:
        """Notes that its session ended without a goodbye. Returns a member that is to be forgotten at once."""
        if not self._brought(member):
            return member
        if isinstance(member, Replica):
            if _reached(member):
                return None
            self.unreached[member.name] = None
        self.state.set_timer(ForgetTimer(member_id(member)), self.state.deadlines.forget)
        if len(self.unreached) > MOST_LOST:
            return self.state.members.replicas.get(next(iter(self.unreached)))
        return None

    def back(self, member: Member) -> None:
        """Notes that a member said hello again, or will not."""
        if isinstance(member, Replica):
            self.unreached.pop(member.name, None)
        self.state.cancel_timer(ForgetTimer(member_id(member)))

    def due(self, key: ForgetTimer) -> Member | None:
        """The member whose time is over; None: it is connected, or gone."""
        member = self.state.members.get(key.member)
        return member if member is not None and member.peer is None else None

    def _brought(self, member: Member) -> bool:
        """Whether something is lost with it, or may be."""
        if isinstance(member, Replica):
            return bool(member.workers) or _reached(member)
        if isinstance(member, Holder):
            return bool(member.held) or member.filling is not None
        return member.table is not None or member.lineage in self.state.versions.last

    def taken_over(self) -> list[Trainer]:
        """Ranks of runs that are gone and whose replicas all belong to others now."""
        versions, trainers = self.state.versions, self.state.members.trainers.values()
        over = {trainer.lineage for trainer in trainers} & versions.last.keys() - versions.lineages()
        over -= {trainer.lineage for trainer in trainers if trainer.peer is not None}
        return [trainer for trainer in trainers if trainer.lineage in over]

    def prune(self) -> None:
        """Lets go of what runs without ranks have published, and of versions that only replicas which have left were to
        serve, if it is of no use any more."""
        alive = {lineage for lineage, _ in self.state.members.trainers}
        wanted, needed = self.state.versions.lineages(), self.state.versions.needed(self.state.members.replicas)
        for content in self.state.versions.contents.values():
            lineage, published = content.identity.lineage, content.published
            gone = published is not None and lineage not in alive
            files = published is not None and all(source.outlives for source in published.sources)
            if content.identity not in needed or (gone and not (files and lineage in wanted)):
                content.published = content.record = None


def _reached(replica: Replica) -> bool:
    """Whether a version is, or may be, in its workers: it is prepared before it is told to install."""
    holds = any(Version.or_none(worker.identity) for worker in replica.workers)
    return holds or bool(replica.prepared) or replica.last_outcome is not None
