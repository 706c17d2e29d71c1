"""The stages of making plans: offers are joined, plans compiled, atoms digested by their sources, digests added up.

Decides what each stage hands on to the next, and which answers and results still count. Its owner (an update, a group
of its relays, holdings) begins each stage and looks at `stage` after each event. The owner decides for which workers
and from which sources plans are made, how long a stage may take, and what a failure means.

When sources of one publication digest their atoms, they seal: what they offer stays as it is from then on. What is
sealed already (`keep`), by ranks that keep a version or by holders, is only digested.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, cast

from ckpt_engine.core.problems import deadline
from ckpt_engine.core.relay_remedy import name_of
from ckpt_engine.core.transports import GPU_MEMORY, memory_of
from ckpt_engine.core.version import Fence
from ckpt_engine.machines import events
from ckpt_engine.machines.events import (
    Combined,
    CombineSeals,
    Compiled,
    CompilePlans,
    Joined,
    JoinSources,
    Published,
    SourceOffer,
)
from ckpt_engine.machines.manager.course import Course
from ckpt_engine.machines.manager.state import ManagerState
from ckpt_engine.v1 import manager_pb2, weights_pb2

Problem = weights_pb2.Problem

TIMELINE_SOURCES = 64
"""The most sources in a timeline, the slowest to seal."""

Work: TypeAlias = JoinSources | CompilePlans | CombineSeals


@dataclass(frozen=True, slots=True)
class PlanTask:
    """The key of a pipeline's task."""

    pipeline: int  # its number
    work: type[Work]


@dataclass(frozen=True, slots=True)
class Planned:
    """Plans are compiled. They may be compiled again, for other workers, before anything is digested."""

    published: Published
    compiled: Compiled


@dataclass(frozen=True)
class Sealing:
    """Commands sources to seal, and collects their digests. Begins once the plans are compiled."""

    course: Course
    published: Published
    compiled: Compiled
    fence: Fence  # of the commands to the sources
    keep: bool  # what they offer is sealed already
    reader: str = ""  # the replica that digests files for sources without a process; empty: none does
    digests: dict[str, manager_pb2.BlobRef] = field(default_factory=dict)  # of those that have sealed, by source

    def missing(self) -> list[SourceOffer]:
        """Sources that have something to digest, and have not sealed."""
        sources = (source for source in self.published.sources if source.source in self.compiled.atoms)
        return [source for source in sources if source.source not in self.digests]

    def send(self, seconds: float) -> None:
        """Sends the command, the first time or again, to all sources that have not answered."""
        state, lineage, version = self.course.state, self.course.goal.lineage, self.course.goal.version
        if not self.keep:
            state.versions.sealed_anew(lineage)
        for source in self.missing():
            atoms = self.compiled.atoms[source.source]
            member = state.members.source(lineage, source)
            if member is not None:
                seal = manager_pb2.Seal(
                    fence=self.fence.message(),
                    version=version,
                    atoms=atoms,
                    keep=self.keep,
                    deadline_seconds=seconds,
                )
                state.send(member, seal)
            elif self.reader:
                command = manager_pb2.SealForReaders(
                    fence=self.fence.message(), table=source.table, atoms=atoms, deadline_seconds=seconds
                )
                state.send_to(self.reader, command)

    def overdue(self, seconds: float) -> Problem:
        """The problem that names the sources that have not sealed `seconds` after the update began."""
        silent = self.missing()
        message = f"{', '.join(source.source for source in silent)} had not sealed the weights {seconds:.1f} s after "
        ranks = [source.rank for source in silent if source.rank is not None]
        return deadline(f"{message}the update began", ranks=ranks).problem

    def sources_of(self, body: manager_pb2.Sealed) -> list[SourceOffer]:
        """The sources of an answer, among those that have not sealed.

        An answer names its atoms, and atoms name the table that they are of, so each answer has its own sources.
        """
        return [source for source in self.missing() if self.compiled.atoms[source.source] == body.atoms]

    def take(self, body: manager_pb2.Sealed, answered: Sequence[SourceOffer]) -> Problem | None:
        """Takes an answer; returns the problem if it reports one. answered: the sources that sent it."""
        if body.HasField("problem"):
            problem = Problem()
            problem.CopyFrom(body.problem)
            problem.ranks[:] = problem.ranks or [source.rank for source in answered if source.rank is not None]
            return problem
        communicators, lineage = self.course.state.communicators, self.course.goal.lineage
        kept_communicator = communicators.get(lineage)
        if kept_communicator is not None and body.broken_communicator == kept_communicator[1]:
            del communicators[lineage]
        self.digests.update((source.source, body.digests) for source in answered)
        if body.not_finite:
            self.course.not_finite |= {source.source: body for source in answered}
        note_sealed(self.course.timeline, body, answered)
        return None


