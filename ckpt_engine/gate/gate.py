"""The gate: ASGI middleware in an engine's API server that lets a request in only while the weights are whole.

At every request it reads the engine's page: the workers' state words, and the agent's marks (asleep, own weights, a
running update, its lease). During an update it holds requests and lets them in afterwards, in order. It does not stop
requests that are already inside; the engine's pause does. A request may name the versions that it accepts, in headers
or in its body (core/version_bounds.py): it gets an answer of such a version, or 409.

Control routes need the token in the engine's directory, which the agent has. With the token the agent's own requests
for tokens (a self-check before the first update) pass in every state.

An adapter subclasses it with the routes of its engine. Any framework that takes ``Class(app)`` can use it.
"""

from __future__ import annotations

import hmac
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from ckpt_engine.core.loopback import is_loopback
from ckpt_engine.core.version_bounds import (
    LINEAGE,
    MIN_VERSION,
    PREFIX,
    SESSION,
    VERSION,
    VersionBounds,
    bounds_of,
    once,
)
from ckpt_engine.gate.asgi import (
    Application,
    Message,
    Receive,
    Scope,
    Send,
    answer_json,
    header,
    refuse,
)
from ckpt_engine.gate.bounded_answer import (
    BoundedAnswer,
    BoundedAnswers,
    VersionHeaders,
    is_whole,
)
from ckpt_engine.gate.bounds import BoundedVisit, unmet_at_entry
from ckpt_engine.gate.counts import GateCounts
from ckpt_engine.gate.directory import TOKEN_HEADER, EngineDirectory
from ckpt_engine.gate.holding import DecisionKind, GateDecision
from ckpt_engine.gate.page import EnginePage
from ckpt_engine.gate.reader import StateReader
from ckpt_engine.gate.readiness import ReadyQuestion
from ckpt_engine.gate.request_body import read_ahead, replay, take_field
from ckpt_engine.gate.routes import EngineRoutes, RouteAccess, listed
from ckpt_engine.gate.waiting import HeldRequest, WaitingRoom
from ckpt_engine.v1 import weights_pb2

INFO_ROUTE = "/ckpt_engine/info"
READY_ROUTE = "/ckpt_engine/ready"
"""The route for load balancers and probes, from anywhere: 200 while requests are let in or held, 503 with the reason
while they are refused. With `?strict=1` it is 200 only while they are let in; with `?at_least=N` and `&lineage=NAME`
only with such a version."""
ROUTES_ROUTE = "/ckpt_engine/routes"
"""Every route of the engine with its class, for the agent only."""

_TOKEN_HEADER = TOKEN_HEADER.encode()
_PREFIXES = (PREFIX.encode(), PREFIX.replace("-", "_").encode())
BAD_REQUEST = "bad_request"
_TAKEN = (VERSION, MIN_VERSION, LINEAGE, SESSION)
"""The headers of ours with which a caller may ask. Others need a gateway, which knows the last version and waits."""


