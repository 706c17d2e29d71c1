"""The manager's HTTP side, for people, probes and Prometheus. It only shows; `http_updates.py` and `http_operate.py`
change things.

``/`` is a page that shows all of it. ``/docs`` renders ``/openapi.json`` with scripts that the manager serves itself,
so neither needs a public network. Every error is an ``application/problem+json`` document.
"""

from __future__ import annotations

from typing import Annotated, Protocol

from fastapi import FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi_offline import FastAPIOffline
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException

from ckpt_engine.client_calls import held_versions
from ckpt_engine.core.problems import CkptEngineError, invalid, not_found
from ckpt_engine.manager.about import software_version
from ckpt_engine.manager.errors import problem_document
from ckpt_engine.manager.http_access import CALLER, PROBLEM_TYPE
from ckpt_engine.manager.http_messages import add_schemas, answer, describes
from ckpt_engine.manager.http_operate import OperatorRequest, OperatorResponse, add_operations
from ckpt_engine.manager.http_page import add_docs, add_page
from ckpt_engine.manager.http_trace import Epoch, Lineage, Version, add_traces
from ckpt_engine.manager.http_updates import add_updates
from ckpt_engine.manager.kept_views import Lines, Overviews, OverviewSource, ReplicaLists
from ckpt_engine.manager.ledger import Ledger
from ckpt_engine.manager.metrics import ManagerMetrics
from ckpt_engine.manager.publishers import Publishers
from ckpt_engine.manager.update_records import MOST, PAGE, find_update, list_updates, message, refusal_message
from ckpt_engine.v1 import manager_pb2, page_pb2, weights_pb2

Limit = Annotated[int, Query(ge=1, le=MOST)]

TAGS = [
    {"name": "look", "description": "What is there, and what happened. Everybody with a grant may."},
    {"name": "update", "description": "Bring replicas to other weights. Wants a grant `trainer/PATTERN`."},
    {"name": "operate", "description": "Help or end one replica. Wants the grant `operator`."},
    {"name": "watch", "description": "For probes and for Prometheus."},
]

ABOUT = (
    "What the manager of ckpt-engine shows and does over HTTP. The page at [/](/) shows the same to people. Where the "
    "manager asks for tokens, send `Authorization: Bearer TOKEN` with everything but `/healthz`. Errors are problem "
    "documents (RFC 9457): `detail` says what is wrong and what to do, `code` is the gRPC status. All else is the "
    "protobuf JSON of the messages in `proto/ckpt_engine/v1`: 64-bit integers are strings, bytes are base64, and "
    "messages that are not set are left out. What changes something wants `content-type: application/json`, and is "
    "refused to pages of other sites."
)


class HttpSource(OverviewSource, Protocol):
    """What the HTTP side needs of a manager; used on the manager's event loop thread."""

    @property
    def ledger(self) -> Ledger: ...

    @property
    def metrics(self) -> ManagerMetrics: ...

    @property
    def publishers(self) -> Publishers: ...

    async def operate(self, request: OperatorRequest) -> OperatorResponse: ...


def build_app(manager: HttpSource) -> FastAPI:
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
    add_schemas(app)
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


def _add_looks(app: FastAPI, manager: HttpSource) -> None:
    @app.get(
        "/healthz",
        tags=["watch"],
        summary="The manager answers",
        description="Needs no token. `degraded`: it works, and an operator should read the warnings.",
        **describes(manager_pb2.Health),
    )
    async def healthz() -> Response:
        status = manager.status(replicas=False)
        health = manager_pb2.Health(
            status="degraded" if status.warnings else "ok",
            cluster=status.fence.cluster,
            phase=status.phase,
            software_version=status.software_version,
            warnings=status.warnings,
        )
        return await answer(health)

    @app.get(
        "/readyz",
        tags=["watch"],
        summary="The manager leads",
        description="Needs no token. 503 from a manager that stands by, which names the leader.",
        **describes(manager_pb2.Health),
    )
    async def readyz() -> Response:
        return await healthz()

    @app.get(
        "/v1/status",
        tags=["look"],
        summary="All members, what each replica serves and is to serve, and what goes on",
        description="As the call `GetStatus`, and `ckpt-engine status --json`.",
        **describes(manager_pb2.GetStatusResponse),
    )
    async def status() -> Response:
        return await answer(manager.status())

    overviews = Overviews(manager)

    @app.get(
        "/v1/overview",
        tags=["look"],
        summary="For the page: everything that is there, in a line each",
        description="What goes on and what is waited for, lineages, relays and replicas. The page asks each second. "
        "It changes with the page: programs read `/v1/status`.",
        **describes(page_pb2.PageOverview),
    )
    async def overview(request: Request) -> Response:
        return Response(overviews.text(request.scope[CALLER]), media_type="application/json")


