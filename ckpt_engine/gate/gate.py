"""The gate: ASGI middleware in an engine's API server that lets a request in only while the weights are whole.

At every request it reads the engine's page: the workers' state words, and the agent's marks (asleep, own weights, a
running update, its lease). During an update it holds requests and lets them in afterwards, in order. It does not stop
requests that are already inside; the engine's pause does.

Control routes need the token in the engine's directory, which the agent has. With the token the agent's own requests
for tokens (a self-check before the first update) pass in every state.

An adapter subclasses it with the routes of its engine. Any framework that takes ``Class(app)`` can use it.
"""

from __future__ import annotations

import hmac
import json
import math
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any, ClassVar

from ckpt_engine.core.loopback import is_loopback
from ckpt_engine.core.openai_errors import error_object
from ckpt_engine.gate.counts import GateCounts
from ckpt_engine.gate.directory import TOKEN_HEADER, EngineDirectory
from ckpt_engine.gate.holding import DecisionKind, GateDecision
from ckpt_engine.gate.page import Admission, EnginePage
from ckpt_engine.gate.reader import StateReader
from ckpt_engine.gate.readiness import ReadyQuestion
from ckpt_engine.gate.routes import EngineRoutes, RouteAccess, listed
from ckpt_engine.gate.waiting import WaitingRoom
from ckpt_engine.v1 import weights_pb2

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

ADMITTED_VERSION_HEADER = b"x-ckpt-engine-admitted-version"
ADMITTED_ROOT_HEADER = b"x-ckpt-engine-admitted-root"
"""The version that the workers held when the request was let in. Its tokens may be of a later one, if it waits or its
body comes slowly. Only the body can say which version made them."""

INFO_ROUTE = "/ckpt_engine/info"
READY_ROUTE = "/ckpt_engine/ready"
"""For load balancers and probes, from anywhere: 200 while requests are let in or held, 503 with the reason while they
are refused. With `?strict=1` it is 200 only while they are let in; with `?at_least=N` and `&lineage=NAME` only with
such a version."""
ROUTES_ROUTE = "/ckpt_engine/routes"
"""Every route of the engine with its class, for the agent only."""

_TOKEN_HEADER = TOKEN_HEADER.encode()


