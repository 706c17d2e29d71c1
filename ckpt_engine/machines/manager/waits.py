"""Calls that wait for the end of an update: from callers that returned when relays held its version, and others.

A call waits for an update that runs. How an update ended is known from memory, or from the ledger if it ended before
this manager began. Attempts for late replicas are not updates here: no call asked for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

from ckpt_engine.core.deadlines import check_seconds
from ckpt_engine.core.problems import aborted, deadline, invalid, not_found
from ckpt_engine.machines.events import Call, Done, FindReport, FinishCall, Found
from ckpt_engine.machines.manager.state import ManagerState
from ckpt_engine.machines.manager.update import Update
from ckpt_engine.v1 import manager_pb2, weights_pb2

REMEMBERED = 16
"""Reports that are kept in memory: the ledger may have failed to write them."""

VersionNumber = tuple[str, int]
"""A lineage and a number."""


@dataclass(frozen=True, slots=True)
class WaitEnd:
    """Key of the timer of one call."""

    number: int


@dataclass(frozen=True, slots=True)
class ReportSearch:
    """Key of the task that asks the ledger on behalf of one call."""

    number: int


@dataclass
class Waiting:
    """One call."""

    call: Call
    version: VersionNumber
    seconds: float  # that it waits at most
    searching: bool = False  # the ledger is being asked


@dataclass
class Waits:
    """Calls of WaitForUpdate, and the reports that answer them."""

    state: ManagerState
    waiting: dict[int, Waiting] = field(default_factory=dict)  # by number
    reports: dict[VersionNumber, manager_pb2.UpdateReport] = field(default_factory=dict)  # oldest first
    numbers: int = 0  # how many calls have waited

    def join(self, call: Call, request: manager_pb2.WaitForUpdateRequest, running: Sequence[Update]) -> None:
        """Takes a call in. Raises INVALID_ARGUMENT if the request names no version."""
        if not request.lineage or request.version < 0:
            raise invalid(f"version {request.version} of lineage {request.lineage!r} names no update")
        if request.timeout_seconds:
            check_seconds("a timeout", request.timeout_seconds)
        version = request.lineage, request.version
        report = self.reports.get(version)
        if report is not None and not self._running(running, version):
            self.state.out.append(FinishCall(call, response=report))
            return
        self.numbers += 1
        seconds = request.timeout_seconds or self.state.deadlines.update
        waiting = self.waiting[self.numbers] = Waiting(call, version, seconds)
        self.state.set_timer(WaitEnd(self.numbers), seconds)
        if not self._running(running, version):
            waiting.searching = True
            self.state.run(ReportSearch(self.numbers), FindReport(*version, self.state.deadlines.ledger))

    def cancelled(self, call: Call) -> None:
        """Forgets a call that was cancelled."""
        for number in [number for number, waiting in self.waiting.items() if waiting.call == call]:
            self._end(number)

    def update_ended(self, update: Update) -> None:
        """Answers the calls that wait for an update that has ended."""
        if update.goal.is_attempt or update.goal.dry_run:
            return
        self.ended((update.goal.lineage, update.goal.version), update.refusal, update.report)

    def ended(
        self, version: VersionNumber, refusal: weights_pb2.Problem | None, report: manager_pb2.UpdateReport | None
    ) -> None:
        """Answers the calls that wait for an update, or a deployment, to this version."""
        if report is not None:
            self.reports.pop(version, None)
            self.reports[version] = report
            while len(self.reports) > REMEMBERED:
                del self.reports[next(iter(self.reports))]
        for number, waiting in list(self.waiting.items()):
            if waiting.version == version and not waiting.searching:
                self._finish(number, FinishCall(waiting.call, refusal, report))

    def found(self, number: int, done: Done, running: Sequence[Update]) -> None:
        """Takes the ledger's answer about a call's version."""
        waiting = self.waiting.get(number)
        if waiting is None:
            return
        waiting.searching = False
        if self._running(running, waiting.version):
            return  # it began meanwhile
        report, problem = self.reports.get(waiting.version), done.problem
        if report is None and problem is None:
            record = cast(Found, done.result)
            early, unknown = _ended_early(waiting.version, record.epoch), unknown_version(waiting.version, record.last)
            report, problem = record.report, unknown if record.epoch is None else early
        self._finish(number, FinishCall(waiting.call, None if report is not None else problem, report))

    def timer(self, number: int, running: Sequence[Update]) -> None:
        """Refuses a call when its time has ended."""
        waiting = self.waiting.get(number)
        if waiting is not None:
            what = self._running(running, waiting.version) or "the ledger is asked"
            problem = deadline(f"after {waiting.seconds:g} s it goes on: {what}").problem
            self._finish(number, FinishCall(waiting.call, problem))

    def _running(self, running: Sequence[Update], version: VersionNumber) -> str:
        """The running update or deployment to this version, for people; empty: there is none."""
        orders = ((update, update.goal) for update in running if not (update.goal.is_attempt or update.goal.dry_run))
        update = next((each for each, goal in orders if (goal.lineage, goal.version) == version), None)
        if update is not None:
            return update.describe()
        rows = self.state.deployments.items()
        numbers = (number for number, row in rows if row.is_to(*version))
        return next((f"deployment {number}: see `ckpt-engine deploy status`" for number in numbers), "")

    def _finish(self, number: int, finish: FinishCall) -> None:
        self.state.out.append(finish)
        self._end(number)

    def _end(self, number: int) -> None:
        del self.waiting[number]
        self.state.cancel_timer(WaitEnd(number))


def _ended_early(version: VersionNumber, epoch: int | None) -> weights_pb2.Problem:
    lineage, number = version
    return aborted(
        f"the manager ended during update {epoch} (version {number} of lineage {lineage!r}), so there is no report of "
        "it: replicas that lack that version are brought to it if a member holds it; `ckpt-engine status` shows them"
    ).problem


def unknown_version(version: VersionNumber, last: Sequence[int]) -> weights_pb2.Problem:
    """The problem that no update to a version is known. last: versions of the lineage's updates, newest first."""
    lineage, number = version
    hint = f"its last ones were to {', '.join(map(str, last))}" if last else "none of this lineage is"
    return not_found(f"no update to version {number} of lineage {lineage!r} is known: {hint}").problem
