"""An HTTP server inside a process of ours: silent, and no owner of the process's signals or of its logging."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from ckpt_engine.core.openai_errors import error_object
from ckpt_engine.security.server import ServerSecurity

END_SECONDS = 2
"""For connections to end by themselves, once the server is told to."""

KEPT_SECONDS = 5
"""How long an idle connection is kept, unless a server says otherwise."""


NO_HTTP = (
    "somebody sent what is no HTTP to an HTTP port: trainers, replicas and commands dial the port of `ckpt-engine "
    "manager --listen`, and https:// needs a certificate"
)


class _InOurWords(logging.Filter):
    """uvicorn does not know who may have mistaken the port."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.msg == "Invalid HTTP request received.":
            record.msg = NO_HTTP
        return True


logging.getLogger("uvicorn.error").addFilter(_InOurWords())


class HttpServer(uvicorn.Server):
    """Run `serve(sockets=[...])`; it returns after `should_exit = True`."""

    def __init__(self, application: ASGIApp, security: ServerSecurity, kept_seconds: int = KEPT_SECONDS) -> None:
        """security: its certificate and authority. kept_seconds: how long an idle connection is kept."""
        super().__init__(
            uvicorn.Config(
                _of_one_length(application),
                log_config=None,
                log_level="warning",
                access_log=False,
                lifespan="off",
                ws="none",
                # With httptools heads have no limit, and callers of HTTP/1.0 get chunks that they cannot read.
                http="h11",
                timeout_graceful_shutdown=END_SECONDS,
                timeout_keep_alive=kept_seconds,
                **security.for_uvicorn(),
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals alone: they belong to the process, whose own end stops this server."""
        yield


TWO_LENGTHS = (
    "the request has both Content-Length and Transfer-Encoding, so servers may take different parts of it for its "
    "body: send one of them"
)


def _of_one_length(application: ASGIApp) -> ASGIApp:
    """Refuses what h11 lets through: a request that says its length in two ways. The connection closes, since what
    follows may be a part of its body."""

    async def one_length(scope: Scope, receive: Receive, send: Send) -> None:
        names = {name for name, _ in scope.get("headers", ())}
        if not {b"content-length", b"transfer-encoding"} <= names:
            await application(scope, receive, send)
            return
        problem = {"type": "about:blank", "title": "Bad Request", "status": 400, "detail": TWO_LENGTHS}
        error = error_object(400, "bad_request", TWO_LENGTHS)
        body = json.dumps({**problem, "reason": "bad_request", "error": error}).encode()
        headers = [
            (b"content-type", b"application/problem+json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        await send({"type": "http.response.start", "status": 400, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    return one_length
