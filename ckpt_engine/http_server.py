"""An HTTP server inside one of our processes. It logs warnings only, and leaves the process's signal handlers and
logging configuration as they are."""

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
"""Seconds for connections to end by themselves when the server stops."""

KEPT_SECONDS = 5
"""Default time that an idle connection is kept."""


NO_HTTP = (
    "a request to an HTTP port was not HTTP: trainers, replicas and commands dial the port of `ckpt-engine "
    "manager --listen`, and https:// needs a certificate"
)


class _InOurWords(logging.Filter):
    """Replaces uvicorn's message about a request that is not HTTP: ours says which port may be meant."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.msg == "Invalid HTTP request received.":
            record.msg = NO_HTTP
        return True


logging.getLogger("uvicorn.error").addFilter(_InOurWords())


class HttpServer(uvicorn.Server):
    """An HTTP server. `serve(sockets=[...])` returns after `should_exit = True`."""

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
        """Leaves signals alone: the process handles them, and stops this server at its end."""
        yield


TWO_LENGTHS = (
    "the request has both Content-Length and Transfer-Encoding, so servers may take different parts of it for its "
    "body: send one of them"
)


def _of_one_length(application: ASGIApp) -> ASGIApp:
    """Refuses a request with two kinds of length, which h11 accepts. The connection closes, since the next bytes may
    belong to its body."""

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
