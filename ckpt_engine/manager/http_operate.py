"""An operator's calls over HTTP: retry, hold, release and evict a replica; approve, pause, resume and undo a
deployment. The body is the call's request without what the path has: the name, or the action."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import TypeAlias

from fastapi import FastAPI, Request, Response

from ckpt_engine.core.problems import invalid
from ckpt_engine.manager.http_access import CALLER
from ckpt_engine.manager.http_messages import answer, body, describes
from ckpt_engine.options import DEPLOY_ACTIONS, DeployAction
from ckpt_engine.security.grants import Caller
from ckpt_engine.v1 import manager_pb2

log = logging.getLogger("ckpt_engine.manager")

OperatorRequest: TypeAlias = (
    manager_pb2.RetryReplicaRequest
    | manager_pb2.HoldReplicaRequest
    | manager_pb2.ReleaseReplicaRequest
    | manager_pb2.EvictReplicaRequest
    | manager_pb2.SteerDeploymentRequest
)
OperatorResponse: TypeAlias = (
    manager_pb2.RetryReplicaResponse
    | manager_pb2.HoldReplicaResponse
    | manager_pb2.ReleaseReplicaResponse
    | manager_pb2.EvictReplicaResponse
    | manager_pb2.Deployment
)
ReplicaRequest: TypeAlias = (
    manager_pb2.RetryReplicaRequest
    | manager_pb2.HoldReplicaRequest
    | manager_pb2.ReleaseReplicaRequest
    | manager_pb2.EvictReplicaRequest
)


def add_operations(app: FastAPI, operate: Callable[[OperatorRequest], Awaitable[OperatorResponse]]) -> None:
    """Adds the routes. operate: raises CkptEngineError."""

    async def operated(request: Request, name: str, kind: type[ReplicaRequest]) -> Response:
        message = await body(request, kind)
        if message.name not in ("", name):
            raise invalid(f"the path is of replica {name!r} and the body names {message.name!r}: leave name out")
        message.name = name
        caller: Caller = request.scope[CALLER]
        caller.require_any("operator")
        what = message.DESCRIPTOR.name.removesuffix("ReplicaRequest").lower()
        log.info("%s over HTTP replica=%r caller=%r", what, name, caller.name)
        return await answer(await operate(message))

    @app.post(
        "/v1/replicas/{name:path}/retry",
        tags=["operate"],
        summary="Bring a quarantined replica to the latest version now",
        description="Attempts that failed are forgotten. Wants the grant `operator`. 409 and why, if it cannot work: "
        "it sleeps, its agent is away, or no source of that version stays sealed. As `ckpt-engine replica retry`.",
        **describes(manager_pb2.RetryReplicaResponse, manager_pb2.RetryReplicaRequest),
    )
    async def retry(name: str, request: Request) -> Response:
        return await operated(request, name, manager_pb2.RetryReplicaRequest)

    @app.post(
        "/v1/replicas/{name:path}/hold",
        tags=["operate"],
        summary="Leave a replica as it is until it is released",
        description="Nothing brings it to what it is to serve; updates and rollbacks leave it out, and are refused if "
        "they name it. It stays held when the manager is restarted. Wants the grant `operator`. As "
        "`ckpt-engine replica hold`.",
        **describes(manager_pb2.HoldReplicaResponse, manager_pb2.HoldReplicaRequest),
    )
    async def hold(name: str, request: Request) -> Response:
        return await operated(request, name, manager_pb2.HoldReplicaRequest)

    @app.post(
        "/v1/replicas/{name:path}/release",
        tags=["operate"],
        summary="Let a replica that was held be brought to what it is to serve again",
        description="Wants the grant `operator`. As `ckpt-engine replica release`.",
        **describes(manager_pb2.ReleaseReplicaResponse, manager_pb2.ReleaseReplicaRequest),
    )
    async def release(name: str, request: Request) -> Response:
        return await operated(request, name, manager_pb2.ReleaseReplicaRequest)

    @app.post(
        "/v1/replicas/{name:path}/evict",
        tags=["operate"],
        summary="Take a replica out: its agent ends for good",
        description="With the agent ends an engine that it launched. The name is free then. Wants the grant "
        "`operator`. As `ckpt-engine replica evict`.",
        **describes(manager_pb2.EvictReplicaResponse, manager_pb2.EvictReplicaRequest),
    )
    async def evict(name: str, request: Request) -> Response:
        return await operated(request, name, manager_pb2.EvictReplicaRequest)

    @app.post(
        "/v1/deployments/{action}",
        tags=["operate"],
        summary="Decide about an undecided deployment: approve, pause, resume or undo",
        description="The body names the deployment by its number; without one the only undecided one is meant. Wants "
        "the grant `operator`. 409 and why, if it is decided, or if its wave goes on, so that there is nothing to "
        "approve yet. Deployments are in `/v1/status`. As `ckpt-engine deploy`.",
        **describes(manager_pb2.Deployment, manager_pb2.SteerDeploymentRequest),
    )
    async def steer(action: DeployAction, request: Request) -> Response:
        message = await body(request, manager_pb2.SteerDeploymentRequest)
        if message.action not in (0, DEPLOY_ACTIONS[action]):
            raise invalid(f"the path says {action!r}, and the body another action: leave the action out")
        message.action = DEPLOY_ACTIONS[action]
        caller: Caller = request.scope[CALLER]
        caller.require_any("operator")
        log.info("deploy action=%s over HTTP deployment=%d caller=%r", action, message.number, caller.name)
        return await answer(await operate(message))
