"""The report of an update at its end, and its corrections later.

At the end there are outcomes for replicas that gave none, and the report of all. Later an agent that was lost while it
installed, or the one after it, goes on without the manager, and mostly brings the replica to the version. Also a
replica that an update left out or quarantined may be brought to the version later. The report is corrected then, in
memory and in the ledger, for later calls. Calls that have returned had the report as it was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ckpt_engine.core.names import some
from ckpt_engine.core.probe import findings
from ckpt_engine.core.problems import unavailable
from ckpt_engine.core.stages import in_order
from ckpt_engine.core.version import Fence, Version
from ckpt_engine.machines.events import CorrectOutcome, Published
from ckpt_engine.machines.manager.goal import Goal
from ckpt_engine.machines.manager.members import Replica
from ckpt_engine.machines.manager.state import ManagerState
from ckpt_engine.machines.offering import NOT_FINITE_NAMED
from ckpt_engine.v1 import manager_pb2, weights_pb2

COPIED_REASONS = 16
"""The most reasons for copies, and the most warnings of sources, in a report."""

COPIED_NAMED = 16
"""The most tensors that are named for each reason."""


def unchanged_outcome(name: str, fence: Fence, identity: Version) -> manager_pb2.ReplicaOutcome:
    """The outcome of a replica that serves these weights already, and was left alone."""
    held = identity.message()
    return manager_pb2.ReplicaOutcome(
        replica=name, fence=fence.message(), outcome=manager_pb2.OUTCOME_NEW_SERVING, before=held, after=held
    )


def presumed_outcome(
    name: str, replica: Replica | None, fence: Fence, problem: weights_pb2.Problem, is_ordered: bool
) -> manager_pb2.ReplicaOutcome:
    """The outcome of a replica that gave none.

    is_ordered: it was told to install, so its state is unknown, and it counts as closed. Otherwise it is as it was:
    unknown if it or its engine is not there, else it still serves the old version if that is what it said last.
    """
    own_problem = weights_pb2.Problem()
    own_problem.CopyFrom(problem)
    own_problem.replica = name
    own_problem.kept.clear()
    outcome = manager_pb2.ReplicaOutcome(
        replica=name, fence=fence.message(), outcome=manager_pb2.OUTCOME_QUARANTINED, problem=own_problem
    )
    identity = None if replica is None or is_ordered else replica.identity
    if identity is not None:
        outcome.before.CopyFrom(identity.message())
    if not is_ordered and (replica is None or replica.peer is None or replica.engine is None):
        outcome.outcome = manager_pb2.OUTCOME_NOT_REACHED
    elif replica is not None and replica.serving and identity is not None:
        outcome.outcome = manager_pb2.OUTCOME_OLD_SERVING
        outcome.after.CopyFrom(identity.message())
    return outcome


def later_outcome(
    replica: Replica | None, fence: Fence, identity: Version, session: str
) -> manager_pb2.ReplicaOutcome | None:
    """The outcome, as known by now, of a replica that was told to install and lost its agent; None: unknown.

    session: of the agent that was told. When it is back it reports the outcome itself. Another agent knows only the
    workers' words, and not the install: then what the replica serves counts.
    """
    if replica is None:
        return None
    if replica.last_outcome is not None and Fence.of(replica.last_outcome.fence) == fence:
        return replica.last_outcome
    held = replica.identity
    if not replica.serving or held is None or replica.session_id == session:
        return None
    epochs = {worker.epoch for worker in replica.workers}
    outcome = manager_pb2.ReplicaOutcome(replica=replica.name, fence=fence.message(), after=held.message())
    if epochs == {fence.epoch} and held == identity:
        outcome.outcome = manager_pb2.OUTCOME_NEW_SERVING
    elif max(epochs) < fence.epoch:
        outcome.outcome = manager_pb2.OUTCOME_OLD_SERVING
        message = (
            "its agent was lost while it installed; the one that is there now finds it serving what it served before"
        )
        outcome.problem.CopyFrom(unavailable(message, replica=replica.name).problem)
    else:
        return None
    return outcome


def counts(outcome: manager_pb2.ReplicaOutcome) -> bool:
    """Whether an update without a least number of replicas is ok only if this replica has the version."""
    return not (outcome.operator_hold or outcome.cannot_load)


def judge(report: manager_pb2.UpdateReport, min_replicas: int | None) -> None:
    """Sets whether a report with all outcomes is ok and verified. min_replicas: of its goal; None: all that count."""
    new = [outcome for outcome in report.replicas if outcome.outcome == manager_pb2.OUTCOME_NEW_SERVING]
    count = sum(map(counts, report.replicas))
    report.ok = len(new) >= (count if min_replicas is None else min_replicas)
    report.verified = report.ok and all(is_verified(worker) for outcome in new for worker in outcome.workers)


def build_report(
    fence: Fence,
    identity: Version,
    goal: Goal,
    outcomes: Mapping[str, manager_pb2.ReplicaOutcome],
    seconds: float,
    planning: float,
    relays: Sequence[manager_pb2.RelayReport] = (),
    prefetch: str = "",
    held: bool = False,
) -> manager_pb2.UpdateReport:
    """Builds the report of an update; `judge` says whether it is ok. planning: seconds until the first install command.
    prefetch: why relays were filled or not. held: installs have not ended; the report is not judged, and leaves out
    replicas without an outcome."""
    sorted_outcomes = [outcomes[name] for name in sorted(outcomes)]
    slowest: dict[manager_pb2.Stage, float] = {}
    for outcome in sorted_outcomes:
        for stage in outcome.stages:
            slowest[stage.stage] = max(slowest.get(stage.stage, 0.0), stage.seconds)
    slowest[manager_pb2.STAGE_PLAN] = planning + slowest.get(manager_pb2.STAGE_PLAN, 0.0)
    report = manager_pb2.UpdateReport(
        fence=fence.message(),
        identity=identity.message(),
        replicas=sorted_outcomes,
        seconds=seconds,
        stages=in_order(slowest),
        bytes=sum(outcome.bytes for outcome in sorted_outcomes),
        tensors=goal.published.tensors,
        source_copies=max((source.source_copies for source in goal.published.sources), default=0),
        warnings=[
            *_warnings(identity, goal.before),
            *_source_warnings(goal.published),
            *_cannot_load(sorted_outcomes),
        ],
        copied=_copied(goal.published),
        relays=relays,
        prefetch=prefetch,
        held=held,
    )
    if not held:
        judge(report, goal.min_replicas)
    tell_probe(report)
    return report


def tell_probe(report: manager_pb2.UpdateReport) -> None:
    """Sets what the probe has found by the outcomes that the report has now."""
    del report.probe[:]
    report.probe.extend(findings({each.replica: each.probe for each in report.replicas if each.HasField("probe")}))


def _copied(published: Published) -> list[weights_pb2.CopiedTensors]:
    """What ranks copied to seal, with one entry for each reason: a report must not grow with the number of ranks."""
    by_reason: dict[str, weights_pb2.CopiedTensors] = {}
    for source in published.sources:
        for entry in source.copied:
            total = by_reason.get(entry.reason)
            if total is None:
                by_reason[entry.reason] = total = weights_pb2.CopiedTensors(
                    reason=entry.reason, names=entry.names[:COPIED_NAMED], rank=source.rank
                )
            total.tensors += entry.tensors
            total.bytes += entry.bytes
            total.ranks += 1
    return sorted(by_reason.values(), key=lambda entry: (-entry.bytes, entry.reason))[:COPIED_REASONS]


def _warnings(identity: Version, before: Version | None) -> list[str]:
    """A warning if a version has the weights of the one before: the optimizer has changed nothing, or other tensors."""
    if before is None or before.root != identity.root or before.number >= identity.number:
        return []
    return [
        f"version {identity.number} has the same weights as version {before.number}: if the model was trained "
        "in between, what the optimizer writes is not what was published"
    ]


def _cannot_load(outcomes: Sequence[manager_pb2.ReplicaOutcome]) -> list[str]:
    """A warning that names replicas with another model, which do not count."""
    names = [outcome.replica for outcome in outcomes if outcome.cannot_load]
    if not names:
        return []
    return [
        f"{some(names)} can never load what is published, and does not count: start an engine with that model there, "
        "put it into a pool of its own (`ckpt-engine agent --pool NAME`), or take it out (`replica evict`)"
    ]


def tell_not_finite(report: manager_pb2.UpdateReport, sealed: Mapping[str, manager_pb2.Sealed]) -> None:
    """Adds NaN and infinity to a report. sealed: the answers that named some, by source."""
    if not sealed:
        return
    names = sorted({name for answer in sealed.values() for name in answer.not_finite})
    report.not_finite.extend(names[:NOT_FINITE_NAMED])
    # Ranks may hold parts of one tensor, and each names only some of its own: the number is a lower bound.
    more = max(len(names), *(answer.not_finite_tensors for answer in sealed.values())) - len(names)
    tensors = some([*names, *[""] * more])
    report.warnings.append(
        f"version {report.identity.version} holds NaN or infinity in {tensors} (sealed by {some(sorted(sealed))}): if "
        "training has diverged, go back; publish(check_finite=True) refuses such updates"
    )


def _source_warnings(published: Published) -> list[str]:
    """The warnings of sources, each once: a report must not grow with the number of ranks."""
    return list(dict.fromkeys(each for source in published.sources for each in source.warnings))[:COPIED_REASONS]


def is_verified(worker: manager_pb2.WorkerReport) -> bool:
    """Whether each tensor that the worker needs in part was read back, or hashed as handed to the loader."""
    return not worker.HasField("problem") and worker.verified + worker.verified_as_loaded >= worker.tensors


@dataclass(frozen=True, slots=True)
class Correction:
    """Key of the task that corrects a report in the ledger. Its end changes nothing: the replica's outcome stands."""

    epoch: int
    replica: str


