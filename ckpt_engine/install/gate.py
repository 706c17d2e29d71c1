"""The gate: ASGI middleware in an engine's API server that lets a request in only while the weights are whole.

It decides from the workers' state words and the engine's mark (asleep, weights of its own), read at every request;
pause, resume and labels play no part. It does not stop requests that are already inside; the engine's pause does. It
keeps the engine's control routes for the agent, which knows the token in the engine's directory.

An adapter subclasses it with the routes of its engine. Any framework that takes ``Class(app)`` can use it.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, ClassVar

from ckpt_engine.install.directory import TOKEN_HEADER, EngineDirectory
from ckpt_engine.install.routes import Access, Routes, listed
from ckpt_engine.install.state import EnginePage, Verdict, admission

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

VERSION_HEADER = b"x-ckpt-engine-version"
ROOT_HEADER = b"x-ckpt-engine-root"
INFO_ROUTE = "/ckpt_engine/info"
READY_ROUTE = "/ckpt_engine/ready"
"""For load balancers and probes, from anywhere: 200 while the gate is open, 503 with the reason while it is not."""
ROUTES_ROUTE = "/ckpt_engine/routes"
"""Every route of the engine with its class, for the agent only."""

_TOKEN_HEADER = TOKEN_HEADER.encode()
_LIVENESS_SECONDS = 0.05


class StateReader:
    """Reads the verdict at the cost of comparing a few hundred bytes while nothing changes.

    Whether workers live is asked of the kernel at most every 50 ms. Used on the API server's event loop.
    """

    def __init__(self, page: EnginePage, clock: Callable[[], float] = time.monotonic) -> None:
        self._page = page
        self._clock = clock
        self._raw = b""
        self._checked = 0.0
        self._verdict = Verdict(False, "no worker has started", None)

    def verdict(self) -> Verdict:
        """What `admission` says of the page as it is now."""
        now = self._clock()
        raw = self._page.raw()
        if raw != self._raw or now - self._checked > _LIVENESS_SECONDS:
            self._raw, self._checked = raw, now
            self._verdict = admission(self._page.read(), self._page.marked())
        return self._verdict


class Gate:
    """Answers 503 while asleep, and unless all workers are clean with one root; adds the version to every answer that
    it lets out. An engine that is marked as having weights of its own is open while it is awake, without a version.

    Raises at construction (so that the server does not start) when the engine's directory cannot be opened, or its
    token is none. How routes are written is said in routes.py; one in none of the three sets is refused without the
    token, like a control route.
    """

    open_routes: ClassVar[frozenset[str]] = frozenset({"/health"})
    """Routes that say nothing of the weights, answered in any state."""

    generation_routes: ClassVar[frozenset[str]] = frozenset()
    """Routes that generate or say something of the weights, answered while these are whole."""

    control_routes: ClassVar[frozenset[str]] = frozenset()
    """Routes that change the engine or what it computes with: refused without the token."""

    def __init__(self, app: Application) -> None:
        directory = EngineDirectory.from_environment()
        if directory is None:
            directory = EngineDirectory.create()
            print(f"ckpt-engine: engine directory {directory.path}", flush=True)
        self._app = app
        self._directory = directory
        self._token = directory.token().encode()
        self._page = EnginePage(directory.page)
        self._state = StateReader(self._page)
        self._routes = Routes(self.open_routes, self.generation_routes, self.control_routes | {"/ckpt_engine/"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Lets a request through or answers it. Runs on the API server's event loop."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] not in ("http", "websocket"):
            raise ValueError(f"the gate lets through HTTP and WebSockets, not {scope['type']!r}")
        route, access = self._routes.of_request(scope)
        if access is Access.GATED:
            state = self._state.verdict()
            if state.open:
                await self._app(scope, receive, send if state.identity is None else _with_version(send, state))
            else:
                await _refuse_closed(scope, send, state)
        elif access is Access.OPEN:
            await self._app(scope, receive, send)
        elif route == INFO_ROUTE:
            await self._information(scope, send)
        elif route == READY_ROUTE:
            await self._ready(scope, send)
        elif not self._has_token(scope):
            await _refuse(scope, send, 403, _agents_only(route, access))
        elif route == ROUTES_ROUTE:
            await answer_json(
                send, 200, {each: self._routes.of(each).value for each in listed(scope.get("app", self._app))}
            )
        else:
            await self.control(route, scope, receive, send)

    async def control(self, route: str, scope: Scope, receive: Receive, send: Send) -> None:
        """A control route, called with the token. The engine answers; adapters may have routes of their own here.

        route: the path without the root path that the server may have been given.
        """
        await self._app(scope, receive, send)

    def _has_token(self, scope: Scope) -> bool:
        given = next((value for name, value in scope["headers"] if name == _TOKEN_HEADER), b"")
        return hmac.compare_digest(given, self._token)

    async def _ready(self, scope: Scope, send: Send) -> None:
        state = self._state.verdict()
        if state.open:
            version = state.identity.version if state.identity else None
            body = {"ready": True, "version": version}
            await answer_json(send if state.identity is None else _with_version(send, state), 200, body)
        else:
            await _refuse_closed(scope, send, state)

    async def _information(self, scope: Scope, send: Send) -> None:
        client = scope.get("client")
        if client is not None and not _is_loopback(client[0]):
            await _refuse(scope, send, 403, f"{INFO_ROUTE} answers on this host only")
            return
        mark = self._page.marked()
        state = admission(self._page.read(), mark)
        body = {
            "directory": str(self._directory.path),
            "world_size": self._page.world_size(),
            "open": state.open,
            "own_weights": mark.own_weights,
            "asleep": sorted(mark.sleeping.tags),
            "reason": state.reason,
            "version": state.identity.version if state.identity else None,
            "lineage": state.identity.lineage if state.identity else None,
            "root": state.identity.root.hex() if state.identity else None,
        }
        await answer_json(send, 200, body)


def _with_version(send: Send, state: Verdict) -> Send:
    assert state.identity is not None
    headers = [
        (VERSION_HEADER, str(state.identity.version).encode()),
        (ROOT_HEADER, state.identity.root.hex().encode()),
    ]

    async def send_with_version(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), *headers]
        await send(message)

    return send_with_version


def _agents_only(route: str, access: Access) -> str:
    if access is Access.CONTROL:
        return f"{route} is for this replica's agent only"
    return (
        f"{route} is no route that this replica's gate knows. It may be one that changes the engine, so it is for the "
        "replica's agent only, until the gate's class for this engine says what it does"
    )


async def _refuse_closed(scope: Scope, send: Send, state: Verdict) -> None:
    await _refuse(scope, send, 503, f"this replica does not serve now: {state.reason}", retry_after=1)


async def _refuse(scope: Scope, send: Send, status: int, detail: str, retry_after: int | None = None) -> None:
    if scope["type"] == "websocket":
        code = {403: 1008, 503: 1013}[status]  # policy violation; try again later
        await send({"type": "websocket.close", "code": code, "reason": detail[:120]})
        return
    title = {403: "Forbidden", 503: "Service Unavailable"}[status]
    body = json.dumps({"type": "about:blank", "title": title, "status": status, "detail": detail}).encode()
    headers = [] if retry_after is None else [(b"retry-after", str(retry_after).encode())]
    await _answer(send, status, b"application/problem+json", body, headers)


async def answer_json(send: Send, status: int, body: object) -> None:
    """A whole answer."""
    await _answer(send, status, b"application/json", json.dumps(body).encode(), [])


async def _answer(
    send: Send, status: int, content_type: bytes, body: bytes, headers: list[tuple[bytes, bytes]]
) -> None:
    standard = [(b"content-type", content_type), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": standard + headers})
    await send({"type": "http.response.body", "body": body})


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False
