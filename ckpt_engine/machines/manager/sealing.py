"""Sealing in one update: every source digests its atoms, and what it offers stays as it is from then on."""

from __future__ import annotations

from ckpt_engine.core.problems import deadline
from ckpt_engine.machines.events import Compiled, SourceOffer
from ckpt_engine.machines.manager.order import Order
from ckpt_engine.machines.manager.state import State
from ckpt_engine.v1 import manager_pb2, weights_pb2

Problem = weights_pb2.Problem


class Sealing:
    """Who has sealed and who has not. Begins once the plans are compiled."""

    def __init__(self, state: State, order: Order, fence: weights_pb2.Fence, compiled: Compiled) -> None:
        self._state = state
        self._order = order
        self._fence = fence
        self._compiled = compiled
        self._answers: dict[str, manager_pb2.Sealed] = {}

    def missing(self) -> list[SourceOffer]:
        """Sources that have something to digest, and have not sealed."""
        asked = (source for source in self._order.published.sources if source.source in self._compiled.atoms)
        return [source for source in asked if source.source not in self._answers]

    def digests(self) -> dict[str, manager_pb2.BlobRef]:
        """Of those that have, by source."""
        return {source: answer.digests for source, answer in self._answers.items()}

    def send(self, seconds: float) -> None:
        """Tells, again, everybody who has not answered.

        Sources of a version that was sealed before are only asked for digests of what they keep sealed; where the
        process of such a source is gone, what it offered may still be there (files), and a replica digests it as a
        reader.
        """
        kept = self._order.sealed is not None
        if not kept:
            self._state.versions.sealed_anew(self._order.lineage)
        for source in self.missing():
            atoms = self._compiled.atoms[source.source]
            member = self._state.members.source(self._order.lineage, source)
            if member is not None:
                seal = manager_pb2.Seal(
                    fence=self._fence, version=self._order.version, atoms=atoms, keep=kept, deadline_seconds=seconds
                )
                self._state.send(member, seal)
            elif kept:
                command = manager_pb2.SealForReaders(
                    fence=self._fence, table=source.table, atoms=atoms, deadline_seconds=seconds
                )
                self._state.send_to(self._order.replicas[0], command)

    def overdue(self, seconds: float) -> Problem:
        """Who was silent for too long, `seconds` after the update began."""
        silent = self.missing()
        message = f"{', '.join(source.source for source in silent)} had not sealed the weights {seconds:.1f} s after "
        ranks = [source.rank for source in silent if source.rank is not None]
        return deadline(f"{message}the update began", ranks=ranks).problem

    def take(self, body: manager_pb2.Sealed) -> Problem | None:
        """Takes an answer; the problem if it is one.

        An answer names its atoms, and atoms name the table that they are of, so it cannot be mistaken for another's.
        """
        answered = [source for source in self.missing() if self._compiled.atoms[source.source] == body.atoms]
        if not answered:
            return None
        if body.HasField("problem"):
            problem = Problem()
            problem.CopyFrom(body.problem)
            problem.ranks[:] = problem.ranks or [source.rank for source in answered if source.rank is not None]
            return problem
        self._answers.update((source.source, body) for source in answered)
        return None
