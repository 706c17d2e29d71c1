"""What the HTTP side shows: JSON models of the wire's messages, each made by its ``of`` from one of them.

Digests and boot ids appear as hexadecimal digits, enumerations as lower-case words, unset messages as null.
"""

from __future__ import annotations

from pydantic import BaseModel, Field

from ckpt_engine.machines.manager.status import replica_state
from ckpt_engine.manager.ledger import Record
from ckpt_engine.manager.refusals import Refusal
from ckpt_engine.report import stage_seconds
from ckpt_engine.v1 import manager_pb2, weights_pb2


class Identity(BaseModel):
    """A weight version."""

    lineage: str
    version: int
    root: str = Field(description="SHA-256 over every tensor's name, dtype, shape and digest, hexadecimal")

    @classmethod
    def of(cls, identity: weights_pb2.Identity) -> Identity:
        return cls(lineage=identity.lineage, version=identity.version, root=identity.root.hex())


class Problem(BaseModel):
    """Why something was refused or failed."""

    code: str
    message: str
    tensors: list[str] = []
    ranks: list[int] = []
    replica: str = ""

    @classmethod
    def of(cls, problem: weights_pb2.Problem) -> Problem:
        return cls(
            code=weights_pb2.Problem.Code.Name(problem.code),
            message=problem.message,
            tensors=list(problem.tensors),
            ranks=list(problem.ranks),
            replica=problem.replica,
        )


class Worker(BaseModel):
    """What a worker's state word says."""

    rank: int
    pid: int
    node: int
    boot_id: str
    state: str
    epoch: int
    identity: Identity | None

    @classmethod
    def of(cls, worker: manager_pb2.WorkerStatus) -> Worker:
        return cls(
            rank=worker.rank,
            pid=worker.pid,
            node=worker.node,
            boot_id=worker.boot_id.hex(),
            state=manager_pb2.WorkerState.Name(worker.state).lower(),
            epoch=worker.epoch,
            identity=Identity.of(worker.identity) if worker.HasField("identity") else None,
        )


class Edge(BaseModel):
    """Bytes that one worker read from one source, by which transport and why that one."""

    source: str
    source_rank: int | None
    worker_rank: int
    transport: str
    reason: str
    bytes: int


class WorkerReport(BaseModel):
    """One worker's part in an install."""

    rank: int
    bytes: int
    tensors: int
    verified: int
    verified_as_loaded: int
    by_loader: list[str]
    copies: int
    transfer_seconds: float
    install_seconds: float
    verify_seconds: float
    problem: Problem | None


class ReplicaOutcome(BaseModel):
    """How an update ended for one replica."""

    replica: str
    epoch: int
    outcome: str = Field(description="new_serving, old_serving, quarantined or not_reached")
    problem: Problem | None
    label_problem: str
    before: Identity | None
    after: Identity | None
    bytes: int
    pause_seconds: float
    sync_seconds: float
    stages: dict[str, float]
    edges: list[Edge]
    workers: list[WorkerReport]

    @classmethod
    def of(cls, outcome: manager_pb2.ReplicaOutcome) -> ReplicaOutcome:
        return cls(
            replica=outcome.replica,
            epoch=outcome.fence.epoch,
            outcome=manager_pb2.Outcome.Name(outcome.outcome).lower(),
            problem=_problem(outcome),
            label_problem=outcome.label_problem,
            before=Identity.of(outcome.before) if outcome.HasField("before") else None,
            after=Identity.of(outcome.after) if outcome.HasField("after") else None,
            bytes=outcome.bytes,
            pause_seconds=outcome.pause_seconds,
            sync_seconds=outcome.sync_seconds,
            stages=stage_seconds(outcome.stages),
            edges=[
                Edge(
                    source=edge.source,
                    source_rank=edge.source_rank if edge.HasField("source_rank") else None,
                    worker_rank=edge.worker_rank,
                    transport=edge.transport,
                    reason=edge.reason,
                    bytes=edge.bytes,
                )
                for edge in outcome.edges
            ],
            workers=[
                WorkerReport(
                    rank=worker.rank,
                    bytes=worker.bytes,
                    tensors=worker.tensors,
                    verified=worker.verified,
                    verified_as_loaded=worker.verified_as_loaded,
                    by_loader=list(worker.by_loader),
                    copies=worker.copies,
                    transfer_seconds=worker.transfer_seconds,
                    install_seconds=worker.install_seconds,
                    verify_seconds=worker.verify_seconds,
                    problem=_problem(worker),
                )
                for worker in outcome.workers
            ],
        )


