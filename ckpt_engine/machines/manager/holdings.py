"""What holders hold, and which of it a late replica can be brought up from.

All connected holders of one version are joined, and ranks that hold it still; each may have other boxes of it. A record
counts only if it hashes to the root by which the ledger, or the words of workers, know the version. Whoever brings
another one, or a table that does not fit, is told so and left out; the others are read.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ckpt_engine.machines.events import Done, HeldOffer, Joined, JoinSources, Published
from ckpt_engine.machines.manager.members import Holder
from ckpt_engine.machines.manager.plan_pipeline import Failed, PlanPipeline, PlanTask
from ckpt_engine.machines.manager.state import State
from ckpt_engine.machines.manager.versions import Latest
from ckpt_engine.v1 import manager_pb2, weights_pb2


@dataclass(frozen=True, slots=True)
class JoinRetry:
    """Key of the timer after which what failed to be joined is joined again."""

    pipeline: int  # the number of the one that failed


@dataclass(frozen=True)
class Joining:
    """What holders of one version offer together."""

    offers: tuple[HeldOffer, ...]
    pipeline: PlanPipeline

    @property
    def joined(self) -> Joined | None:
        """What it came to; None while it goes on, or if it failed."""
        return self.pipeline.stage if isinstance(self.pipeline.stage, Joined) else None


@dataclass
class Holdings:
    """Joins what holders hold into sources of a version.

    by_lineage: what was joined last for the version of each lineage that was asked for last.
    """

    state: State
    by_lineage: dict[str, Joining] = field(default_factory=dict)

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
        return known is not None and isinstance(known.pipeline.stage, JoinSources)

    def failure(self, latest: Latest) -> weights_pb2.Problem | None:
        """Why what is held of it could not be joined; None: it was, or nothing was tried. A failed join is repeated."""
        known = self.by_lineage.get(latest.identity.lineage)
        stage = None if known is None else known.pipeline.stage
        return stage.problem if isinstance(stage, Failed) else None

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
            known = self.by_lineage[lineage] = Joining(offers, PlanPipeline(self.state))
            known.pipeline.run(JoinSources(latest.identity, offers, latest.record, self.state.deadlines.merge))
        joined = known.joined
        if joined is None or joined.published is None or joined.record is None:
            return None
        return joined.published, joined.record

    def planned(self, task: PlanTask, done: Done) -> None:
        """A task of a pipeline ended, which may be of these: tells those that were left out. What failed altogether is
        joined again a little later."""
        for joining in self.by_lineage.values():
            if not joining.pipeline.done(task, done):
                continue
            if isinstance(joining.pipeline.stage, Failed):
                self.state.set_timer(JoinRetry(task.pipeline), self.state.deadlines.catch_up_retry)
            for holder in self.state.members.connected_holders():
                problem = None if joining.joined is None else joining.joined.refused.get(holder.source)
                if problem is not None:
                    self.state.send(holder, manager_pb2.Refused(problem=problem))

    def again(self, retry: JoinRetry) -> None:
        """Forgets what failed a moment ago, so that it is joined when it is asked for."""
        for lineage, joining in list(self.by_lineage.items()):
            if joining.pipeline.number == retry.pipeline:
                del self.by_lineage[lineage]

    def blobs(self) -> dict[str, list[manager_pb2.BlobRef]]:
        """The blobs that must stay, by the holder that needs them."""
        used: dict[str, list[manager_pb2.BlobRef]] = {}
        for holder in self.state.members.holders.values():
            used[holder.source] = [
                ref for held in holder.held for ref in (held.table, held.record) if ref is not None and ref.digest
            ]
        for lineage, joining in self.by_lineage.items():
            if refs := joining.pipeline.blobs():
                used.setdefault(f"lineage {lineage!r}", []).extend(refs)
        return used