class Gate:
    """Lets requests in while all workers are clean with one root and the engine is awake, holds them during an update,
    and answers 503 otherwise. Each answer's headers name the version under which its request was let in, and a whole
    one's also the version under which it ended. An engine that is marked as having its own weights is open while it is
    awake, and its answers name no version.

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
        self._bounded = BoundedAnswers(self._state)
        self._headers = VersionHeaders(None)  # of the version that was named last
        self._routes = EngineRoutes(self.open_routes, self.generation_routes, self.control_routes | {"/ckpt_engine/"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Lets a request through or answers it. Runs on the API server's event loop."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] not in ("http", "websocket"):
            raise ValueError(f"the gate lets through HTTP and WebSockets, not {scope['type']!r}")
        route, access = self._routes.of_request(scope)
        if access is RouteAccess.GATED:
            ours = [header for header in scope["headers"] if header[0].startswith(_PREFIXES)]
            if ours and self._has_token(scope):
                await self._app(scope, receive, send)  # the agent's own request, also while the gate is closed
            else:
                await self._gated(ours, scope, receive, send)
        elif access is RouteAccess.OPEN:
            await self.open(route, scope, receive, send)
        elif route == INFO_ROUTE:
            await self._information(scope, send)
        elif route == READY_ROUTE:
            await self._ready(scope, send)
        elif not self._has_token(scope):
            await refuse(scope["type"], send, 403, _agents_only(route, access), f"{access.value}_route")
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

    async def _gated(self, ours: Sequence[tuple[bytes, bytes]], scope: Scope, receive: Receive, send: Send) -> None:
        """Lets a request in, keeps it first, or refuses it. ours: its headers that begin with our prefix."""
        try:
            headers = _version_headers(ours) if ours else {}
        except ValueError as error:
            await refuse(scope["type"], send, 400, str(error), BAD_REQUEST)
            return
        held: list[HeldRequest] = []
        body: Message | None = None
        try:
            decision = self._state.decision()
            while True:
                if decision.kind is not DecisionKind.ADMIT or (body is None and not self._waiting.empty):
                    request = await self._keep(decision, scope, receive, send)
                    if request is None or request.decision is None:
                        return
                    held.append(request)
                    decision, receive = request.decision, request.receive(receive)
                if body is not None or scope.get("method") != "POST":
                    break
                body = await read_ahead(scope, receive)
                if body is None:
                    return  # the client has gone
                receive = replay(body, receive)
                decision = self._state.decision()  # the body may have come slowly
                if decision.kind is DecisionKind.ADMIT:
                    break
            await self._enter(decision, headers, body, scope, receive, send)
        finally:
            for request in held:
                request.close()

    async def _enter(
        self,
        decision: GateDecision,
        headers: Mapping[str, str],
        body: Message | None,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        """Lets a request in if its bounds hold. headers: that ask for versions. body: what was read of it, which
        `receive` returns first."""
        field = None
        if body is not None:
            field, scope = take_field(scope, body)
        if not headers and field is None:
            await self._answer(scope, receive, self._naming_versions(decision, send))
            return
        try:
            bounds = _bounds(headers, field, scope)
        except ValueError as error:
            await refuse(scope["type"], send, 400, str(error), BAD_REQUEST)
            return
        unmet = unmet_at_entry(bounds, decision.verdict.identity, self._state.highest)
        if unmet is not None:
            self._counts.refused(unmet.reason)
            await refuse(scope["type"], send, 409, unmet.detail, unmet.reason, 1 if unmet.may_pass else None)
            return
        answer = BoundedAnswer(
            BoundedVisit(bounds, decision), self._state, send, self._counts.refused, field is not None
        )
        with self._bounded.judged(answer):
            try:
                await self._answer(scope, receive, answer.send)
            except Exception:
                if not answer.ended:  # else the engine was told that its client has gone
                    raise

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Has the engine answer a request that was let in. Counts it, and whether that failed."""
        failed = False

        async def send_noting_status(message: Message) -> None:
            nonlocal failed
            failed = failed or (message["type"] == "http.response.start" and message["status"] >= 500)
            await send(message)

        try:
            await self._app(scope, receive, send_noting_status)
        except Exception:
            failed = True
            raise
        finally:
            self._counts.answered(failed)

    def _naming_versions(self, decision: GateDecision, send: Send) -> Send:
        """A `send` that adds the headers of the versions under which a request was let in and ended."""
        identity = decision.verdict.identity
        if identity is None:
            return send
        admitted = self._headers_of(identity).admitted

        async def send_with_versions(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [*message.get("headers", ()), *admitted]
                if is_whole(message):
                    headers += self._headers_of(self._state.verdict().identity).end
                message["headers"] = headers
            await send(message)

        return send_with_versions

    def _headers_of(self, identity: weights_pb2.Identity | None) -> VersionHeaders:
        """The reader gives the same object as long as the page is the same."""
        if self._headers.identity is not identity:
            self._headers = VersionHeaders(identity)
        return self._headers

    async def _keep(self, decision: GateDecision, scope: Scope, receive: Receive, send: Send) -> HeldRequest | None:
        """Holds a request until its turn comes, or there is nothing to wait for. Returns it if it may go in; the caller
        closes it. None: it was refused, or its client has gone. A WebSocket is refused: its client must dial again."""
        if scope["type"] == "websocket":
            await self._refuse(decision, scope, send)
            return None
        answer = self._waiting.arrive(decision, _announced(scope), self._state.clock(), self._state.limits)
        if isinstance(answer, GateDecision):
            await self._refuse(answer, scope, send)
            return None
        self._counts.waits()
        try:
            request = await self._room.wait(answer, receive)
        finally:
            self._counts.waited(self._state.clock() - answer.arrived)
        if request.decision is not None and request.decision.kind is DecisionKind.ADMIT:
            return request
        try:
            if request.decision is not None:
                await self._refuse(request.decision, scope, send)
        finally:
            request.close()
        return None

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
        await refuse(scope["type"], send, 503, detail, decision.reason, retry_after, members)

    def _has_token(self, scope: Scope) -> bool:
        return hmac.compare_digest(header(scope, _TOKEN_HEADER), self._token)

    async def _ready(self, scope: Scope, send: Send) -> None:
        try:
            question = ReadyQuestion.from_query(scope.get("query_string", b"").decode("latin-1"))
        except ValueError as error:
            await refuse(scope["type"], send, 400, f"{READY_ROUTE}: {error}", "bad_question")
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
            await refuse(scope["type"], send, 503, words, reason, members=_version_members(identity))
        elif decision.kind is DecisionKind.ADMIT:
            body = {"ready": True, "open": True, **_version_members(identity)}
            await answer_json(self._naming_versions(decision, send), 200, body)
        else:
            await answer_json(send, 200, {"ready": True, "open": False, **_version_members(None)})

    async def _information(self, scope: Scope, send: Send) -> None:
        client = scope.get("client")
        if client is not None and not is_loopback(client[0]):
            await refuse(scope["type"], send, 403, f"{INFO_ROUTE} answers on this host only", "not_local")
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
    length = header(scope, b"content-length")
    return int(length) if length.isdigit() else 0


def _version_headers(ours: Sequence[tuple[bytes, bytes]]) -> dict[str, str]:
    """The headers that ask for versions. Raises ValueError for any other one of ours."""
    named = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in ours if name != _TOKEN_HEADER]
    return once(named, _TAKEN, " at a replica's gate")


def _bounds(headers: Mapping[str, str], field: Any, scope: Scope) -> VersionBounds:
    """The versions that a request accepts. Raises ValueError."""
    if scope["type"] == "websocket":
        raise ValueError(f"{', '.join(headers)}: a WebSocket cannot ask for versions, since its answers do not end")
    bounds = bounds_of(headers, field)
    if bounds.max_lag is not None:
        raise ValueError(
            "weight_version.max_lag: a replica does not know the last version; ask a gateway, or give min_version"
        )
    return bounds
