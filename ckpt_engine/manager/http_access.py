"""What every HTTP request to the manager must pass: the host that it was meant for, the page that it came from, whose
token it shows, its size. And what every answer tells a browser not to do with it."""

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
from ckpt_engine.manager.browsers import READING, check_host, check_origin, names_beside
from ckpt_engine.manager.errors import problem_document
from ckpt_engine.manager.http_page import FILES

PROBED = frozenset({"/healthz", "/metrics"})
"""Routes of probes and of Prometheus, which ask under whatever name their configuration has."""

OPEN = frozenset({"/healthz", *FILES})
"""Routes for probes, which have no token, and the page, which has nothing to tell before it is given one."""

CALLER = "ckpt_engine.caller"
"""Where a request's scope has who makes it, for routes that need a grant."""

BODY_BYTES = 64 * 1024
"""The most that anybody may send as a body."""

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
    """ASGI middleware. loopback: whether the server listens on loopback only. told: names under which it is known to
    others, in lower case; this host's are added, but for a page that came through a proxy."""

    def __init__(self, app: ASGIApp, access: Access, loopback: bool, public_names: Collection[str] = ()) -> None:
        self._app = app
        self._access = access
        self._loopback = loopback
        self._public_names = frozenset(public_names)
        self._own = self._public_names | names_beside(socket.gethostname(), _hosts())

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
    """What this machine knows of names without asking a network."""
    try:
        return Path("/etc/hosts").read_text(errors="replace")
    except OSError:
        return ""


def says_json(headers: Headers) -> bool:
    """Whether the body is called JSON. A page in a browser can post forms and texts to this machine unasked, but no
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
            raise HTTPException(413, f"a body has at most {BODY_BYTES} bytes")
        return message

    return bounded
