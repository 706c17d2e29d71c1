"""What JSON shows of updates and refusals; see `views.py`."""

from __future__ import annotations

from pydantic import BaseModel, Field

from ckpt_engine.manager.ledger import Record
from ckpt_engine.manager.refusals import Refusal
from ckpt_engine.manager.relay_views import RelayReport
from ckpt_engine.manager.views import Identity, Problem, ReplicaOutcome
from ckpt_engine.report import stage_seconds
from ckpt_engine.v1 import manager_pb2, weights_pb2


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
    relays: list[RelayReport] = Field(description="what relays did before anything was paused")
    prefetch: str = Field(description="why relays were filled or not")
    collective: str = Field(description="who was updated by a collective, and why; else empty")

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
            relays=[RelayReport.of(relay) for relay in report.relays],
            prefetch=report.prefetch,
            collective=report.collective,
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
            identity=Identity.of(record.identity.message()),
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
