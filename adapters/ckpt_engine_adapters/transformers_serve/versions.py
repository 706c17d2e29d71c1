"""Which version of the weights made which tokens of a request, and the form in which answers say so.

It counts, and adds `weight_versions` to the bodies of two routes. It does not decide which version the worker holds.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, MutableMapping
from typing import Any

from ckpt_engine.core.json_text import load_json
from ckpt_engine.core.version_stamps import may_end
from ckpt_engine.gate.asgi import Application, Message, Receive, Scope, Send, header, with_headers

MEMBER = "weight_versions"
"""Of an answer, and of the last event of a stream: `[{"version": 7, "start": 0, "end": 12}, ...]`, where tokens
[start, end) of the output were made by that version."""

ROUTES = frozenset({"/v1/chat/completions", "/v1/completions"})
_IDENTIFIER = b"x-request-id"
_FIRST = "data: "


class TokenVersions:
    """Counts the tokens of each open request by the version that made them. Its methods are called on three threads,
    never on two at a time for one request."""

    def __init__(self, held: Callable[[], int | None]) -> None:
        """held: the number of the version that the worker holds now; None: the engine's own weights, or none."""
        self._held = held
        self._version: int | None = None
        self._spans: dict[str, list[dict[str, int | None]]] = {}

    def open(self, request: str) -> bool:
        """Begins to count. False: there is an open request of that name already."""
        if request in self._spans:
            return False
        self._spans[request] = []
        return True

    def close(self, request: str) -> None:
        """Forgets a request."""
        self._spans.pop(request, None)

    def count(self, request: str, tokens: int) -> None:
        """Notes that a request has `tokens` tokens, the last ones of the version with which the loop computes."""
        spans = self._spans.get(request, [])
        start = (spans[-1]["end"] or 0) if spans else 0
        if tokens <= start:
            return
        if spans and spans[-1]["version"] == self._version:
            spans[-1]["end"] = tokens
        else:
            spans.append({"version": self._version, "start": start, "end": tokens})

    def renew(self) -> None:
        """Takes note of the version that the worker holds, before the loop computes with it."""
        self._version = self._held()

    def of(self, request: str) -> list[dict[str, int | None]]:
        """The spans so far; all of them once the request has ended. Empty: not known."""
        return self._spans.get(request, [])


class VersionedAnswers:
    """ASGI middleware that has answers say which version made which of their tokens."""

    def __init__(self, app: Application, versions: TokenVersions) -> None:
        self._app, self._versions = app, versions

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].rstrip("/") not in ROUTES:
            await self._app(scope, receive, send)
            return
        request = header(scope, _IDENTIFIER).decode("latin-1")
        if not request:
            request = str(uuid.uuid4())
            scope = with_headers(scope, [(_IDENTIFIER, request.encode())])
        if not self._versions.open(request):
            await self._app(scope, receive, send)  # transformers itself cannot tell the two requests apart
            return
        try:
            await self._app(scope, receive, _Saying(send, lambda: self._versions.of(request)))
        finally:
            self._versions.close(request)


class _Saying:
    """Sends one answer on, with the spans in it. A whole answer is kept until its end, since its length changes."""

    def __init__(self, send: Send, spans: Callable[[], list[dict[str, int | None]]]) -> None:
        self._send, self._spans = send, spans
        self._start: Message = {}
        self._kind = b""
        self._body = b""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._start = message
            self._kind = header(message, b"content-type")
            if not self._whole:
                await self._send(message)
        elif message["type"] != "http.response.body":
            await self._send(message)
        elif self._whole:
            self._body += message.get("body", b"")
            if not message.get("more_body", False):
                await self._send_whole()
        elif self._kind.startswith(b"text/event-stream"):
            await self._send({**message, "body": self._events(message.get("body", b""))})
        else:
            await self._send(message)

    @property
    def _whole(self) -> bool:
        return self._start["status"] == 200 and self._kind.startswith(b"application/json")

    async def _send_whole(self) -> None:
        body = self._added(self._body)
        await self._send(with_headers(self._start, [(b"content-length", str(len(body)).encode())]))
        await self._send({"type": "http.response.body", "body": body})

    def _events(self, body: bytes) -> bytes:
        """transformers sends whole events."""
        if not may_end(body):
            return body
        lines = body.decode().split("\n")
        return "\n".join(
            _FIRST + self._added(line.removeprefix(_FIRST).encode()).decode() if line.startswith(_FIRST) else line
            for line in lines
        ).encode()

    def _added(self, text: bytes) -> bytes:
        """An answer, or an event, with the spans if it is the end of the answer."""
        try:
            content: Any = load_json(text)
            ended = isinstance(content, MutableMapping) and any(
                each.get("finish_reason") for each in content["choices"]
            )
        except (ValueError, KeyError, TypeError, AttributeError):
            return text
        if not ended or not (spans := self._spans()):
            return text
        return json.dumps({**content, MEMBER: spans}).encode()
