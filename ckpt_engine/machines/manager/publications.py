"""The publications of trainer ranks: decides whether the tables of a lineage's ranks fit together."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

from ckpt_engine.core.version import Fence
from ckpt_engine.machines.events import Done, MergeTables, Published
from ckpt_engine.machines.manager.members import Member, TrainerRank
from ckpt_engine.machines.manager.state import ManagerState
from ckpt_engine.v1 import manager_pb2, weights_pb2


@dataclass(frozen=True, slots=True)
class Merge:
    """Key of the task that merges the tables of a lineage."""

    lineage: str
    number: int  # results of older merges than the lineage's last are ignored


@dataclass
class LineagePublication:
    """The publication of one lineage."""

    tables: tuple[bytes, ...] = ()  # their digests, by rank, of the merge that goes on or was the last
    number: int = 0  # of that merge
    merging: bool = False
    published: Published | None = None  # None: not merged, or refused
    problem: weights_pb2.Problem | None = None  # why the tables do not fit; None: they do, or are not merged


@dataclass
class Publications:
    """The publications of all lineages."""

    state: ManagerState
    lineages: dict[str, LineagePublication] = field(default_factory=dict)
    merges: int = 0

    def get(self, lineage: str) -> LineagePublication:
        """A lineage's publication, if its ranks' tables are still those that were merged; else an empty one."""
        publication = self.lineages.get(lineage)
        tables = self._tables(lineage)
        if publication is None or tables is None or publication.tables != tuple(table.digest for table in tables):
            return LineagePublication()
        return publication

    def publish(self, trainer: TrainerRank, body: manager_pb2.Publish) -> None:
        """Takes what a rank offers from now on, or that it offers nothing any more."""
        table = body.table if body.HasField("table") else None
        self.taken_back(trainer, table)
        if trainer.table != table:
            trainer.table, trainer.sealed = table, Fence()
        self.offered(trainer)

    def taken_back(self, member: Member | None, table: manager_pb2.BlobRef | None) -> None:
        """Tells relays to let go of what a rank has offered until now, unless it is this table: its memory can be freed
        then."""
        if not isinstance(member, TrainerRank) or member.table is None or member.table == table:
            return
        for holder in self.state.members.connected_holders():
            if holder.filling is not None:
                self.state.send(holder, manager_pb2.LetGo(tables=[member.table.digest]))

    def offered(self, trainer: TrainerRank) -> None:
        """Merges the tables once all ranks have published. Called when a rank has published, also again."""
        tables = self._tables(trainer.lineage)
        if tables is None:
            return
        publication = self.lineages.setdefault(trainer.lineage, LineagePublication())
        digests = tuple(table.digest for table in tables)
        if publication.tables == digests and (publication.merging or publication.published is not None):
            if publication.published is not None:
                self._accept(trainer, publication.published)
            return
        self.merges += 1
        self.lineages[trainer.lineage] = LineagePublication(digests, self.merges, merging=True)
        task = MergeTables(trainer.lineage, tables, self.state.deadlines.merge)
        self.state.run(Merge(trainer.lineage, self.merges), task)

    def merged(self, merge: Merge, done: Done) -> None:
        """Takes the end of a merge, and tells every rank."""
        publication = self.lineages.get(merge.lineage)
        if publication is None or publication.number != merge.number:
            return
        publication.merging = False
        publication.problem = done.problem
        publication.published = cast(Published, done.result) if done.problem is None else None
        if publication.published is not None:
            self._recognise(merge.lineage, publication.published)
        for trainer in self.state.members.ranks(merge.lineage).values():
            if publication.published is not None:
                self._accept(trainer, publication.published)
            else:
                self.state.send(trainer, manager_pb2.Refused(problem=publication.problem))

    def _recognise(self, lineage: str, published: Published) -> None:
        """Takes what all ranks sealed last for the version of the ledger that was sealed under the same fence."""
        fences = {trainer.sealed for trainer in self.state.members.ranks(lineage).values()}
        for content in self.state.versions.contents.values():
            its = content.identity.lineage == lineage and content.published is None and not content.sealed_since
            if its and content.fill and fences == {self.state.fence(content.fill)}:
                content.published = published

    def prune(self) -> None:
        """Forgets lineages without ranks."""
        alive = {lineage for lineage, _ in self.state.members.trainers}
        for lineage in [lineage for lineage in self.lineages if lineage not in alive]:
            del self.lineages[lineage]

    def _accept(self, trainer: TrainerRank, published: Published) -> None:
        self.state.send(trainer, manager_pb2.PublicationAccepted(table=trainer.table, manifest=published.manifest))

    def _tables(self, lineage: str) -> tuple[manager_pb2.BlobRef, ...] | None:
        """The tables by rank; None: some rank has not published."""
        ranks = self.state.members.ranks(lineage)
        if not ranks:
            return None
        world_size = next(iter(ranks.values())).world_size
        tables = [trainer.table for trainer in ranks.values() if trainer.table is not None]
        return tuple(tables) if len(tables) == world_size else None
