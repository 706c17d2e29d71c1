"""The parts of a collective: its plan, and a trainer rank's task.

events.py exports these names too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from ckpt_engine.v1 import manager_pb2, weights_pb2

WorkerKey: TypeAlias = tuple[str, int]
"""A worker: its replica's name and its rank."""


@dataclass(frozen=True)
class CollectivePlan:
    """The collective of some replicas' workers and all sources."""

    members: tuple[str | WorkerKey, ...]  # by their ranks in the communicator, source ids first; the first is the lead
    plan: manager_pb2.BlobRef  # from which each member makes the same schedule
    meeting: bytes = field(repr=False)  # where the lead is found; opaque, and it carries a key


@dataclass(frozen=True)
class RunPart:
    """Fetch the collective's plan, join its communicator, vote, and after *go* send what the schedule says. Result:
    PartTaken.

    Ends by itself within `seconds`, also in the middle of sending, and without the manager. Runs on the trainer's own
    thread, which waits in update_weights. A rank that does not wait there, or not in the call in which it sealed, votes
    *no*.
    """

    epoch: int
    sealed: int  # the fill epoch in which the weights were sealed
    collective: manager_pb2.Collective = field(repr=False)
    member: int  # its index among the collective's members
    seconds: float


@dataclass(frozen=True)
class PartTaken:
    """The result of RunPart."""

    problem: weights_pb2.Problem | None = None  # why it sent nothing, or not all
    blamed: tuple[str, ...] = ()  # only from the lead, see Ballot.blamed
