"""The manager's HTTP side, for people, probes and Prometheus. It shows; only `http_updates.py` and `http_operate.py`
change anything.

``/`` is a page that shows all of it. ``/docs`` draws ``/openapi.json`` with scripts that the manager serves itself, so
neither needs a public network. Every error is an ``application/problem+json`` document.
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
from ckpt_engine.manager import page_views, update_views, views
from ckpt_engine.manager.about import software_version
from ckpt_engine.manager.errors import problem_document
from ckpt_engine.manager.http_access import CALLER, PROBLEM_TYPE
from ckpt_engine.manager.http_operate import OperatorRequest, OperatorResponse, add_operations
from ckpt_engine.manager.http_page import add_docs, add_page
from ckpt_engine.manager.http_trace import add_traces
from ckpt_engine.manager.http_updates import add_updates
from ckpt_engine.manager.kept_views import Lines, Overviews, ReplicaLists, Seen
from ckpt_engine.manager.ledger import Ledger
from ckpt_engine.manager.metrics import Metrics
from ckpt_engine.manager.publishers import Publishers
from ckpt_engine.v1 import weights_pb2

TAGS = [
    {"name": "look", "description": "What is there, and what happened. Everybody with a grant may."},
    {"name": "update", "description": "Bring replicas to other weights. Wants a grant `trainer/PATTERN`."},
    {"name": "operate", "description": "Help or end one replica. Wants the grant `operator`."},
    {"name": "watch", "description": "For probes and for Prometheus."},
]

ABOUT = (
    "What the manager of ckpt-engine shows and does over HTTP. The page at [/](/) shows the same to people. Where the "
    "manager asks for tokens, send `Authorization: Bearer TOKEN` with everything but `/healthz`. Errors are problem "
    "documents (RFC 9457): `detail` says what is wrong and what to do, `code` is the gRPC status. What changes "
    "something wants `content-type: application/json`, and is refused to pages of other sites."
)


class Shown(Seen, Protocol):
    """What the HTTP side needs of a manager; all of it is used on the manager's event loop thread."""

    @property
    def ledger(self) -> Ledger: ...

    @property
    def metrics(self) -> Metrics: ...

    @property
    def publishers(self) -> Publishers: ...

    async def operate(self, request: OperatorRequest) -> OperatorResponse: ...


def build_app(manager: Shown) -> FastAPI:
    """The ASGI application. It must run on the manager's event loop."""
    app = FastAPIOffline(
        title="ckpt-engine manager",
        version=software_version(),
        description=ABOUT,
        openapi_tags=TAGS,
        docs_url=None,
        redoc_url=None,
    )
    _answer_errors(app)
    add_page(app)
    add_docs(app)
    _add_looks(app, manager)
    _add_replicas(app, manager)
    _add_history(app, manager)
    add_traces(app, manager)
    add_updates(app, lambda: manager.publishers)
    add_operations(app, manager.operate)

    @app.get("/metrics", tags=["watch"], summary="Prometheus metrics", response_class=Response)
    async def metrics() -> Response:
        return Response(manager.metrics.exposition(), media_type=CONTENT_TYPE_LATEST)

    return app


def _add_looks(app: FastAPI, manager: Shown) -> None:
    @app.get(
        "/healthz",
        tags=["watch"],
        summary="The manager answers",
        description="Needs no token. `degraded`: it works, and an operator should read the warnings.",
    )
    async def healthz() -> views.Health:
        status = manager.status(replicas=False)
        return views.Health(
            status="degraded" if status.warnings else "ok",
            cluster=status.fence.cluster,
            phase=status.phase,
            software_version=status.software_version,
            warnings=list(status.warnings),
        )

    overviews = Overviews(manager)

    @app.get(
        "/v1/overview",
        tags=["look"],
        response_model=page_views.Overview,
        summary="Everything that is there, in a line each",
        description="What goes on and who is waited for, runs, relays and replicas. The page asks for it each second.",
    )
    async def overview(request: Request) -> Response:
        return Response(overviews.told(request.scope[CALLER]), media_type="application/json")


def _add_replicas(app: FastAPI, manager: Shown) -> None:
    lists = ReplicaLists(manager)

    @app.get(
        "/v1/replicas",
        tags=["look"],
        response_model=views.ReplicaList,
        summary="All replicas",
        description="With their workers, GPUs and last outcomes: large, where there are many.",
    )
    async def replicas() -> Response:
        return Response(lists.told(), media_type="application/json")

    @app.get("/v1/replicas/{name:path}", tags=["look"], summary="One replica")
    async def replica(name: str) -> views.Replica:
        known = {replica.name: replica for replica in manager.status().replicas}
        if name not in known:
            raise not_found(f"no replica is called {name!r}; there are: {', '.join(sorted(known)) or 'none'}")
        return views.Replica.of(known[name])


def _add_history(app: FastAPI, manager: Shown) -> None:
    lines = Lines(manager.ledger)

    @app.get(
        "/v1/history",
        tags=["look"],
        summary="Updates and refusals in a line each, newest first",
        description="Stages, outcomes counted, and percentiles of the pauses, without edges and workers.",
    )
    async def history(limit: Annotated[int, Query(ge=1, le=200)] = 50) -> page_views.History:
        return page_views.History(
            updates=await lines.newest(limit),
            refused=[update_views.Refused.of(refusal) for refusal in manager.refusals.newest_first(limit)],
        )

    @app.get(
        "/v1/updates",
        tags=["look"],
        summary="The history of updates, newest first",
        description="Whole reports, a page at a time. The first page also has the updates that were refused since the "
        "manager started.",
    )
    async def updates(
        before: Annotated[int | None, Query(ge=0, le=1 << 62, description="only epochs below this one")] = None,
        limit: Annotated[int, Query(ge=1, le=200)] = 50,
    ) -> update_views.UpdatePage:
        records = await manager.ledger.history(before, limit + 1)
        shown = [update_views.Update.of(record) for record in records[:limit]]
        refused = [] if before is not None else manager.refusals.newest_first(limit)
        return update_views.UpdatePage(
            updates=shown,
            next_before=shown[-1].epoch if len(records) > limit else None,
            refused=[update_views.Refused.of(refusal) for refusal in refused],
        )

    @app.get(
        "/v1/updates/{epoch}",
        tags=["look"],
        summary="One update",
        description="Per replica its outcome, stages, pause, workers and edges: which bytes came whence, how and why.",
    )
    async def update(epoch: int) -> update_views.Update:
        record = await manager.ledger.record(epoch) if 0 <= epoch < 1 << 62 else None
        if record is None:
            raise not_found(f"no update with epoch {epoch} reached the point of installing")
        return update_views.Update.of(record)


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
