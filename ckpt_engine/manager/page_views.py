"""Makes the messages of the page at `/` (page.proto) from the manager's state: each thing in a line, and each update in
a line. It decides what a line says, but not how the page shows it.

Messages are small on purpose: the page asks each second, also in clusters with hundreds of replicas.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from ckpt_engine.core.probe import ProbeFinding, answer_words
from ckpt_engine.core.scrub import scrub_words
from ckpt_engine.core.version import Version
from ckpt_engine.machines.events import OperatorHold
from ckpt_engine.machines.manager.members import Replica
from ckpt_engine.machines.manager.reconcile import Drift
from ckpt_engine.machines.manager.status import Watched
from ckpt_engine.manager.ledger import Record
from ckpt_engine.security.grants import Caller
from ckpt_engine.v1 import manager_pb2, page_pb2

PROBLEMS_SHOWN = 4
"""Replicas of which an update's line names the problem."""

WAITED_SHOWN = 16
"""Most members named among those that are waited for; the rest is counted."""


def asker_of(caller: Caller) -> page_pb2.PageAsker:
    """The caller, as the page greets it."""
    return page_pb2.PageAsker(name=caller.name, operates=caller.may_any("operator"))


def overview_of(status: manager_pb2.GetStatusResponse, manager: str, refused: int) -> page_pb2.PageOverview:
    """The overview without replicas and holders, the same for every caller. status: without replicas. manager: where
    members dial. refused: how many updates were refused."""
    waited = list(status.waiting_for)
    more = [f"and {len(waited) - WAITED_SHOWN} more"] if len(waited) > WAITED_SHOWN else []
    return page_pb2.PageOverview(
        cluster=status.fence.cluster,
        epoch=status.fence.epoch,
        software_version=status.software_version,
        manager=manager,
        warnings=status.warnings,
        phase=status.phase,
        waiting_for=[*waited[:WAITED_SHOWN], *more],
        refused=refused,
        lineages=status.lineages,
    )


def replicas_of(
    replicas: Mapping[str, Replica],
    watched: Watched,
    drifts: Mapping[str, Drift],
    holds: Mapping[str, OperatorHold],
) -> list[page_pb2.PageReplica]:
    """The replicas in a line each. They are read in place: copying them would take longer than all the rest."""
    return [
        _replica(
            replicas[name],
            watched_replica,
            watched.latest.get(watched_replica.identity.lineage),
            drifts.get(name),
            holds.get(name),
        )
        for name, watched_replica in watched.replicas.items()
    ]


def _replica(
    replica: Replica,
    watched_replica: manager_pb2.WatchedReplica,
    latest: Version | None,
    drift: Drift | None,
    hold: OperatorHold | None,
) -> page_pb2.PageReplica:
    outcome, unfit = replica.last_outcome, replica.why_unfit()
    was_quarantined = outcome is not None and outcome.outcome == manager_pb2.OUTCOME_QUARANTINED
    line = page_pb2.PageReplica(
        watched=watched_replica,
        quarantined=watched_replica.state == manager_pb2.REPLICA_STATE_CLOSED and was_quarantined and drift is not None,
        drift="" if drift is None else drift.reason,
        hold="" if hold is None else hold.describe(replica.name),
        unfit="" if unfit is None else unfit.message,
        scrub=scrub_words(replica.scrubs),
        probe=answer_words(outcome.probe) if outcome is not None and outcome.HasField("probe") else "",
        host=replica.host.name,
        workers=len(replica.workers),
        pause_seconds=None if outcome is None else outcome.pause_seconds,
    )
    if watched_replica.HasField("identity") and latest is not None:
        line.lag = latest.number - watched_replica.identity.version
    return line


def update_line(record: Record) -> page_pb2.PageUpdate:
    """An update in a line."""
    report = record.report or manager_pb2.UpdateReport()
    failures = [replica for replica in report.replicas if replica.HasField("problem")]
    line = page_pb2.PageUpdate(
        epoch=record.epoch,
        identity=record.identity.message(),
        time=record.time,
        verified=report.verified,
        seconds=report.seconds,
        bytes=report.bytes,
        stages=report.stages,
        outcomes=[
            page_pb2.PageOutcome(outcome=outcome, replicas=count)
            for outcome, count in Counter(each.outcome for each in report.replicas).items()
        ],
        pauses=pauses_of([replica.pause_seconds for replica in report.replicas if replica.pause_seconds > 0]),
        problems=[replica.problem for replica in failures[:PROBLEMS_SHOWN]],
        warnings=[*(str(ProbeFinding.of(each)) for each in report.probe), *report.warnings],
    )
    if record.report is not None:
        line.ok = report.ok
    for problem, replica in zip(line.problems, failures, strict=False):
        problem.replica = replica.replica
    return line


def pauses_of(seconds: Sequence[float]) -> page_pb2.PagePauses | None:
    """Percentiles of the pauses of one update's replicas; None: no replica was paused."""
    ordered = sorted(seconds)
    if not ordered:
        return None
    return page_pb2.PagePauses(
        replicas=len(ordered), p50=percentile(ordered, 0.5), p99=percentile(ordered, 0.99), longest=ordered[-1]
    )


def percentile(ordered: Sequence[float], part: float) -> float:
    """The smallest of these ascending numbers such that at least this share of them is not above it."""
    return ordered[max(0, math.ceil(part * len(ordered)) - 1)]
