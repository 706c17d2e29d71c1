"""When a run that does not end by itself is forgotten, and with it what it holds of the manager's memory.

A rank that says goodbye is forgotten at once. One that was killed only loses its session, so it is forgotten
- `forget` seconds after that, if it has not come back (that costs nothing: a hello brings all of it again);
- as soon as no rank of its run is connected and updates of other runs have taken over every replica that its own were
  for;
- when an operator evicts its run.
So is a holder that was killed, `forget` seconds later.
What the run published goes with its last rank, unless it can be read without it (files) and there is a replica that is
to hold it: then it stays for late ones, until other updates have taken over the last of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from ckpt_engine.machines.events import Key
from ckpt_engine.machines.manager.members import Holder, Trainer
from ckpt_engine.machines.manager.state import State


@dataclass
class Forgetting:
    """Says who is to be forgotten; the manager's machine then sees to it that everybody hears of it."""

    state: State

    def lost(self, member: Trainer | Holder) -> None:
        """Notes that its session ended without a goodbye."""
        self.state.set_timer(_key(member), self.state.deadlines.forget)

    def back(self, member: Trainer | Holder) -> None:
        """Notes that a member said hello again."""
        self.state.cancel_timer(_key(member))

    def due(self, name: str, rank: int) -> list[Trainer | Holder]:
        """The time of a rank, or of a holder, is over."""
        members = self.state.members
        member = members.holders.get(name) if rank < 0 else members.trainers.get((name, rank))
        return [member] if member is not None and member.peer is None else []

    def taken_over(self) -> list[Trainer]:
        """Ranks of runs that are gone and whose replicas all belong to others now."""
        versions, trainers = self.state.versions, self.state.members.trainers.values()
        over = {trainer.lineage for trainer in trainers} & versions.latest.keys() - versions.lineages()
        over -= {trainer.lineage for trainer in trainers if trainer.peer is not None}
        return [trainer for trainer in trainers if trainer.lineage in over]

    def prune(self) -> None:
        """Lets go of what runs without ranks have published, if it can help nobody any more."""
        alive = {lineage for lineage, _ in self.state.members.trainers}
        wanted = self.state.versions.lineages()
        for lineage, latest in self.state.versions.latest.items():
            published = latest.published
            if published is None or lineage in alive:
                continue
            if lineage not in wanted or not all(source.outlives for source in published.sources):
                latest.published = latest.record = None


def _key(member: Trainer | Holder) -> Key:
    if isinstance(member, Holder):
        return ("forget", member.source, -1)
    return ("forget", member.lineage, member.rank)
