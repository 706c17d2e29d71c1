"""Reports that could not know what becomes of a replica: corrected when it holds the version after all.

An agent that was lost while it installed, or the one after it, goes on without the manager, and mostly brings the
replica to the version. And a replica that an update left out or quarantined is brought to the version later. Later
questions for the report, and the ledger, are answered with what it is then. Calls that have returned are not.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ckpt_engine.core.version import Fence, Version
from ckpt_engine.machines.events import CorrectOutcome
from ckpt_engine.machines.manager.members import Replica
from ckpt_engine.machines.manager.report import judge, what_became
from ckpt_engine.machines.manager.state import State
from ckpt_engine.v1 import manager_pb2


@dataclass(frozen=True, slots=True)
class Correction:
    """Key of the task that corrects a report in the ledger. Its end changes nothing: the replica's outcome stands."""

    epoch: int
    replica: str


@dataclass
class _Open:
    """A replica that a report does not call new and serving."""

    report: manager_pb2.UpdateReport
    min_replicas: int | None  # as its goal asks for
    session: str | None = None  # of an agent that was told to install and lost; None: what became of it is known


@dataclass
class Corrections:
    """Corrects reports in memory and in the ledger."""

    state: State
    open: dict[str, _Open] = field(default_factory=dict)  # by replica; the last update that reached it, or was for it

    def over(self, report: manager_pb2.UpdateReport, min_replicas: int | None, guessed: dict[str, str]) -> None:
        """An update has ended. guessed: its replicas of which nothing is known, with the session that was told to
        install. What an update before it left open of those that it reached stays as it was told."""
        for outcome in report.replicas:
            name, guess = outcome.replica, guessed.get(outcome.replica)
            known = self.open.get(name)
            if outcome.outcome == manager_pb2.NEW_SERVING:
                self.open.pop(name, None)
            elif guess is not None or known is None or known.session is None or _reached(outcome):
                self.open[name] = _Open(report, min_replicas, guess)

    def brought(self, outcome: manager_pb2.ReplicaOutcome) -> None:
        """An attempt of its own has ended for one replica: it serves the version now, which its update's report did not
        say; or not, and the report stays."""
        known = self.open.get(outcome.replica)
        if known is None or outcome.outcome != manager_pb2.NEW_SERVING:
            return
        if known.report.identity != outcome.after:
            del self.open[outcome.replica]
            return
        found = manager_pb2.ReplicaOutcome()
        found.CopyFrom(outcome)
        found.fence.CopyFrom(known.report.fence)
        known.report.warnings.append(
            f"replica {outcome.replica!r} was brought to it later, by attempt {outcome.fence.epoch}"
        )
        self._correct(known, found)

    def look(self, replica: Replica) -> None:
        """Changes the report of a replica that was heard, once it is known what became of it."""
        known = self.open.get(replica.name)
        if known is None or known.session is None:
            return
        report = known.report
        found = what_became(replica, Fence.of(report.fence), Version.of(report.identity), known.session)
        if found is not None:
            self._correct(known, found)

    def _correct(self, known: _Open, found: manager_pb2.ReplicaOutcome) -> None:
        report = known.report
        for outcome in report.replicas:
            if outcome.replica == found.replica:
                outcome.CopyFrom(found)
        if found.outcome == manager_pb2.NEW_SERVING:
            del self.open[found.replica]
        else:
            known.session = None
        judge(report, known.min_replicas)
        task = CorrectOutcome(report, found.replica, self.state.deadlines.report)
        self.state.run(Correction(report.fence.epoch, found.replica), task)


def _reached(outcome: manager_pb2.ReplicaOutcome) -> bool:
    return outcome.outcome != manager_pb2.NOT_REACHED
