"""The timeline of an update over HTTP: the file that `ckpt-engine trace` writes, made from the ledger's report."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Protocol

from fastapi import FastAPI, Query, Response

from ckpt_engine.core.prediction import MEASURED
from ckpt_engine.core.problems import aborted, invalid, not_found, precondition
from ckpt_engine.machines.manager.waits import unknown_version
from ckpt_engine.manager.ledger import Ledger, Record
from ckpt_engine.timeline.perfetto import trace_text
from ckpt_engine.timeline.predicted import Whereabouts, drawn
from ckpt_engine.v1 import manager_pb2

NAMED = 4
"""Updates that are named to whoever asks for one that is not kept."""

EPOCHS = 1 << 62
"""Epochs and versions are below it; the ledger could not be asked for greater ones."""

EXAMPLE = {"displayTimeUnit": "ms", "traceEvents": [], "otherData": {"lineage": "run", "version": 3, "epoch": 7}}


class Traced(Protocol):
    """What timelines are made of."""

    @property
    def ledger(self) -> Ledger: ...

    def status(self) -> manager_pb2.GetStatusResponse: ...


def add_traces(app: FastAPI, manager: Traced) -> None:
    """Adds the routes."""
    says: dict[int | str, dict[str, Any]] = {
        200: {"description": "a file for Perfetto", "content": {"application/json": {"example": EXAMPLE}}}
    }

    @app.get(
        "/v1/updates/{epoch}/trace",
        tags=["look"],
        summary="One update as a timeline for Perfetto",
        description="JSON of the Trace Event Format: who did what when, which bytes went where, and what the stages "
        "should have taken. 404 names the updates that are kept last; 409: the update has no report.",
        response_class=Response,
        responses=says,
    )
    async def of_epoch(epoch: int) -> Response:
        record = await manager.ledger.record(epoch) if 0 <= epoch < EPOCHS else None
        if record is None:
            last = [_named(each) for each in await manager.ledger.history(None, NAMED)]
            kept = f"the last ones are {'; '.join(last)}" if last else "none is, since none has come so far"
            raise not_found(f"no update with epoch {epoch} is kept: {kept}")
        return await _trace(manager, record)

    @app.get(
        "/v1/versions/{version}/trace",
        tags=["look"],
        summary="The last update to a version as a timeline for Perfetto",
        description="As `ckpt-engine trace`. 404 names the versions that are kept last.",
        response_class=Response,
        responses=says,
    )
    async def of_version(
        version: int,
        lineage: Annotated[str, Query(description="of which run; needed if several have this version")] = "",
    ) -> Response:
        return await _trace(manager, await _last_to(manager.ledger, version, lineage))


async def _last_to(ledger: Ledger, version: int, lineage: str) -> Record:
    """The last update to a version that was not for a late replica. lineage: empty: the only one that has it."""
    kept = await ledger.identities()
    having = [lineage] if lineage else sorted({each.lineage for each in kept if each.number == version})
    if len(having) > 1:
        raise invalid(f"version {version} is one of several lineages: add ?lineage= with one of {', '.join(having)}")
    unknown = []
    for each in having or list(dict.fromkeys(each.lineage for each in reversed(kept)))[:NAMED]:
        found = await ledger.last_update(each, version if 0 <= version < EPOCHS else -1)
        record = None if found.epoch is None else await ledger.record(found.epoch)
        if record is not None:
            return record
        unknown.append(unknown_version((each, version), found.last).message)
    raise not_found("; ".join(unknown) or f"no update to version {version} is kept, nor to any other one")


async def _trace(manager: Traced, record: Record) -> Response:
    """Drawn on a thread: a report of hundreds of workers takes a while, and the manager has sessions to keep."""
    report = record.report
    if report is None:
        if record.epoch <= manager.ledger.epoch:
            raise aborted(f"the manager ended during {_named(record)}, so there is no report of it to draw")
        raise precondition(f"{_named(record)} has no report yet: ask again when it is over")
    places = Whereabouts.of(manager.status())
    text = await asyncio.to_thread(lambda: trace_text(drawn(report, MEASURED, places)[0]))
    name = f"update-{record.epoch}-version-{record.identity.number}.json"
    headers = {"content-disposition": f'attachment; filename="{name}"'}
    return Response(text, media_type="application/json", headers=headers)


def _named(record: Record) -> str:
    return f"epoch {record.epoch} (version {record.identity.number} of lineage {record.identity.lineage!r})"