class Gate:
    """Lets requests in while all workers are clean with one root and the engine is awake, holds them during an update,
    and answers 503 otherwise. Each answer's headers name the version under which its request was let in. An engine
    that is marked as having its own weights is open while it is awake, and its answers name no version.

    Raises at construction (so that the server does not start) if the engine's directory or its token cannot be used.
    routes.py says how routes are written; a route in none of the three sets needs the token, like a control route.
    """

    open_routes: ClassVar[frozenset[str]] = frozenset({"/health"})
    """Routes with answers that do not depend on the weights, open in any state."""

    generation_routes: ClassVar[frozenset[str]] = frozenset()
    """Routes that generate, or answer something about the weights: open while these are whole."""

    control_routes: ClassVar[frozenset[str]] = frozenset()
    """Routes that change the engine or what it computes with: they need the token."""

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
        self._room = WaitingRoom(self._state)
        self._waiting = self._room.queue
        self._counts = GateCounts(directory.path)
        self._routes = EngineRoutes(self.open_routes, self.generation_routes, self.control_routes | {"/ckpt_engine/"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Lets a request through or answers it. Runs on the API server's event loop."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] not in ("http", "websocket"):
            raise ValueError(f"the gate lets through HTTP and WebSockets, not {scope['type']!r}")
        route, access = self._routes.of_request(scope)
        if access is RouteAccess.GATED and self._has_token(scope):
            await self._app(scope, receive, send)  # the agent's own request, also while the gate is closed to others
        elif access is RouteAccess.GATED:
            decision = self._state.decision()
            if decision.kind is DecisionKind.ADMIT and self._waiting.empty:
                await self._let_in(decision, scope, receive, send)
            else:
                await self._keep(decision, scope, receive, send)
        elif access is RouteAccess.OPEN:
            await self.open(route, scope, receive, send)
        elif route == INFO_ROUTE:
            await self._information(scope, send)
        elif route == READY_ROUTE:
            await self._ready(scope, send)
        elif not self._has_token(scope):
            await _refuse(scope, send, 403, _agents_only(route, access), f"{access.value}_route")
        elif route == ROUTES_ROUTE:
            await answer_json(
                send, 200, {each: self._routes.of(each).value for each in listed(scope.get("app", self._app))}
            )
        else:
            await self.control(route, scope, receive, send)

    async def open(self, route: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes on a request for an open route. The engine answers; route: as for `control`."""
        await self._app(scope, receive, send)

    async def control(self, route: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes on a request for a control route with the token. The engine answers; adapters may add routes here.

        route: the path without the server's root path.
        """
        await self._app(scope, receive, send)

    async def _let_in(self, decision: GateDecision, scope: Scope, receive: Receive, send: Send) -> None:
        state = decision.verdict
        await self._app(scope, receive, send if state.identity is None else _with_version(send, state))

    async def _keep(self, decision: GateDecision, scope: Scope, receive: Receive, send: Send) -> None:
        """Holds a request until its turn comes, or there is nothing to wait for. A WebSocket is refused: its client
        must dial again."""
        if scope["type"] == "websocket":
            await self._refuse(decision, scope, send)
            return
        answer = self._waiting.arrive(decision, _announced(scope), self._state.clock(), self._state.limits)
        if isinstance(answer, GateDecision):
            await self._refuse(answer, scope, send)
            return
        self._counts.waits()
        try:
            request = await self._room.wait(answer, receive)
        finally:
            self._counts.waited(self._state.clock() - answer.arrived)
        try:
            if request.decision is None:
                return  # the client has gone
            if request.decision.kind is DecisionKind.ADMIT:
                await self._let_in(request.decision, scope, request.receive(receive), send)
            else:
                await self._refuse(request.decision, scope, send)
        finally:
            request.close()

    async def _refuse(self, decision: GateDecision, scope: Scope, send: Send) -> None:
        self._counts.refused(decision.reason)
        await self._answer_503(decision, scope, send)

    async def _answer_503(
        self, decision: GateDecision, scope: Scope, send: Send, members: Mapping[str, object] | None = None
    ) -> None:
        """Answers with the decision's reason. members: more of the body."""
        remaining = math.ceil(decision.until - self._state.clock())
        detail = f"this replica does not serve now: {decision.detail}"
        retry_after = remaining if remaining > 0 else None
        await _refuse(scope, send, 503, detail, decision.reason, retry_after, members)

    def _has_token(self, scope: Scope) -> bool:
        token = next((value for name, value in scope["headers"] if name == _TOKEN_HEADER), b"")
        return hmac.compare_digest(token, self._token)

    async def _ready(self, scope: Scope, send: Send) -> None:
        try:
            question = ReadyQuestion.from_query(scope.get("query_string", b"").decode("latin-1"))
        except ValueError as error:
            await _refuse(scope, send, 400, f"{READY_ROUTE}: {error}", "bad_question")
            return
        decision = self._state.decision()
        limits, state = self._state.limits, decision.verdict
        keeps = decision.kind is DecisionKind.HOLD and limits.seconds > 0 and not self._waiting.full(limits)
        if decision.kind is not DecisionKind.ADMIT and (question.strict or not keeps):
            await self._answer_503(decision, scope, send, _version_members(state.identity))
            return
        # While an update writes, the next version is not known yet: the one before it counts.
        identity = state.identity if state.open else self._state.last_identity
        reason, detail = question.unmet(identity)
        if reason:
            words = f"this replica does not serve what is asked for: {detail}"
            await _refuse(scope, send, 503, words, reason, members=_version_members(identity))
        elif decision.kind is DecisionKind.ADMIT:
            body = {"ready": True, "open": True, **_version_members(identity)}
            await answer_json(send if identity is None else _with_version(send, state), 200, body)
        else:
            await answer_json(send, 200, {"ready": True, "open": False, **_version_members(None)})

    async def _information(self, scope: Scope, send: Send) -> None:
        client = scope.get("client")
        if client is not None and not is_loopback(client[0]):
            await _refuse(scope, send, 403, f"{INFO_ROUTE} answers on this host only", "not_local")
            return
        mark = self._page.marked()
        decision = self._state.decision()
        state = decision.verdict
        body = {
            "directory": str(self._directory.path),
            "world_size": self._page.world_size(),
            "open": decision.kind is DecisionKind.ADMIT,
            "held": len(self._waiting),
            "own_weights": mark.own_weights,
            "asleep": sorted(mark.sleeping.tags),
            "reason": decision.detail,
            "version": state.identity.version if state.identity else None,
            "lineage": state.identity.lineage if state.identity else None,
            "root": state.identity.root.hex() if state.identity else None,
        }
        await answer_json(send, 200, body)


def _with_version(send: Send, state: Admission) -> Send:
    assert state.identity is not None
    headers = [
        (ADMITTED_VERSION_HEADER, str(state.identity.version).encode()),
        (ADMITTED_ROOT_HEADER, state.identity.root.hex().encode()),
    ]

    async def send_with_version(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), *headers]
        await send(message)

    return send_with_version


def _version_members(identity: weights_pb2.Identity | None) -> dict[str, object]:
    """A version in the body of an answer. None: the engine holds none that is whole, or weights of its own."""
    if identity is None:
        return {"version": None, "lineage": None}
    return {"version": identity.version, "lineage": identity.lineage}


def _agents_only(route: str, access: RouteAccess) -> str:
    if access is RouteAccess.CONTROL:
        return f"{route} is for this replica's agent only"
    return (
        f"this replica's gate does not know the route {route}. The engine may lack it, or it may change the engine, so "
        "only the replica's agent may use it until the gate's class for this engine lists it"
    )


def _announced(scope: Scope) -> int:
    """Bytes of the body by the client's Content-Length; 0: there is none."""
    length = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
    return int(length) if length.isdigit() else 0


async def _refuse(
    scope: Scope,
    send: Send,
    status: int,
    detail: str,
    reason: str,
    retry_after: int | None = None,
    members: Mapping[str, object] | None = None,
) -> None:
    """Sends a refusal. detail: for people. reason: for programs. members: more of the body."""
    if scope["type"] == "websocket":
        code = {403: 1008, 503: 1013}[status]  # policy violation; try again later
        await send({"type": "websocket.close", "code": code, "reason": detail[:120]})
        return
    problem = {
        "type": "about:blank",
        "title": {400: "Bad Request", 403: "Forbidden", 503: "Service Unavailable"}[status],
        "status": status,
        "detail": detail,
        "reason": reason,
        "error": error_object(status, reason, detail),
        **(members or {}),
    }
    body = json.dumps(problem).encode()
    headers = [] if retry_after is None else [(b"retry-after", str(retry_after).encode())]
    await _answer(send, status, b"application/problem+json", body, headers)


async def answer_json(send: Send, status: int, body: object) -> None:
    """Sends a whole answer of JSON."""
    await _answer(send, status, b"application/json", json.dumps(body).encode(), [])


async def _answer(
    send: Send, status: int, content_type: bytes, body: bytes, headers: list[tuple[bytes, bytes]]
) -> None:
    standard = [(b"content-type", content_type), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": standard + headers})
    await send({"type": "http.response.body", "body": body})
