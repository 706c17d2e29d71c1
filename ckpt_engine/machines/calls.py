"""Calls that reach the manager and that its machine answers.

events.py exports these names too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NewType, TypeAlias

from ckpt_engine.v1 import manager_pb2

Call = NewType("Call", str)
"""Names one call at the manager that its machine answers; made by the shell, never used again."""


@dataclass(frozen=True)
class UpdateCall:
    """A trainer rank called UpdateWeights."""

    call: Call
    request: manager_pb2.UpdateWeightsRequest


@dataclass(frozen=True)
class RollbackCall:
    """An operator called Rollback."""

    call: Call
    request: manager_pb2.RollbackRequest


@dataclass(frozen=True)
class WaitCall:
    """A client called WaitForUpdate."""

    call: Call
    request: manager_pb2.WaitForUpdateRequest


@dataclass(frozen=True)
class SleepCall:
    call: Call
    request: manager_pb2.SleepRequest


@dataclass(frozen=True)
class WakeCall:
    call: Call
    request: manager_pb2.WakeRequest


HoldRequest: TypeAlias = manager_pb2.HoldReplicaRequest | manager_pb2.ReleaseReplicaRequest
MemberRequest: TypeAlias = (
    manager_pb2.RetryReplicaRequest | manager_pb2.EvictReplicaRequest | manager_pb2.EvictLineageRequest
)
OperatorRequest: TypeAlias = (
    MemberRequest | HoldRequest | manager_pb2.ForgetLineageRequest | manager_pb2.SteerDeploymentRequest
)
OperatorResponse: TypeAlias = (
    manager_pb2.RetryReplicaResponse
    | manager_pb2.EvictReplicaResponse
    | manager_pb2.EvictLineageResponse
    | manager_pb2.HoldReplicaResponse
    | manager_pb2.ReleaseReplicaResponse
    | manager_pb2.ForgetLineageResponse
    | manager_pb2.Deployment
)


@dataclass(frozen=True)
class OperatorCall:
    call: Call
    request: OperatorRequest


@dataclass(frozen=True)
class CallCancelled:
    """The caller disconnected, or its own deadline passed, before `FinishCall`."""

    call: Call
