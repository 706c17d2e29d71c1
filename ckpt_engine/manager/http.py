"""The manager's HTTP side, for people, probes and Prometheus. It only shows; nothing here changes anything.

``/docs`` draws ``/openapi.json`` with scripts that the manager serves itself, so it needs no public network. Every
error is an ``application/problem+json`` document.
"""

from __future__ import annotations

from typing import Annotated, Protocol

from fastapi import FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi_offline import FastAPIOffline
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException

from ckpt_engine.core.problems import CkptEngineError, invalid, not_found
from ckpt_engine.manager import views
from ckpt_engine.manager.about import software_version
from ckpt_engine.manager.errors import problem_document
from ckpt_engine.manager.ledger import Ledger
from ckpt_engine.manager.metrics import Metrics
from ckpt_engine.manager.refusals import Refusals
from ckpt_engine.v1 import manager_pb2, weights_pb2

PROBLEM_TYPE = "application/problem+json"


class Shown(Protocol):
    """What the HTTP side needs of a manager; all of it is used on the manager's event loop thread."""

    @property
    def ledger(self) -> Ledger: ...

    @property
    def metrics(self) -> Metrics: ...

    @property
    def refusals(self) -> Refusals: ...

    def status(self) -> manager_pb2.GetStatusResponse: ...


def build_app(manager: Shown) -> FastAPI:
    """The ASGI application. It must run on the manager's event loop."""
    app = FastAPIOffline(title="ckpt-engine manager", version=software_version(), redoc_url=None)
    _answer_errors(app)

    @app.get("/healthz", summary="The manager answers")
    async def healthz() -> views.Health:
        status = manager.status()
        return views.Health(
            status="degraded" if status.warnings else "ok",
            cluster=status.fence.cluster,
            phase=status.phase,
            software_version=status.software_version,
            warnings=list(status.warnings),
        )

    @app.get("/v1/replicas", summary="All replicas")
    async def replicas() -> views.ReplicaList:
        return views.ReplicaList(replicas=[views.Replica.of(replica) for replica in manager.status().replicas])

    @app.get("/v1/replicas/{name}", summary="One replica")
    async def replica(name: str) -> views.Replica:
        known = {replica.name: replica for replica in manager.status().replicas}
        if name not in known:
            raise not_found(f"no replica is called {name!r}; there are: {', '.join(sorted(known)) or 'none'}")
        return views.Replica.of(known[name])

    @app.get("/v1/updates", summary="The history of updates, newest first")
    async def updates(
        before: Annotated[int | None, Query(ge=0, le=1 << 62, description="only epochs below this one")] = None,
        limit: Annotated[int, Query(ge=1, le=200)] = 50,
    ) -> views.UpdatePage:
        records = await manager.ledger.history(before, limit + 1)
        shown = [views.Update.of(record) for record in records[:limit]]
        refused = [] if before is not None else manager.refusals.newest_first(limit)
        return views.UpdatePage(
            updates=shown,
            next_before=shown[-1].epoch if len(records) > limit else None,
            refused=[views.Refused.of(refusal) for refusal in refused],
        )

    @app.get("/v1/updates/{epoch}", summary="One update")
    async def update(epoch: int) -> views.Update:
        record = await manager.ledger.record(epoch) if 0 <= epoch < 1 << 62 else None
        if record is None:
            raise not_found(f"no update with epoch {epoch} reached the point of installing")
        return views.Update.of(record)

    @app.get("/metrics", summary="Prometheus metrics", response_class=Response)
    async def metrics() -> Response:
        return Response(manager.metrics.exposition(), media_type=CONTENT_TYPE_LATEST)

    return app


def _answer_errors(app: FastAPI) -> None:
    def answer(problem: weights_pb2.Problem, status: int | None = None) -> JSONResponse:
        document = problem_document(problem)
        if status is not None:
            document["status"] = status
        return JSONResponse(document, status_code=document["status"], media_type=PROBLEM_TYPE)

    @app.exception_handler(CkptEngineError)
    async def known(request: Request, error: CkptEngineError) -> JSONResponse:
        return answer(error.problem)

    @app.exception_handler(RequestValidationError)
    async def malformed(request: Request, error: RequestValidationError) -> JSONResponse:
        words = "; ".join(f"{'.'.join(str(part) for part in item['loc'])}: {item['msg']}" for item in error.errors())
        return answer(invalid(words).problem, 422)

    @app.exception_handler(HTTPException)
    async def other(request: Request, error: HTTPException) -> JSONResponse:
        make = not_found if error.status_code == 404 else invalid
        return answer(make(f"{request.method} {request.url.path}: {error.detail}").problem, error.status_code)
