"""An update from a directory, asked for over HTTP."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, cast

from fastapi import FastAPI, Request
from pydantic import BaseModel, ConfigDict, Field

from ckpt_engine.core.problems import internal, invalid
from ckpt_engine.manager.http_access import CALLER, says_json
from ckpt_engine.manager.publishers import Publishers, lineage_of
from ckpt_engine.options import PauseMode, Prefetch, Until, UpdateOptions, options_message
from ckpt_engine.report import UpdateReport
from ckpt_engine.security.grants import Caller
from ckpt_engine.v1 import manager_pb2

log = logging.getLogger("ckpt_engine.manager")


class FromDirectory(BaseModel):
    """What an update from a directory is asked for with. As the call `UpdateFromDirectory`, in words."""

    model_config = ConfigDict(extra="forbid")

    directory: str = Field(description="absolute path on the manager's host, and on those of the replicas")
    lineage: str = ""
    version: int | None = Field(None, ge=0, lt=1 << 63)
    pause_mode: PauseMode | None = None
    timeout: float | None = Field(None, gt=0, description="of the whole update, seconds")
    min_replicas: int | None = Field(None, ge=0, lt=1 << 31)
    replicas: list[str] = []
    pool: str = ""
    prefetch: Prefetch = "auto"
    until: Until = "installed"
    check_finite: bool = False
    dry_run: bool = Field(False, description="only tell what an update would do")

    def request(self) -> manager_pb2.UpdateFromDirectoryRequest:
        """The same as a message."""
        return manager_pb2.UpdateFromDirectoryRequest(
            directory=self.directory,
            lineage=self.lineage,
            version=self.version,
            check_finite=self.check_finite,
            options=options_message(cast(UpdateOptions, self.model_dump(include=set(UpdateOptions.__annotations__)))),
        )


def add_updates(app: FastAPI, publishers: Callable[[], Publishers]) -> None:
    """Adds the route."""

    @app.post(
        "/v1/updates/from-directory",
        tags=["update"],
        summary="Bring replicas to a checkpoint directory; answers when it is over",
        description="Of safetensors files below a root that `serve --allow-directory` names. As `ckpt-engine update "
        "--from-directory`.",
    )
    async def update(body: FromDirectory, request: Request) -> dict[str, Any]:
        if not says_json(request.headers):
            raise invalid("send the body as application/json")
        message = body.request()
        caller: Caller = request.scope[CALLER]
        caller.require("trainer", lineage_of(message))
        log.info("update from directory=%r lineage=%r caller=%r", message.directory, message.lineage, caller.who)
        async for event in publishers().update(message):
            if event.HasField("report"):
                return UpdateReport(event.report).to_dict()
        raise internal("the update ended without a report")
