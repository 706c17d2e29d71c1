"""The sources of a version: for a late replica, for a rollback, and for a non-member that wants to read it.

Ranks that stay sealed hold the version that they sealed last, and holders what they say. What the sealed record covers
need not be hashed again: what holders hold, and what ranks hold that were not told to seal another version since.

All connected holders of one version, and ranks that still hold it, are joined; each may have other boxes of it. A
record counts only if it hashes to the root by which the ledger, or the words of workers, know the version. A holder
with another record, or with a table that does not fit, is told so and left out; the others are read.

A non-member can read versions that connected holders hold under such a root, and those that were committed last as
long as all of their sources stay sealed. Telling it where changes nothing and reserves nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ckpt_engine.core.problems import invalid, not_found
from ckpt_engine.core.version import Version
from ckpt_engine.machines.events import Done, HeldOffer, Joined, JoinSources, Published, SourceOffer
from ckpt_engine.machines.manager.lineages import FILES
from ckpt_engine.machines.manager.members import Holder
from ckpt_engine.machines.manager.plan_pipeline import Failed, PlanPipeline, PlanTask
from ckpt_engine.machines.manager.publications import Publications
from ckpt_engine.machines.manager.state import ManagerState
from ckpt_engine.machines.manager.versions import Content
from ckpt_engine.v1 import manager_pb2, weights_pb2

MOST_NAMED = 8
"""Versions that a refusal names."""


@dataclass(frozen=True, slots=True)
class JoinRetry:
    """Key of the timer after which a failed join is repeated."""

    pipeline: int  # the number of the one that failed


@dataclass(frozen=True)
class Joining:
    """What holders of one version offer together."""

    offers: tuple[HeldOffer, ...]
    pipeline: PlanPipeline

    @property
    def joined(self) -> Joined | None:
        """The result; None while the join goes on, or if it failed."""
        return self.pipeline.stage if isinstance(self.pipeline.stage, Joined) else None


@dataclass
class Holdings:
    """Says where a version can be read: joins what holders hold, and ranks that hold it still, into sources."""

    state: ManagerState
    publications: Publications
    # The last joins, by version and whether a call asks for it: attempts join ranks, too.
    joinings: dict[tuple[Version, bool], Joining] = field(default_factory=dict)
    called: frozenset[Version] = frozenset()  # versions that calls ask for

    def supply(self, content: Content, attempt: int = 0) -> tuple[Published, manager_pb2.BlobRef | None] | None:
        """The sources from which a version can be read, and its record if it covers what they hold. None: there are
        none, or that is not known yet (`looking`, `failure`). attempt: how many failed before.

        What ranks and holders hold is joined, so that each worker reads the nearest of them. Ranks that were told to
        seal another version since must digest all again, so they are not joined: every second attempt reads them alone.
        """
        offered = self.offered(content)
        if (
            offered is None
            or not stays_sealed(offered)
            or any(self._taken_back(content, source) for source in offered.sources)
        ):
            return self.of(content)
        present = all(_is_there(self.state, content, source) for source in offered.sources)
        recorded = offered == content.published and not content.sealed_since and content.record is not None
        ranks = offered.sources if present and recorded else ()
        held = self.of(content, [HeldOffer(each.source, each.table, None, each.rank) for each in ranks])
        if held is not None and (recorded or not present or attempt % 2 == 0):
            return held
        if present and self.looking(content):
            return None
        return offered, content.record if present and recorded else None

    def offered(self, content: Content) -> Published | None:
        """What the ranks of a version have published; None: they have published another one since, or nothing."""
        identity = content.identity
        if content.published is not None or self.state.versions.highest.get(identity.lineage) != identity:
            return content.published
        return self.publications.get(identity.lineage).published

    def _taken_back(self, content: Content, source: SourceOffer) -> bool:
        """Whether a source is lost for good: its rank is connected and offers something else, or nothing."""
        if source.outlives or source.rank is None:
            return False
        rank = self.state.members.trainers.get((content.identity.lineage, source.rank))
        return rank is not None and rank.peer is not None and rank.table != source.table

    def note_held(self, holder: Holder) -> None:
        """Takes what a holder says that it holds. Joins that refused it are forgotten, so that they are repeated."""
        for held in holder.held:
            self.state.send(holder, manager_pb2.PublicationAccepted(table=held.table))
        for key, joining in list(self.joinings.items()):
            if joining.joined is not None and holder.source in joining.joined.refused:
                del self.joinings[key]

    def looking(self, content: Content) -> bool:
        """Whether a join for a version goes on, so that its sources are known soon."""
        joining = self.joinings.get((content.identity, False))
        return joining is not None and isinstance(joining.pipeline.stage, JoinSources)

    def failure(self, content: Content) -> weights_pb2.Problem | None:
        """Why the last join for a version failed; None: it did not, or none was tried. A failed join is repeated."""
        joining = self.joinings.get((content.identity, False))
        stage = None if joining is None else joining.pipeline.stage
        return stage.problem if isinstance(stage, Failed) else None

    def of(
        self, content: Content, ranks: Iterable[HeldOffer] = (), called: bool = False
    ) -> tuple[Published, manager_pb2.BlobRef] | None:
        """The joined sources of a version and its record; None if nothing holds it, or while that is not known. ranks:
        offers of trainer ranks that hold it too; holders that are as near are read before them. called: whether a call
        asks for it."""
        identity, key = content.identity, (content.identity, called)
        offers = self.state.members.offers(identity)
        if not offers:
            self.joinings.pop(key, None)
            return None
        offers = (*offers, *ranks)
        joining = self.joinings.get(key)
        if joining is None or joining.offers != offers:
            self._forget()
            joining = self.joinings[key] = Joining(offers, PlanPipeline(self.state))
            joining.pipeline.run(JoinSources(identity, offers, content.record, self.state.deadlines.merge))
        joined = joining.joined
        if joined is None or joined.published is None or joined.record is None:
            return None
        return joined.published, joined.record

    def _forget(self) -> None:
        """Forgets joins of versions that nothing asks for any more."""
        in_use = {True: self.called, False: self.state.versions.contents.keys()}
        self.joinings = {key: each for key, each in self.joinings.items() if key[0] in in_use[key[1]]}

    def planned(self, task: PlanTask, done: Done) -> None:
        """Takes the end of a pipeline's task, which may be of a join. Tells holders that were left out. A join that
        failed altogether is repeated a little later."""
        for joining in self.joinings.values():
            if not joining.pipeline.done(task, done):
                continue
            if isinstance(joining.pipeline.stage, Failed):
                self.state.set_timer(JoinRetry(task.pipeline), self.state.deadlines.catch_up_retry)
            for holder in self.state.members.connected_holders():
                problem = None if joining.joined is None else joining.joined.refused.get(holder.source)
                if problem is not None:
                    self.state.send(holder, manager_pb2.Refused(problem=problem))

    def retry(self, failed: JoinRetry) -> None:
        """Forgets a failed join, so that it is repeated when the version is asked for."""
        for key, joining in list(self.joinings.items()):
            if joining.pipeline.number == failed.pipeline:
                del self.joinings[key]

    def blobs(self) -> dict[str, list[manager_pb2.BlobRef]]:
        """The blobs that must stay, by the holder that needs them."""
        used: dict[str, list[manager_pb2.BlobRef]] = {}
        for holder in self.state.members.holders.values():
            used[holder.source] = [
                ref for held in holder.held for ref in (held.table, held.record) if ref is not None and ref.digest
            ]
        for (identity, _), joining in self.joinings.items():
            if refs := joining.pipeline.blobs():
                used.setdefault(f"lineage {identity.lineage!r}", []).extend(refs)
        return used


@dataclass
class _Readable:
    identity: Version
    record: manager_pb2.BlobRef
    tables: list[manager_pb2.BlobRef] = field(default_factory=list)


def stays_sealed(published: Published) -> bool:
    """Whether it may be read after the call in which it was sealed: ranks do not change it before they seal again."""
    return all(source.stays_sealed for source in published.sources)


def _is_there(state: ManagerState, content: Content, source: SourceOffer) -> bool:
    return source.outlives or state.members.source(content.identity.lineage, source) is not None


def located(state: ManagerState, request: manager_pb2.LocateVersionRequest) -> manager_pb2.LocateVersionResponse:
    """Where a version can be read. Raises NOT_FOUND, naming what can be read, and INVALID_ARGUMENT if the lineage is
    ambiguous."""
    readable = _readable(state)
    lineages = sorted({lineage for lineage, _ in readable})
    if not request.lineage and len(lineages) > 1:
        raise invalid(f"versions of the lineages {', '.join(map(repr, lineages))} can be read: name one of them")
    lineage = request.lineage or next(iter(lineages), "")
    last = state.versions.last.get(lineage)
    number = request.version if request.HasField("version") else None
    if number is None:
        highest = max((each for of, each in readable if of == lineage), default=None)
        number = highest if last is None else last.identity.number
    version = None if number is None else readable.get((lineage, number))
    if version is None:
        what = "any version" if number is None else f"version {number}"
        of = f" of lineage {lineage!r}" if lineage else ""
        newest = [str(each.identity) for _, each in sorted(readable.items())[-MOST_NAMED:]]
        raise not_found(
            f"no readable source holds {what}{of}; can be read: {', '.join(newest) or 'none'}. Relays keep the last "
            "two versions that they were filled with; a trainer keeps one readable that it published with "
            "snapshot=True, or from a directory"
        )
    return manager_pb2.LocateVersionResponse(
        identity=version.identity.message(),
        record=version.record,
        tables=version.tables,
        relays=[
            manager_pb2.WantTable.Relay(relay=holder.source, chunks=holder.filling.chunks, origin=True)
            for holder in state.members.connected_holders()
            if holder.filling is not None and holder.filling.HasField("chunks")
            if any(held.identity == version.identity for held in holder.held)
        ],
    )


def _readable(state: ManagerState) -> dict[tuple[str, int], _Readable]:
    """The readable versions, by lineage and number. Holders come first: they are nearer, or as near."""
    readable: dict[tuple[str, int], _Readable] = {}
    for holder in state.members.connected_holders():
        for held in holder.held:
            identity = held.identity
            if held.record is not None and held.record.digest and state.versions.knows(identity):
                each = readable.setdefault((identity.lineage, identity.number), _Readable(identity, held.record))
                each.tables.append(held.table)
    for content in state.versions.contents.values():
        identity, tables = content.identity, [source.table for source in _sealed_sources(state, content)]
        if content.record is not None:
            key = identity.lineage, identity.number
            if tables and key not in readable:
                readable[key] = _Readable(identity, content.record)
            if key in readable:
                readable[key].record = content.record  # the manager's own
                readable[key].tables += tables
    return readable


def sealed_versions(state: ManagerState) -> list[manager_pb2.VersionStatus]:
    """The versions that ranks, or files, still have as they were sealed, and which ranks; in no order."""
    found = []
    for content in state.versions.contents.values():
        sources = _sealed_sources(state, content) if content.record is not None else []
        if sources and content.published is not None and len(sources) == len(content.published.sources):
            names = [FILES if source.outlives else f"rank {source.rank}" for source in sources]
            message = content.identity.message()
            found.append(manager_pb2.VersionStatus(identity=message, holders=dict.fromkeys(names)))
    return found


def _sealed_sources(state: ManagerState, content: Content) -> list[SourceOffer]:
    """The ranks, or files, that still have the weights that were sealed."""
    if content.published is None or content.sealed_since:
        return []
    return [source for source in content.published.sources if source.stays_sealed and _is_there(state, content, source)]