@dataclass(frozen=True, slots=True)
class Way:
    """The last stage: finished plans, from which replicas can be installed."""

    compiled: Compiled
    combined: Combined  # the digests that readers of these plans must find


@dataclass(frozen=True, slots=True)
class Failed:
    """Making the plans failed, or they must not be used."""

    problem: weights_pb2.Problem
    sources: tuple[str, ...] = ()  # the ids of those that failed; empty: unknown


Stage: TypeAlias = JoinSources | Joined | CompilePlans | Planned | Sealing | CombineSeals | Way | Failed
"""The stages in their order; a publication needs no join. A task is the stage that waits for its result."""


class PlanPipeline:
    """Makes plans once, from sources, record and workers. What comes for a stage that has ended is ignored."""

    def __init__(self, state: ManagerState) -> None:
        state.pipelines += 1
        self.number = state.pipelines
        self.stage: Stage | None = None
        self._state = state
        self._blobs: dict[type[Stage], list[manager_pb2.BlobRef]] = {}  # by the stage that needed or made it

    def run(self, task: Work) -> None:
        """Begins a stage that is the manager's own work."""
        self.stage = task
        self._state.run(PlanTask(self.number, type(task)), task)

    def seal(self, sealing: Sealing, seconds: float) -> None:
        """Commands the sources to digest their atoms."""
        self.stage = sealing
        self.send(seconds)

    def send(self, seconds: float) -> None:
        """Sends the command again to the sources that have not answered."""
        if isinstance(self.stage, Sealing):
            self.stage.send(seconds)

    def missing(self) -> list[events.SourceOffer]:
        """The sources that were told to digest and have not answered."""
        return self.stage.missing() if isinstance(self.stage, Sealing) else []

    def take(self, body: manager_pb2.Sealed) -> bool:
        """Takes an answer of a source. Returns whether this pipeline asked for it."""
        if not isinstance(self.stage, Sealing) or not (answered := self.stage.sources_of(body)):
            return False
        problem = self.stage.take(body, answered)
        self._blobs[Sealing] = [*self.stage.digests.values()]
        if problem is not None:
            self.stage = Failed(problem, tuple(source.source for source in answered))
        return True

    def combine(self, seconds: float) -> None:
        """Adds up the digests. None may be missing."""
        assert isinstance(self.stage, Sealing)
        self.run(CombineSeals(self.stage.published, self.stage.compiled, self.stage.digests, seconds))

    def done(self, task: PlanTask, done: events.Done) -> bool:
        """Takes the end of a task. Returns whether this pipeline waits for it."""
        if task.pipeline != self.number or not isinstance(self.stage, task.work):
            return False
        match self.stage:
            case _ if done.problem is not None:
                self.stage = Failed(done.problem)
            case JoinSources():
                self.stage = joined = cast(Joined, done.result)
                self._blobs[Joined] = [] if joined.published is None else [joined.published.manifest]
            case CompilePlans(published):
                self.stage = Planned(published, compiled := cast(Compiled, done.result))
                self._blobs[Planned] = [*compiled.plans.values(), *compiled.atoms.values()]
            case CombineSeals(compiled=compiled):
                self.stage = Way(compiled, combined := cast(Combined, done.result))
                self._blobs[Way] = [*combined.expected.values(), *([combined.record] if combined.record else [])]
        return True

    def blobs(self) -> list[manager_pb2.BlobRef]:
        """Blobs that it made, which members may fetch or the next stage needs."""
        return [ref for refs in self._blobs.values() for ref in refs]


def note_sealed(timeline: manager_pb2.Timeline, body: manager_pb2.Sealed, answered: Sequence[SourceOffer]) -> None:
    """Adds an answer to a timeline, which must not grow with the number of ranks. answered: the sources that it is
    of."""
    entries = timeline.sources
    for source in answered:
        if len(entries) == TIMELINE_SOURCES:
            quick = min(range(TIMELINE_SOURCES), key=lambda place: _seconds(entries[place]))
            if _seconds(entries[quick]) >= _seconds(body):
                continue
            del entries[quick]
        entry = entries.add(
            source=source.source,
            copy_seconds=body.copy_seconds,
            digest_seconds=body.digest_seconds,
            digested=body.digested,
            host=name_of(source.host),
            gpu=_on_gpus(source),
        )
        if body.HasField("span"):
            entry.span.CopyFrom(body.span)


def _on_gpus(source: SourceOffer) -> bool:
    """Whether a source offers all of its weights as GPU memory; one that uses GPUs may have weights in host memory."""
    on_gpus = (any(GPU_MEMORY in memory_of(transport) for transport in way) for way in source.ways)
    return bool(source.host.gpus and source.ways) and all(on_gpus)


def _seconds(entry: manager_pb2.Sealed | manager_pb2.Timeline.Source) -> float:
    return entry.copy_seconds + entry.digest_seconds
