"""Serves the timeline of an update over HTTP: the file that `ckpt-engine trace` writes, from the ledger's report."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Protocol

from fastapi import FastAPI, Path, Query, Response

from ckpt_engine.core.prediction import measured
from ckpt_engine.manager.ledger import Ledger, Record
from ckpt_engine.manager.update_records import find_update, no_report
from ckpt_engine.timeline.perfetto import trace_text
from ckpt_engine.timeline.predicted import Whereabouts, draw_with_prediction
from ckpt_engine.v1 import manager_pb2

EXAMPLE = {"displayTimeUnit": "ms", "traceEvents": [], "otherData": {"lineage": "run", "version": 3, "epoch": 7}}

Epoch = Annotated[int, Path(ge=0, lt=1 << 64)]
Version = Annotated[int, Path(ge=-(1 << 63), lt=1 << 63)]
Lineage = Annotated[str, Query(description="of which run; needed if several have this version")]


class TraceSource(Protocol):
    """The parts of a manager that timelines are made of."""

    @property
    def ledger(self) -> Ledger: ...

    def status(self) -> manager_pb2.GetStatusResponse: ...


def add_traces(app: FastAPI, manager: TraceSource) -> None:
    """Adds the routes."""
    says: dict[int | str, dict[str, Any]] = {
        200: {"description": "a file for Perfetto", "content": {"application/json": {"example": EXAMPLE}}}
    }

    @app.get(
        "/v1/updates/{epoch}/trace",
        tags=["look"],
        summary="One update as a timeline for Perfetto",
        description="JSON of the Trace Event Format: which process did what when, which bytes went where, and what the "
        "stages should have taken. 404 names the updates that are kept last; 409: the update has no report.",
        response_class=Response,
        responses=says,
    )
    async def of_epoch(epoch: Epoch) -> Response:
        return await _trace(manager, await find_update(manager.ledger, manager_pb2.GetUpdateRequest(epoch=epoch)))

    @app.get(
        "/v1/versions/{version}/trace",
        tags=["look"],
        summary="The newest update to a version as a timeline for Perfetto",
        description="As `ckpt-engine trace`. 404 names the versions that are kept last.",
        response_class=Response,
        responses=says,
    )
    async def of_version(version: Version, lineage: Lineage = "") -> Response:
        request = manager_pb2.GetUpdateRequest(lineage=lineage, version=version)
        return await _trace(manager, await find_update(manager.ledger, request))


async def _trace(manager: TraceSource, record: Record) -> Response:
    """Draws a record on a thread: a report of hundreds of workers takes a while, and the manager must keep its sessions
    alive."""
    report = record.report
    if report is None:
        raise no_report(manager.ledger, record)
    places = Whereabouts.of(manager.status())
    text = await asyncio.to_thread(lambda: trace_text(draw_with_prediction(report, measured(), places)[0]))
    name = f"update-{record.epoch}-version-{record.identity.number}.json"
    headers = {"content-disposition": f'attachment; filename="{name}"'}
    return Response(text, media_type="application/json", headers=headers)
