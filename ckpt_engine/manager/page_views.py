"""What the page at `/` shows all the time: everything that is there in a line each, and every update in one.

Small on purpose: it is asked for each second, of clusters with hundreds of replicas. What one update did to each worker
is `update_views.py`'s.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from pydantic import BaseModel, Field

from ckpt_engine.core.enums import enum_word
from ckpt_engine.core.version import Version
from ckpt_engine.machines.events import OperatorHold
from ckpt_engine.machines.manager.members import Replica
from ckpt_engine.machines.manager.reconcile import Drift
from ckpt_engine.machines.manager.status import Watched
from ckpt_engine.manager.ledger import Record
from ckpt_engine.manager.relay_views import Progress
from ckpt_engine.manager.update_views import Refused
from ckpt_engine.manager.views import Identity, Problem
from ckpt_engine.report import stage_seconds
from ckpt_engine.security.grants import Caller
from ckpt_engine.v1 import manager_pb2

PROBLEMS_SHOWN = 4
"""Replicas of an update whose problem its line names."""

WAITED_SHOWN = 16
"""Of those who are waited for; what is beyond is counted."""

_STATES = {
    manager_pb2.REPLICA_STATE_SERVING: "serving",
    manager_pb2.REPLICA_STATE_DRAINING: "updating",
    manager_pb2.REPLICA_STATE_ASLEEP: "asleep",
    manager_pb2.REPLICA_STATE_CLOSED: "closed",
    manager_pb2.REPLICA_STATE_AWAY: "away",
}


class Asker(BaseModel):
    """Who asks. operates: may retry, hold and evict replicas."""

    who: str
    operates: bool

    @classmethod
    def of(cls, caller: Caller) -> Asker:
        return cls(who=caller.who, operates=caller.may_any("operator"))


class ReplicaLine(BaseModel):
    """A replica: what it serves, and if not, why."""

    name: str
    pool: str
    state: str = Field(description="serving, updating, asleep, quarantined, closed or away")
    reason: str = Field(description="why it does not serve; empty if it does")
    drift: str = Field(description="why it does not hold what it is to serve; empty if it does")
    hold: str = Field(description="that an operator holds it, since when and why; empty: none does")
    unfit: str = Field(description="why it is left out of updates: it could not take what was published last")
    label_problem: str = Field(description="why the version that its engine itself names may be wrong")
    identity: Identity | None = Field(description="set when all workers agree")
    lag: int | None = Field(description="versions behind the last one sealed of the same run; null: it holds none")
    engine: str
    mode: str
    host: str
    workers: int
    pause_seconds: float | None = Field(description="of its last update")

    @classmethod
    def of(
        cls,
        replica: Replica,
        seen: manager_pb2.WatchedReplica,
        latest: Version | None,
        drift: Drift | None,
        hold: OperatorHold | None,
    ) -> ReplicaLine:
        outcome, unfit = replica.last_outcome, replica.why_unfit()
        identity = seen.identity if seen.HasField("identity") else None
        state = _STATES.get(seen.state, "closed")
        left = outcome is not None and outcome.outcome == manager_pb2.OUTCOME_QUARANTINED
        if state == "closed" and left and drift is not None:
            state = "quarantined"
        known = identity is not None and latest is not None and latest.lineage == identity.lineage
        return cls(
            name=replica.name,
            pool=replica.pool,
            state=state,
            reason=seen.reason,
            drift="" if drift is None else drift.reason,
            hold="" if hold is None else hold.told(replica.name),
            unfit="" if unfit is None else unfit.message,
            label_problem=seen.label_problem,
            identity=None if identity is None else Identity.of(identity),
            lag=latest.number - identity.version if known and latest and identity else None,
            engine=f"{seen.engine} {seen.engine_version}".strip(),
            mode="" if not replica.mode else enum_word(manager_pb2.Mode, replica.mode),
            host=replica.host.name,
            workers=len(replica.workers),
            pause_seconds=None if outcome is None else outcome.pause_seconds,
        )


class RelayLine(BaseModel):
    """A relay, or another holder: what it holds, and how its last filling ended."""

    kind: str
    name: str
    connected: bool
    host: str
    held: list[Identity]
    memory_bytes: int | None
    progress: Progress | None
    slow: str = Field(description="why it passes nothing on; empty if it is not slow")
    filled_version: int | None
    filled_bytes: int
    fill_seconds: float
    problem: str = Field(description="why its last filling failed")

    @classmethod
    def of(cls, holder: manager_pb2.HolderStatus) -> RelayLine:
        last = holder.last_filled if holder.HasField("last_filled") else manager_pb2.RelayFilled()
        return cls(
            kind=holder.kind,
            name=holder.name,
            connected=holder.connected,
            host=holder.description,
            held=[Identity.of(each) for each in holder.held],
            memory_bytes=holder.filling.memory_bytes if holder.HasField("filling") else None,
            progress=Progress.of(holder),
            slow=holder.slow,
            filled_version=last.identity.version if holder.HasField("last_filled") else None,
            filled_bytes=last.bytes,
            fill_seconds=last.fill_seconds,
            problem=last.problem.message,
        )


class RunLine(BaseModel):
    """The trainer ranks of one lineage, counted."""

    lineage: str
    world_size: int
    connected: int
    published: int
    latest: Identity | None = Field(description="the last version sealed")

    @classmethod
    def all_of(cls, trainers: Iterable[manager_pb2.TrainerStatus], watched: Watched) -> list[RunLine]:
        ranks: dict[str, list[manager_pb2.TrainerStatus]] = {lineage: [] for lineage in watched.latest}
        for trainer in trainers:
            ranks.setdefault(trainer.lineage, []).append(trainer)
        return [
            cls(
                lineage=lineage,
                world_size=max((each.world_size for each in those), default=0),
                connected=sum(each.connected for each in those),
                published=sum(each.published for each in those),
                latest=Identity.of(watched.latest[lineage].message()) if lineage in watched.latest else None,
            )
            for lineage, those in sorted(ranks.items())
        ]


class Everything(BaseModel):
    """Everything that is there, in a line each; the same for all who ask."""

    cluster: str
    epoch: int
    software_version: str
    manager: str = Field(description="where trainers and replicas dial, host:port")
    warnings: list[str]
    phase: str = Field(description="what the manager does; idle: nothing")
    waiting_for: list[str] = Field(description="whom the running update waits for; beyond 16 they are counted")
    refused: int = Field(description="updates refused since the manager started")
    runs: list[RunLine]
    relays: list[RelayLine]
    replicas: list[ReplicaLine]

    @classmethod
    def of(
        cls,
        status: manager_pb2.GetStatusResponse,
        replicas: Mapping[str, Replica],
        watched: Watched,
        drifts: Mapping[str, Drift],
        holds: Mapping[str, OperatorHold],
        manager: str,
        refused: int,
    ) -> Everything:
        """status: without replicas, which are read where they are: to copy them takes longer than all the rest."""
        waited = list(status.waiting_for)
        beyond = [f"and {len(waited) - WAITED_SHOWN} more"] if len(waited) > WAITED_SHOWN else []
        lines = []
        for name, seen in watched.replicas.items():
            latest = watched.latest.get(seen.identity.lineage)
            lines.append(ReplicaLine.of(replicas[name], seen, latest, drifts.get(name), holds.get(name)))
        return cls(
            cluster=status.fence.cluster,
            epoch=status.fence.epoch,
            software_version=status.software_version,
            manager=manager,
            warnings=list(status.warnings),
            phase=status.phase,
            waiting_for=[*waited[:WAITED_SHOWN], *beyond],
            refused=refused,
            runs=RunLine.all_of(status.trainers, watched),
            relays=[RelayLine.of(holder) for holder in status.holders],
            replicas=lines,
        )


class Overview(Everything):
    """What is there, and who asks. At most half a second old."""

    asker: Asker
    now: float = Field(description="the manager's clock, Unix seconds")


class Pauses(BaseModel):
    """How long the replicas of one update produced no token, seconds."""

    replicas: int
    p50: float
    p99: float
    longest: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Pauses | None:
        ordered = sorted(seconds)
        if not ordered:
            return None
        return cls(
            replicas=len(ordered), p50=percentile(ordered, 0.5), p99=percentile(ordered, 0.99), longest=ordered[-1]
        )


class UpdateLine(BaseModel):
    """An update that reached the point of installing. ok and what follows: null or empty until it has a report."""

    epoch: int
    identity: Identity
    time: float = Field(description="when the intent was stored, Unix seconds")
    ok: bool | None
    verified: bool
    seconds: float
    bytes: int
    stages: dict[str, float]
    outcomes: dict[str, int] = Field(description="how many replicas ended so")
    pauses: Pauses | None = Field(description="of the replicas that were paused")
    problems: list[Problem] = Field(description="of the first 4 replicas that do not serve the new weights")
    warnings: list[str]

    @classmethod
    def of(cls, record: Record) -> UpdateLine:
        report = record.report or manager_pb2.UpdateReport()
        outcomes: dict[str, int] = {}
        for replica in report.replicas:
            name = enum_word(manager_pb2.Outcome, replica.outcome)
            outcomes[name] = outcomes.get(name, 0) + 1
        failed = [replica for replica in report.replicas if replica.HasField("problem")]
        return cls(
            epoch=record.epoch,
            identity=Identity.of(record.identity.message()),
            time=record.time,
            ok=None if record.report is None else report.ok,
            verified=report.verified,
            seconds=report.seconds,
            bytes=report.bytes,
            stages=stage_seconds(report.stages),
            outcomes=outcomes,
            pauses=Pauses.of([replica.pause_seconds for replica in report.replicas if replica.pause_seconds > 0]),
            problems=[
                Problem.of(replica.problem).model_copy(update={"replica": replica.replica})
                for replica in failed[:PROBLEMS_SHOWN]
            ],
            warnings=list(report.warnings),
        )


class History(BaseModel):
    """Updates and refusals, newest first."""

    updates: list[UpdateLine]
    refused: list[Refused] = Field(description="the last ones since the manager started")


def percentile(ordered: Sequence[float], part: float) -> float:
    """The smallest of these ascending numbers that at least this part of them does not exceed."""
    return ordered[max(0, math.ceil(part * len(ordered)) - 1)]
