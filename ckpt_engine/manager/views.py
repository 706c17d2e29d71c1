"""What the HTTP side shows: JSON models of the wire's messages, each made by its ``of`` from one of them.

Digests and boot ids appear as hexadecimal digits, enumerations as lower-case words, unset messages as null.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel, Field

from ckpt_engine.core.enums import enum_word
from ckpt_engine.machines.manager.status import replica_state
from ckpt_engine.report import gpu_uuid, stage_seconds
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
            code=enum_word(weights_pb2.Problem.Code, problem.code).upper(),
            message=problem.message,
            tensors=list(problem.tensors),
            ranks=list(problem.ranks),
            replica=problem.replica,
        )


class Gpu(BaseModel):
    """A GPU that holds weights of a process."""

    uuid: str = Field(description="as nvidia-smi -L names it: GPU-...")
    name: str
    pci: str

    @classmethod
    def of(cls, gpu: weights_pb2.Gpu) -> Gpu:
        return cls(uuid=gpu_uuid(gpu.uuid), name=gpu.name, pci=gpu.pci)


class Worker(BaseModel):
    """What a worker's state word says, and which GPUs it has told."""

    rank: int
    pid: int
    node: int
    boot_id: str
    state: str
    epoch: int
    identity: Identity | None
    gpus: list[Gpu] = Field(description="once its engine's loader was recorded; none: it has weights on no GPU")

    @classmethod
    def of(cls, worker: manager_pb2.WorkerStatus, gpus: Sequence[weights_pb2.Gpu] = ()) -> Worker:
        return cls(
            rank=worker.rank,
            pid=worker.pid,
            node=worker.node,
            boot_id=worker.boot_id.hex(),
            state=enum_word(manager_pb2.WorkerState, worker.state),
            epoch=worker.epoch,
            identity=Identity.of(worker.identity) if worker.HasField("identity") else None,
            gpus=[Gpu.of(gpu) for gpu in gpus],
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
    operator_hold: bool = Field(description="it was left out since an operator holds it, and does not count")
    cannot_load: bool = Field(description="its engine can never load what is published, and it does not count")
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
            outcome=enum_word(manager_pb2.Outcome, outcome.outcome),
            problem=_problem(outcome),
            operator_hold=outcome.operator_hold,
            cannot_load=outcome.cannot_load,
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


class Drift(BaseModel):
    """That a replica does not hold what it is to serve."""

    reason: str
    seconds: float = Field(description="for so long, as far as this manager knows")
    next_attempt_seconds: float | None = Field(description="null: it waits for something that has no time")

    @classmethod
    def of(cls, drift: manager_pb2.Drift) -> Drift:
        after = drift.next_attempt_seconds if drift.HasField("next_attempt_seconds") else None
        return cls(reason=drift.reason, seconds=drift.seconds, next_attempt_seconds=after)


class OperatorHold(BaseModel):
    """That an operator holds a replica: nothing brings it to what it is to serve until it is released."""

    since: float = Field(description="when it was held first, seconds since 1970")
    reason: str = Field(description="for people; may be empty")

    @classmethod
    def of(cls, hold: manager_pb2.OperatorHold) -> OperatorHold:
        return cls(since=hold.since, reason=hold.reason)


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
    engine_check: str = Field(description="how an engine's version that no test has run was checked; else empty")
    identity: Identity | None = Field(description="what it holds; set when all workers agree")
    desired: Identity | None = Field(description="what it is to serve; null: nothing, until an update is for it")
    drift: Drift | None = Field(description="null: it holds what it is to serve")
    hold: OperatorHold | None = Field(description="null: no operator holds it")
    workers: list[Worker]
    last_outcome: ReplicaOutcome | None
    unfit: Problem | None = Field(description="why it could not take the version that it was asked to take last")
    unopened: list[str] = Field(description="what its workers could not open, so that they read it another way")

    @classmethod
    def of(cls, replica: manager_pb2.ReplicaStatus) -> Replica:
        gpus = {each.rank: each.gpus for each in replica.gpus}
        return cls(
            name=replica.name,
            pool=replica.pool,
            state=replica_state(replica),
            engine=replica.engine.kind,
            engine_version=replica.engine.version,
            url=replica.engine.url,
            mode=enum_word(manager_pb2.Mode, replica.mode),
            host=replica.host.name,
            closed_reason=replica.closed_reason,
            label_problem=replica.label_problem,
            engine_check=replica.engine_check,
            identity=Identity.of(replica.identity) if replica.HasField("identity") else None,
            desired=Identity.of(replica.desired) if replica.HasField("desired") else None,
            drift=Drift.of(replica.drift) if replica.HasField("drift") else None,
            hold=OperatorHold.of(replica.hold) if replica.HasField("hold") else None,
            workers=[Worker.of(worker, gpus.get(worker.rank, ())) for worker in replica.workers],
            last_outcome=ReplicaOutcome.of(replica.last_outcome) if replica.HasField("last_outcome") else None,
            unfit=Problem.of(replica.unfit) if replica.HasField("unfit") else None,
            unopened=[
                f"worker {each.worker_rank} could not open {each.source} over {each.transport}: {each.reason}"
                for each in replica.unopened
            ],
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