@dataclass
class _Open:
    """A replica that does not serve the new version, by its report."""

    report: manager_pb2.UpdateReport
    min_replicas: int | None  # of the report's goal
    session: str | None = None  # of an agent that was told to install and lost; None: the outcome is known


@dataclass
class Corrections:
    """Corrects reports in memory and in the ledger."""

    state: ManagerState
    open: dict[str, _Open] = field(default_factory=dict)  # by replica; the last update that reached it, or was for it

    def take_report(
        self, report: manager_pb2.UpdateReport, min_replicas: int | None, unresolved: dict[str, str]
    ) -> None:
        """Takes the report of an update that has ended. unresolved: its replicas with an unknown outcome, with the
        session that was told to install. Earlier reports about replicas that it reached are not corrected any more."""
        for outcome in report.replicas:
            name, session = outcome.replica, unresolved.get(outcome.replica)
            open_report = self.open.get(name)
            if outcome.outcome == manager_pb2.OUTCOME_NEW_SERVING:
                self.open.pop(name, None)
            elif session is not None or open_report is None or open_report.session is None or _reached(outcome):
                self.open[name] = _Open(report, min_replicas, session)

    def take_attempt(self, outcome: manager_pb2.ReplicaOutcome) -> None:
        """Takes the outcome of an attempt. If the replica serves the version now, the report of its update is
        corrected."""
        open_report = self.open.get(outcome.replica)
        if open_report is None or outcome.outcome != manager_pb2.OUTCOME_NEW_SERVING:
            return
        if open_report.report.identity != outcome.after:
            del self.open[outcome.replica]
            return
        correction = manager_pb2.ReplicaOutcome()
        correction.CopyFrom(outcome)
        correction.fence.CopyFrom(open_report.report.fence)
        open_report.report.warnings.append(
            f"replica {outcome.replica!r} was brought to it later, by attempt {outcome.fence.epoch}"
        )
        self._correct(open_report, correction)

    def look(self, replica: Replica) -> None:
        """Corrects the report of a replica that was heard, once its outcome is known."""
        open_report = self.open.get(replica.name)
        if open_report is None or open_report.session is None:
            return
        report = open_report.report
        correction = later_outcome(replica, Fence.of(report.fence), Version.of(report.identity), open_report.session)
        if correction is not None:
            self._correct(open_report, correction)

    def _correct(self, open_report: _Open, correction: manager_pb2.ReplicaOutcome) -> None:
        report = open_report.report
        for outcome in report.replicas:
            if outcome.replica == correction.replica:
                outcome.CopyFrom(correction)
        if correction.outcome == manager_pb2.OUTCOME_NEW_SERVING:
            del self.open[correction.replica]
        else:
            open_report.session = None
        judge(report, open_report.min_replicas)
        tell_probe(report)
        task = CorrectOutcome(report, correction.replica, self.state.deadlines.report)
        self.state.run(Correction(report.fence.epoch, correction.replica), task)


def _reached(outcome: manager_pb2.ReplicaOutcome) -> bool:
    return outcome.outcome != manager_pb2.OUTCOME_NOT_REACHED
