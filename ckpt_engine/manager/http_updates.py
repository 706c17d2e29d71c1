"""Serves updates from a directory over HTTP."""

from __future__ import annotations

import logging
from collections.abc import Callable

from fastapi import FastAPI, Request, Response

from ckpt_engine.core.problems import internal
from ckpt_engine.manager.http_access import CALLER
from ckpt_engine.manager.http_messages import answer, body, describes
from ckpt_engine.manager.publishers import Publishers, lineage_of
from ckpt_engine.security.grants import Caller
from ckpt_engine.v1 import manager_pb2

log = logging.getLogger("ckpt_engine.manager")


def add_updates(app: FastAPI, publishers: Callable[[], Publishers]) -> None:
    """Adds the route."""

    @app.post(
        "/v1/updates/from-directory",
        tags=["update"],
        summary="Bring replicas to a checkpoint directory; answers when it is over",
        description="Of safetensors files below a root that `manager --allow-directory` names. As `ckpt-engine update "
        "--from-directory`.",
        **describes(manager_pb2.UpdateReport, manager_pb2.UpdateFromDirectoryRequest),
    )
    async def update(request: Request) -> Response:
        message = await body(request, manager_pb2.UpdateFromDirectoryRequest)
        caller: Caller = request.scope[CALLER]
        caller.require("trainer", lineage_of(message))
        log.info("update from directory=%r lineage=%r caller=%r", message.directory, message.lineage, caller.name)
        async for event in publishers().update(message):
            if event.HasField("report"):
                return await answer(event.report)
        raise internal("the update ended without a report")