def _add_replicas(app: FastAPI, manager: HttpSource) -> None:
    lists = ReplicaLists(manager)

    @app.get(
        "/v1/replicas",
        tags=["look"],
        summary="All replicas",
        description="With their workers, GPUs and last outcomes: large, where there are many.",
        **describes(manager_pb2.ListReplicasResponse),
    )
    async def replicas() -> Response:
        return Response(await lists.text(), media_type="application/json")

    @app.get("/v1/replicas/{name:path}", tags=["look"], summary="One replica", **describes(manager_pb2.ReplicaStatus))
    async def replica(name: str) -> Response:
        by_name = {replica.name: replica for replica in manager.status().replicas}
        if name not in by_name:
            raise not_found(f"no replica is called {name!r}; there are: {', '.join(sorted(by_name)) or 'none'}")
        return await answer(by_name[name])

    @app.get(
        "/v1/versions",
        tags=["look"],
        summary="Versions that can be read or gone back to, and what replicas hold, the newest first",
        description="As `ckpt-engine version list`.",
        **describes(manager_pb2.ListVersionsResponse),
    )
    async def versions(
        lineage: Annotated[str | None, Query(description="of one run; none: of all")] = None,
    ) -> Response:
        held = [each for each in held_versions(manager.status()) if lineage in (None, each.identity.lineage)]
        return await answer(manager_pb2.ListVersionsResponse(versions=held))


def _add_history(app: FastAPI, manager: HttpSource) -> None:
    lines = Lines(manager.ledger)

    @app.get(
        "/v1/history",
        tags=["look"],
        summary="For the page: updates and refusals in a line each, newest first",
        description="Stages, outcomes counted, and percentiles of the pauses, without edges and workers. It changes "
        "with the page: programs read `/v1/updates`.",
        **describes(page_pb2.PageHistory),
    )
    async def history(limit: Limit = PAGE) -> Response:
        newest = await lines.newest(limit)
        refusals = [refusal_message(each) for each in manager.refusals.newest_first(limit)]
        return await answer(page_pb2.PageHistory(updates=newest, refused=refusals))

    @app.get(
        "/v1/updates",
        tags=["look"],
        summary="The history of updates, newest first",
        description="Whole reports, a page at a time. The first page also has the updates that were refused since the "
        "manager started.",
        **describes(manager_pb2.ListUpdatesResponse),
    )
    async def updates(
        before: Annotated[int | None, Query(ge=0, lt=1 << 64, description="only epochs below this one")] = None,
        limit: Limit = PAGE,
    ) -> Response:
        request = manager_pb2.ListUpdatesRequest(before=before, limit=limit)
        return await answer(await list_updates(manager.ledger, manager.refusals, request))

    @app.get(
        "/v1/updates/{epoch}",
        tags=["look"],
        summary="One update, by its epoch",
        description="Per replica its outcome, stages, pause, workers and edges: which bytes came whence, how and why. "
        "404 names the updates that are kept last.",
        **describes(manager_pb2.UpdateRecord),
    )
    async def update(epoch: Epoch) -> Response:
        return await answer(message(await find_update(manager.ledger, manager_pb2.GetUpdateRequest(epoch=epoch))))

    @app.get(
        "/v1/versions/{version}/update",
        tags=["look"],
        summary="The newest update to a version",
        description="The same as by its epoch, which it says. 404 names the versions that are kept last.",
        **describes(manager_pb2.UpdateRecord),
    )
    async def update_to(version: Version, lineage: Lineage = "") -> Response:
        request = manager_pb2.GetUpdateRequest(lineage=lineage, version=version)
        return await answer(message(await find_update(manager.ledger, request)))


def _answer_errors(app: FastAPI) -> None:
    def refusal(problem: weights_pb2.Problem, status: int | None = None) -> JSONResponse:
        document = problem_document(problem)
        if status is not None:
            document["status"] = status
        return JSONResponse(document, status_code=document["status"], media_type=PROBLEM_TYPE)

    @app.exception_handler(CkptEngineError)
    async def known(request: Request, error: CkptEngineError) -> JSONResponse:
        return refusal(error.problem)

    @app.exception_handler(RequestValidationError)
    async def malformed(request: Request, error: RequestValidationError) -> JSONResponse:
        words = "; ".join(f"{'.'.join(str(part) for part in item['loc'])}: {item['msg']}" for item in error.errors())
        return refusal(invalid(words).problem, 422)

    @app.exception_handler(HTTPException)
    async def other(request: Request, error: HTTPException) -> JSONResponse:
        make = not_found if error.status_code == 404 else invalid
        return refusal(make(f"{request.method} {request.url.path}: {error.detail}").problem, error.status_code)
