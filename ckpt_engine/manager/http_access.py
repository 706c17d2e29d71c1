"""What every HTTP request to the manager must pass: the host that it was meant for, and whose token it shows.

The first is checked where only this machine can connect: a web page on it could otherwise have a browser read the
manager under a name of its own that resolves to 127.0.0.1 (DNS rebinding).
"""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from ckpt_engine.addresses import is_loopback
from ckpt_engine.core.problems import CkptEngineError, forbidden
from ckpt_engine.manager.access import Access
from ckpt_engine.manager.errors import problem_document

OPEN = ("/healthz",)
"""Routes for probes, which have no token."""

PROBLEM_TYPE = "application/problem+json"


class HttpAccess:
    """ASGI middleware. loopback: whether the server listens on loopback only."""

    def __init__(self, app: ASGIApp, access: Access, loopback: bool) -> None:
        self._app = app
        self._access = access
        self._loopback = loopback

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            try:
                if self._loopback and not is_loopback(_host(headers.get("host", ""))):
                    raise forbidden(f"this manager is not {headers.get('host')!r}; it serves its own machine only")
                if scope["path"] not in OPEN:
                    self._access.of_request(headers.get("authorization", ""))
            except CkptEngineError as error:
                document = problem_document(error.problem)
                answer = JSONResponse(document, document["status"], media_type=PROBLEM_TYPE)
                if document["status"] == 401:
                    answer.headers["www-authenticate"] = "Bearer"
                await answer(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _host(header: str) -> str:
    """Without the port, and without brackets."""
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.partition(":")[0]
