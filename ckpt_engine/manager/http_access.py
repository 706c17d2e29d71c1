"""Checks every HTTP request to the manager: the host that it was meant for, the page that it came from, its token and
its size. Also sets the headers by which every answer restricts browsers."""

from __future__ import annotations

import socket
from collections.abc import Collection
from pathlib import Path

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.manager.access import Access
from ckpt_engine.manager.browsers import READING, check_host, check_origin, names_of_host
from ckpt_engine.manager.errors import problem_document
from ckpt_engine.manager.http_page import FILES

PROBED = frozenset({"/healthz", "/readyz", "/metrics"})
"""Routes of probes and of Prometheus, which use whatever name their configuration has."""

OPEN = frozenset({"/healthz", "/readyz", *FILES})
"""Routes that need no token: for probes, which have none, and for the page, which holds no facts."""

CALLER = "ckpt_engine.caller"
"""The key of a request's scope that holds its `Caller`, for routes that need a grant."""

BODY_BYTES = 64 * 1024
"""The most bytes of a request's body."""

PROBLEM_TYPE = "application/problem+json"

ALWAYS = {
    "content-security-policy": "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}
"""Headers of every answer, unless it has its own."""


class HttpAccess:
    """ASGI middleware that lets requests through to the application, or refuses them."""

    def __init__(self, app: ASGIApp, access: Access, loopback: bool, public_names: Collection[str] = ()) -> None:
        """loopback: whether the server listens on loopback only. public_names: names under which others know it, in
        lower case. A Host may also name this machine; the Origin of a page behind a proxy may not."""
        self._app = app
        self._access = access
        self._loopback = loopback
        self._public_names = frozenset(public_names)
        self._own = self._public_names | names_of_host(socket.gethostname(), _hosts())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        send = _guarded(send)
        headers = Headers(scope=scope)
        try:
            if self._loopback or scope["path"] not in PROBED or scope["method"] not in READING:
                check_host(headers.get("host", ""), self._loopback, self._access.asks, self._own)
            check_origin(scope["method"], headers, self._public_names)
            if scope["path"] not in OPEN:
                scope[CALLER] = self._access.of_request(headers.get("authorization", ""))
        except CkptEngineError as error:
            document = problem_document(error.problem)
            answer = JSONResponse(document, document["status"], media_type=PROBLEM_TYPE)
            if document["status"] == 401:
                answer.headers["www-authenticate"] = "Bearer"
            await answer(scope, receive, send)
            return
        await self._app(scope, _bounded(receive), send)


def _hosts() -> str:
    """The names that this machine knows without a network: the text of /etc/hosts."""
    try:
        return Path("/etc/hosts").read_text(errors="replace")
    except OSError:
        return ""


def says_json(headers: Headers) -> bool:
    """Whether the content type is JSON. A foreign page in a browser can post forms and texts to this machine, but not
    JSON."""
    return headers.get("content-type", "").partition(";")[0].strip().lower() == "application/json"


def _guarded(send: Send) -> Send:
    async def guarded(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(raw=message.setdefault("headers", []))
            for name, value in ALWAYS.items():
                headers.setdefault(name, value)
        await send(message)

    return guarded


def _bounded(receive: Receive) -> Receive:
    room = BODY_BYTES

    async def bounded() -> Message:
        nonlocal room
        message = await receive()
        room -= len(message.get("body", b""))
        if room < 0:
            raise HTTPException(413, f"the request's body must have at most {BODY_BYTES} bytes, and has more")
        return message

    return bounded
