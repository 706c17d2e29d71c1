"""What the gate needs of ASGI: the types of its calls, headers, whole answers, and refusals as clients read them.

It does not decide what is answered (gate.py).
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from http import HTTPStatus
from typing import Any

from ckpt_engine.core.openai_errors import error_object

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

HeaderList = list[tuple[bytes, bytes]]

_CLOSE_CODES = {503: 1013, 409: 1013}
"""Of a WebSocket: try again later. All others are 1008, a violation of policy."""


def header(scope_or_start: Mapping[str, Any], sought: bytes) -> bytes:
    """The value of a header of a request's scope, or of the start of an answer; empty: there is none. ASGI has names in
    lower case."""
    for name, value in scope_or_start.get("headers", ()):
        if name == sought:
            return bytes(value)
    return b""


def with_headers(scope_or_start: Mapping[str, Any], headers: HeaderList) -> MutableMapping[str, Any]:
    """A scope, or the start of an answer, with more headers. They replace those of the same name."""
    names = {name for name, _ in headers}
    others = [each for each in scope_or_start.get("headers", ()) if each[0] not in names]
    return {**scope_or_start, "headers": [*others, *headers]}


async def answer_json(send: Send, status: int, body: object) -> None:
    """Sends a whole answer of JSON."""
    await answer(send, status, b"application/json", json.dumps(body).encode(), [])


async def answer(send: Send, status: int, content_type: bytes, body: bytes, headers: HeaderList) -> None:
    """Sends a whole answer of any type. headers: beside type and length."""
    standard = [(b"content-type", content_type), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": standard + headers})
    await send({"type": "http.response.body", "body": body})


async def refuse(
    kind: str,
    send: Send,
    status: int,
    detail: str,
    reason: str,
    retry_after: int | None = None,
    members: Mapping[str, object] | None = None,
) -> None:
    """Answers with a refusal; a WebSocket is closed before it opens. kind: of the scope, "http" or "websocket". detail:
    for people. reason: for programs. retry_after: seconds. members: more of the body."""
    if kind == "websocket":
        await send({"type": "websocket.close", "code": _CLOSE_CODES.get(status, 1008), "reason": detail[:120]})
        return
    problem = {
        "type": "about:blank",
        "title": HTTPStatus(status).phrase,
        "status": status,
        "detail": detail,
        "reason": reason,
        "error": error_object(status, reason, detail),
        **(members or {}),
    }
    headers = [] if retry_after is None else [(b"retry-after", str(retry_after).encode())]
    await answer(send, status, b"application/problem+json", json.dumps(problem).encode(), headers)
