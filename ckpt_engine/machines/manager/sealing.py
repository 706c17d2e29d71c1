"""Sealing: every source of one publication digests its atoms, and what it offers stays as it is from then on.

Of what is sealed already (`keep`) only digests are asked for: of ranks that keep a version, and of holders.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ckpt_engine.core.problems import deadline
from ckpt_engine.core.reach import name_of
from ckpt_engine.core.transports import GPU_MEMORY, memory_of
from ckpt_engine.core.version import Fence
from ckpt_engine.machines.events import Compiled, Published, SourceOffer
from ckpt_engine.machines.manager.course import Course
from ckpt_engine.v1 import manager_pb2, weights_pb2

Problem = weights_pb2.Problem

SOURCES_TOLD = 64
"""Sources whose sealing a timeline tells, the slowest ones."""


@dataclass(frozen=True)
class Sealing:
    """Which sources have sealed. Begins once the plans are compiled."""

    course: Course
    published: Published
    compiled: Compiled
    fence: Fence  # that the sources are told
    keep: bool
    reader: str = ""  # the replica that digests what files hold whose owner is gone; empty: none
    digests: dict[str, manager_pb2.BlobRef] = field(default_factory=dict)  # of those that have sealed, by source

    def missing(self) -> list[SourceOffer]:
        """Sources that have something to digest, and have not sealed."""
        asked = (source for source in self.published.sources if source.source in self.compiled.atoms)
        return [source for source in asked if source.source not in self.digests]

    def send(self, seconds: float) -> None:
        """Tells, again, everybody who has not answered."""
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
        """Who was silent for too long, `seconds` after the update began."""
        silent = self.missing()
        message = f"{', '.join(source.source for source in silent)} had not sealed the weights {seconds:.1f} s after "
        ranks = [source.rank for source in silent if source.rank is not None]
        return deadline(f"{message}the update began", ranks=ranks).problem

    def asked(self, body: manager_pb2.Sealed) -> list[SourceOffer]:
        """The sources that have not sealed and whose answer this is.

        An answer names its atoms, and atoms name the table that they are of, so it cannot be mistaken for another's.
        """
        return [source for source in self.missing() if self.compiled.atoms[source.source] == body.atoms]

    def take(self, body: manager_pb2.Sealed, answered: Sequence[SourceOffer]) -> Problem | None:
        """Takes an answer; the problem if it is one. answered: whose it is."""
        if body.HasField("problem"):
            problem = Problem()
            problem.CopyFrom(body.problem)
            problem.ranks[:] = problem.ranks or [source.rank for source in answered if source.rank is not None]
            return problem
        communicators, lineage = self.course.state.communicators, self.course.goal.lineage
        known = communicators.get(lineage)
        if known is not None and body.broken_communicator == known[1]:
            del communicators[lineage]
        self.digests.update((source.source, body.digests) for source in answered)
        if body.not_finite:
            self.course.not_finite |= {source.source: body for source in answered}
        note_sealed(self.course.timeline, body, answered)
        return None


def note_sealed(timeline: manager_pb2.Timeline, body: manager_pb2.Sealed, answered: Sequence[SourceOffer]) -> None:
    """Adds an answer to a timeline, which is not to grow with the number of ranks. answered: whose answer it is."""
    told = timeline.sources
    for source in answered:
        if len(told) == SOURCES_TOLD:
            quick = min(range(SOURCES_TOLD), key=lambda place: _seconds(told[place]))
            if _seconds(told[quick]) >= _seconds(body):
                continue
            del told[quick]
        noted = told.add(
            source=source.source,
            copy_seconds=body.copy_seconds,
            digest_seconds=body.digest_seconds,
            digested=body.digested,
            host=name_of(source.host),
            gpu=_on_gpus(source),
        )
        if body.HasField("span"):
            noted.span.CopyFrom(body.span)


def _on_gpus(source: SourceOffer) -> bool:
    """Whether all of its weights are offered as GPU memory; a process that uses GPUs may have weights in the host's."""
    on_gpus = (any(GPU_MEMORY in memory_of(transport) for transport in way) for way in source.ways)
    return bool(source.host.gpus and source.ways) and all(on_gpus)


def _seconds(told: manager_pb2.Sealed | manager_pb2.Timeline.Source) -> float:
    return told.copy_seconds + told.digest_seconds