class Replica(BaseModel):
    """A rollout replica as the manager sees it."""

    name: str
    pool: str = Field(description="the replicas that it is updated with; empty: the pool without a name")
    state: str = Field(description="serving, asleep, closed or disconnected")
    engine: str
    engine_version: str
    url: str
    mode: str
    host: str
    closed_reason: str
    label_problem: str = Field(description="why the version that the engine itself names may be wrong; else empty")
    identity: Identity | None = Field(description="set when all workers agree")
    workers: list[Worker]
    last_outcome: ReplicaOutcome | None
    unfit: Problem | None = Field(description="why it could not take the version that it was asked to take last")

    @classmethod
    def of(cls, replica: manager_pb2.ReplicaStatus) -> Replica:
        return cls(
            name=replica.name,
            pool=replica.pool,
            state=replica_state(replica),
            engine=replica.engine.kind,
            engine_version=replica.engine.version,
            url=replica.engine.url,
            mode=manager_pb2.Mode.Name(replica.mode).lower(),
            host=replica.host.name,
            closed_reason=replica.closed_reason,
            label_problem=replica.label_problem,
            identity=Identity.of(replica.identity) if replica.HasField("identity") else None,
            workers=[Worker.of(worker) for worker in replica.workers],
            last_outcome=ReplicaOutcome.of(replica.last_outcome) if replica.HasField("last_outcome") else None,
            unfit=Problem.of(replica.unfit) if replica.HasField("unfit") else None,
        )


class Copied(BaseModel):
    """Tensors that were copied to seal them, for one reason."""

    reason: str = Field(description="the end of a sentence that begins with the tensor")
    tensors: int = Field(description="of all these ranks together, as are the bytes")
    bytes: int
    names: list[str] = Field(description="the first 16 of the first rank")
    rank: int = Field(description="the first one that has such tensors")
    ranks: int = Field(description="how many have")

    @classmethod
    def of(cls, copied: weights_pb2.CopiedTensors) -> Copied:
        return cls(
            reason=copied.reason,
            tensors=copied.tensors,
            bytes=copied.bytes,
            names=list(copied.names),
            rank=copied.rank,
            ranks=copied.ranks,
        )


class Report(BaseModel):
    """How an update ended."""

    ok: bool = Field(description="every replica serves the new weights, or as many as the caller named")
    verified: bool
    seconds: float
    bytes: int
    tensors: int
    source_copies: int
    stages: dict[str, float]
    replicas: list[ReplicaOutcome] = Field(description="all that were registered, or that the caller named")
    warnings: list[str]
    copied: list[Copied]

    @classmethod
    def of(cls, report: manager_pb2.UpdateReport) -> Report:
        return cls(
            ok=report.ok,
            verified=report.verified,
            seconds=report.seconds,
            bytes=report.bytes,
            tensors=report.tensors,
            source_copies=report.source_copies,
            stages=stage_seconds(report.stages),
            replicas=[ReplicaOutcome.of(outcome) for outcome in report.replicas],
            warnings=list(report.warnings),
            copied=[Copied.of(copied) for copied in report.copied],
        )


class Update(BaseModel):
    """An update that reached the point of installing."""

    epoch: int
    identity: Identity
    time: float = Field(description="when the intent was stored, Unix seconds")
    report: Report | None = Field(description="null while it runs, or when the manager ended in the middle")

    @classmethod
    def of(cls, record: Record) -> Update:
        return cls(
            epoch=record.epoch,
            identity=Identity.of(record.identity),
            time=record.time,
            report=None if record.report is None else Report.of(record.report),
        )


class Refused(BaseModel):
    """An update that was refused before any replica was touched; it has no epoch of its own."""

    lineage: str
    version: int | None = Field(description="null: the lineage's next one was asked for")
    time: float = Field(description="when it was refused, Unix seconds")
    problem: Problem

    @classmethod
    def of(cls, refusal: Refusal) -> Refused:
        return cls(
            lineage=refusal.lineage,
            version=refusal.version,
            time=refusal.time,
            problem=Problem.of(refusal.problem),
        )


class UpdatePage(BaseModel):
    """Updates, newest first."""

    updates: list[Update]
    next_before: int | None = Field(description="pass it as `before` to get the next page; null on the last one")
    refused: list[Refused] = Field(
        description="the last ones since the manager started, newest first; on the first page only"
    )


class ReplicaList(BaseModel):
    """All replicas that registered since the manager started, and have neither said goodbye nor been evicted."""

    replicas: list[Replica]


class Health(BaseModel):
    """The manager answers. status: degraded if there are warnings, sentences for an operator; otherwise ok."""

    status: str
    cluster: str
    phase: str
    software_version: str
    warnings: list[str]


def _problem(message: manager_pb2.ReplicaOutcome | manager_pb2.WorkerReport) -> Problem | None:
    return Problem.of(message.problem) if message.HasField("problem") else None
