"""What collectives are made of: their plan, and a trainer rank's part.

Their names can be taken from events.py too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from ckpt_engine.v1 import manager_pb2, weights_pb2

WorkerKey: TypeAlias = tuple[str, int]
"""A worker: its replica's name and its rank."""


@dataclass(frozen=True)
class CollectivePlan:
    """The collective of some replicas' workers and all sources. members: in the order of their ranks in the
    communicator, sources (their ids) first; the first one is the lead. plan: a blob, from which each member makes the
    same schedule. meeting: where the lead is found, opaque."""

    members: tuple[str | WorkerKey, ...]
    plan: manager_pb2.BlobRef
    meeting: bytes = field(repr=False)  # it carries a key


@dataclass(frozen=True)
class RunPart:
    """Fetch the collective's plan, join its communicator, vote, and after *go* send what the schedule says. Result:
    PartTaken. Ends by itself within `seconds`, also in the middle, and whatever became of the manager. On the trainer's
    own thread, which waits in update_weights; a rank that is not there, or not in the call in which it sealed, votes
    *no*. sealed: that fill epoch.
    """

    epoch: int
    sealed: int
    collective: manager_pb2.Collective = field(repr=False)
    member: int
    seconds: float


@dataclass(frozen=True)
class PartTaken:
    """What RunPart results in. problem: why it sent nothing, or not all. blamed: of the lead, see Ballot.blamed."""

    problem: weights_pb2.Problem | None = None
    blamed: tuple[str, ...] = ()
