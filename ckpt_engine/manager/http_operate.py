"""What an operator does about one replica, over HTTP: the calls to retry, hold, release and evict it in words."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import TypeAlias

from fastapi import FastAPI, Request
from pydantic import BaseModel, ConfigDict, Field

from ckpt_engine.core.problems import invalid
from ckpt_engine.machines.manager.operators import REASON_CHARACTERS
from ckpt_engine.manager.http_access import CALLER, says_json
from ckpt_engine.manager.views import OperatorHold
from ckpt_engine.security.grants import Caller
from ckpt_engine.v1 import manager_pb2

log = logging.getLogger("ckpt_engine.manager")

OperatorRequest: TypeAlias = (
    manager_pb2.RetryReplicaRequest
    | manager_pb2.HoldReplicaRequest
    | manager_pb2.ReleaseReplicaRequest
    | manager_pb2.EvictReplicaRequest
)
OperatorResponse: TypeAlias = (
    manager_pb2.RetryReplicaResponse
    | manager_pb2.HoldReplicaResponse
    | manager_pb2.ReleaseReplicaResponse
    | manager_pb2.EvictReplicaResponse
)


class Nothing(BaseModel):
    """An empty object: a body in JSON is what a page of another site cannot send unasked."""

    model_config = ConfigDict(extra="forbid")


class Eviction(BaseModel):
    """Why a replica is taken out."""

    model_config = ConfigDict(extra="forbid")

    reason: str = Field("", max_length=REASON_CHARACTERS, description="for the log of its agent")


class HoldAsked(BaseModel):
    """Why a replica is held."""

    model_config = ConfigDict(extra="forbid")

    reason: str = Field("", max_length=REASON_CHARACTERS, description="for people; empty: that of an earlier hold")


class Retried(BaseModel):
    """A replica is brought up."""

    message: str = Field(description="what happens now, for people")


class Released(BaseModel):
    """A replica is not held any more."""

    message: str = Field(description="what happens now, for people")


class Evicted(BaseModel):
    """A replica was taken out."""

    was_connected: bool = Field(description="false: its agent was not connected, so its engine stays as it is")


def add_operations(app: FastAPI, operate: Callable[[OperatorRequest], Awaitable[OperatorResponse]]) -> None:
    """Adds the routes. operate: raises CkptEngineError."""

    def check(request: Request, name: str, what: str) -> None:
        if not says_json(request.headers):
            raise invalid("send the body as application/json")
        caller: Caller = request.scope[CALLER]
        caller.require_any("operator")
        log.info("%s over HTTP replica=%r caller=%r", what, name, caller.who)

    @app.post(
        "/v1/replicas/{name:path}/retry",
        tags=["operate"],
        summary="Bring a quarantined replica to the latest version now",
        description="Attempts that failed are forgotten. Wants the grant `operator`. 409 and why, if it cannot work: "
        "it sleeps, its agent is away, or no source of that version stays sealed. As `ckpt-engine replica retry`.",
    )
    async def retry(name: str, body: Nothing, request: Request) -> Retried:
        check(request, name, "retry")
        response = await operate(manager_pb2.RetryReplicaRequest(name=name))
        assert isinstance(response, manager_pb2.RetryReplicaResponse)
        return Retried(message=response.message)

    @app.post(
        "/v1/replicas/{name:path}/hold",
        tags=["operate"],
        summary="Leave a replica as it is until it is released",
        description="Nothing brings it to what it is to serve; updates and rollbacks leave it out, and are refused if "
        "they name it. It stays held when the manager is restarted. Wants the grant `operator`. As "
        "`ckpt-engine replica hold`.",
    )
    async def hold(name: str, body: HoldAsked, request: Request) -> OperatorHold:
        check(request, name, "hold")
        response = await operate(manager_pb2.HoldReplicaRequest(name=name, reason=body.reason))
        assert isinstance(response, manager_pb2.HoldReplicaResponse)
        return OperatorHold.of(response.hold)

    @app.post(
        "/v1/replicas/{name:path}/release",
        tags=["operate"],
        summary="Let a replica that was held be brought to what it is to serve again",
        description="Wants the grant `operator`. As `ckpt-engine replica release`.",
    )
    async def release(name: str, body: Nothing, request: Request) -> Released:
        check(request, name, "release")
        response = await operate(manager_pb2.ReleaseReplicaRequest(name=name))
        assert isinstance(response, manager_pb2.ReleaseReplicaResponse)
        return Released(message=response.message)

    @app.post(
        "/v1/replicas/{name:path}/evict",
        tags=["operate"],
        summary="Take a replica out: its agent ends for good",
        description="With the agent ends an engine that it launched. The name is free then. Wants the grant "
        "`operator`. As `ckpt-engine replica evict`.",
    )
    async def evict(name: str, body: Eviction, request: Request) -> Evicted:
        check(request, name, "evict")
        response = await operate(manager_pb2.EvictReplicaRequest(name=name, reason=body.reason))
        assert isinstance(response, manager_pb2.EvictReplicaResponse)
        return Evicted(was_connected=response.was_connected)
