"""What JSON shows of relays and other holders of sealed versions; see `views.py`."""

from __future__ import annotations

from pydantic import BaseModel, Field

from ckpt_engine.manager.views import Identity, Problem
from ckpt_engine.v1 import manager_pb2


class Filled(BaseModel):
    """What bringing one version into a relay brought."""

    epoch: int
    identity: Identity
    problem: Problem | None = Field(description="why it does not hold the version")
    bytes: int
    missing: list[Problem]
    missing_cells: int
    faults: list[Problem] = Field(description="of sources, also where another one served instead")
    brought: dict[str, int] = Field(description="bytes by the source that they came from")
    again: int
    overruled: int
    wait_seconds: float
    fill_seconds: float

    @classmethod
    def of(cls, filled: manager_pb2.RelayFilled) -> Filled:
        return cls(
            epoch=filled.fence.epoch,
            identity=Identity.of(filled.identity),
            problem=Problem.of(filled.problem) if filled.HasField("problem") else None,
            bytes=filled.bytes,
            missing=[Problem.of(each) for each in filled.missing],
            missing_cells=filled.missing_cells,
            faults=[Problem.of(each) for each in filled.faults],
            brought={each.source: each.bytes for each in filled.brought},
            again=filled.again,
            overruled=filled.overruled,
            wait_seconds=filled.wait_seconds,
            fill_seconds=filled.fill_seconds,
        )


class RelayReport(BaseModel):
    """What one relay did in an update."""

    relay: str
    filled: Filled | None = Field(description="what it brought; null if it did not answer")
    replicas: list[str] = Field(description="that were to be installed from it")
    relays: list[str] = Field(description="that were to be filled from it")
    upstream: list[str] = Field(description="relays that it was to be filled from; none: the trainers' memory")

    @classmethod
    def of(cls, report: manager_pb2.RelayReport) -> RelayReport:
        return cls(
            relay=report.relay,
            filled=Filled.of(report.filled) if report.HasField("filled") else None,
            replicas=list(report.replicas),
            relays=list(report.relays),
            upstream=list(report.upstream),
        )


class Progress(BaseModel):
    """How far a filling is."""

    epoch: int
    bytes_done: int
    bytes_total: int

    @classmethod
    def of(cls, holder: manager_pb2.HolderStatus) -> Progress | None:
        """The progress of what a holder is filled with now; None: nothing is."""
        if not holder.HasField("progress"):
            return None
        told = holder.progress
        return cls(epoch=told.fence.epoch, bytes_done=told.bytes_done, bytes_total=told.bytes_total)


class Holder(BaseModel):
    """Who holds sealed versions and is no trainer rank. memory_bytes: null for one that cannot be filled. slow: why it
    passes nothing on; empty if it is not slow."""

    kind: str
    name: str
    connected: bool
    host: str
    held: list[Identity]
    memory_bytes: int | None
    everything: bool
    gpu_context_bytes: int
    last_filled: Filled | None
    progress: Progress | None
    slow: str

    @classmethod
    def of(cls, holder: manager_pb2.HolderStatus) -> Holder:
        return cls(
            kind=holder.kind,
            name=holder.name,
            connected=holder.connected,
            host=holder.description,
            held=[Identity.of(each) for each in holder.held],
            memory_bytes=holder.filling.memory_bytes if holder.HasField("filling") else None,
            everything=holder.filling.everything,
            gpu_context_bytes=holder.filling.gpu_context_bytes,
            last_filled=Filled.of(holder.last_filled) if holder.HasField("last_filled") else None,
            progress=Progress.of(holder),
            slow=holder.slow,
        )
