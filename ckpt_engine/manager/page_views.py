"""What the page at `/` asks for (page.proto), made of what the manager knows: everything that is there in a line each,
and every update in one. It decides what a line says; how the page shows it is the page's.

Small on purpose: it is asked for each second, of clusters with hundreds of replicas.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from ckpt_engine.core.version import Version
from ckpt_engine.machines.events import OperatorHold
from ckpt_engine.machines.manager.members import Replica
from ckpt_engine.machines.manager.reconcile import Drift
from ckpt_engine.machines.manager.status import Watched
from ckpt_engine.manager.ledger import Record
from ckpt_engine.security.grants import Caller
from ckpt_engine.v1 import manager_pb2, page_pb2

PROBLEMS_SHOWN = 4
"""Replicas of an update whose problem its line names."""

WAITED_SHOWN = 16
"""Of those who are waited for; what is beyond is counted."""


def asker_of(caller: Caller) -> page_pb2.PageAsker:
    """The caller, as the page greets it."""
    return page_pb2.PageAsker(name=caller.who, operates=caller.may_any("operator"))


def overview_of(status: manager_pb2.GetStatusResponse, manager: str, refused: int) -> page_pb2.PageOverview:
    """Everything that is there but replicas and holders, the same for every caller. status: without replicas. manager:
    where members dial. refused: updates."""
    waited = list(status.waiting_for)
    beyond = [f"and {len(waited) - WAITED_SHOWN} more"] if len(waited) > WAITED_SHOWN else []
    return page_pb2.PageOverview(
        cluster=status.fence.cluster,
        epoch=status.fence.epoch,
        software_version=status.software_version,
        manager=manager,
        warnings=status.warnings,
        phase=status.phase,
        waiting_for=[*waited[:WAITED_SHOWN], *beyond],
        refused=refused,
        lineages=status.lineages,
    )


def replicas_of(
    replicas: Mapping[str, Replica],
    watched: Watched,
    drifts: Mapping[str, Drift],
    holds: Mapping[str, OperatorHold],
) -> list[page_pb2.PageReplica]:
    """The replicas in a line each. They are read where they are: to copy them takes longer than all the rest."""
    return [
        _replica(replicas[name], seen, watched.latest.get(seen.identity.lineage), drifts.get(name), holds.get(name))
        for name, seen in watched.replicas.items()
    ]


def _replica(
    replica: Replica,
    seen: manager_pb2.WatchedReplica,
    latest: Version | None,
    drift: Drift | None,
    hold: OperatorHold | None,
) -> page_pb2.PageReplica:
    outcome, unfit = replica.last_outcome, replica.why_unfit()
    left = outcome is not None and outcome.outcome == manager_pb2.OUTCOME_QUARANTINED
    line = page_pb2.PageReplica(
        watched=seen,
        quarantined=seen.state == manager_pb2.REPLICA_STATE_CLOSED and left and drift is not None,
        drift="" if drift is None else drift.reason,
        hold="" if hold is None else hold.describe(replica.name),
        unfit="" if unfit is None else unfit.message,
        host=replica.host.name,
        workers=len(replica.workers),
        pause_seconds=None if outcome is None else outcome.pause_seconds,
    )
    if seen.HasField("identity") and latest is not None:
        line.lag = latest.number - seen.identity.version
    return line


def update_line(record: Record) -> page_pb2.PageUpdate:
    """An update in a line."""
    report = record.report or manager_pb2.UpdateReport()
    failed = [replica for replica in report.replicas if replica.HasField("problem")]
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
        problems=[replica.problem for replica in failed[:PROBLEMS_SHOWN]],
        warnings=report.warnings,
    )
    if record.report is not None:
        line.ok = report.ok
    for problem, replica in zip(line.problems, failed, strict=False):
        problem.replica = replica.replica
    return line


def pauses_of(seconds: Sequence[float]) -> page_pb2.PagePauses | None:
    """How long the replicas of one update produced no token; None: none was paused."""
    ordered = sorted(seconds)
    if not ordered:
        return None
    return page_pb2.PagePauses(
        replicas=len(ordered), p50=percentile(ordered, 0.5), p99=percentile(ordered, 0.99), longest=ordered[-1]
    )


def percentile(ordered: Sequence[float], part: float) -> float:
    """The smallest of these ascending numbers that at least this part of them does not exceed."""
    return ordered[max(0, math.ceil(part * len(ordered)) - 1)]
