"""Reports that call a replica quarantined since its agent was lost while it installed: told anew once it is known.

The agent, or the one after it, goes on without the manager, and mostly brings the replica to the version. Whoever asks
for the report afterwards, and the ledger, are told what it is then. The calls that have returned are not.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ckpt_engine.machines.events import CorrectOutcome
from ckpt_engine.machines.manager.members import Replica
from ckpt_engine.machines.manager.report import judge, what_became
from ckpt_engine.machines.manager.state import State
from ckpt_engine.v1 import manager_pb2


@dataclass
class _Guess:
    """session: of the agent that was told to install."""

    report: manager_pb2.UpdateReport
    min_replicas: int | None
    session: str


@dataclass
class Corrections:
    """Corrects reports that had to guess how an update ended for a replica.

    guesses: the last one of each replica.
    """

    state: State
    guesses: dict[str, _Guess] = field(default_factory=dict)

    def over(self, report: manager_pb2.UpdateReport, min_replicas: int | None, guessed: dict[str, str]) -> None:
        """An update has ended; guessed: its replicas of which nobody knows what became, with the session that was told.
        What an update before it left open of those that it reached stays as it was told."""
        for outcome in report.replicas:
            if outcome.outcome != manager_pb2.NOT_REACHED:
                self.guesses.pop(outcome.replica, None)
        for name, session in guessed.items():
            self.guesses[name] = _Guess(report, min_replicas, session)

    def look(self, replica: Replica) -> None:
        """Changes the report of a replica that was heard, in memory and in the ledger, once it is known what became of
        it."""
        guess = self.guesses.get(replica.name)
        if guess is None:
            return
        report = guess.report
        found = what_became(replica, report.fence, report.identity, guess.session)
        if found is None:
            return
        del self.guesses[replica.name]
        for outcome in report.replicas:
            if outcome.replica == replica.name:
                outcome.CopyFrom(found)
        judge(report, guess.min_replicas)
        task = CorrectOutcome(report, replica.name, self.state.deadlines.report)
        self.state.run(("correct", report.fence.epoch, replica.name), task)
