"""The gateway's HTTP side: reads and bounds requests, has them answered, and reports health. On the gateway's loop."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ckpt_engine.core.names import some
from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.core.version_bounds import FIELD
from ckpt_engine.gateway import refusals
from ckpt_engine.gateway.answering import Answering
from ckpt_engine.gateway.chat_text import CHAT_ROUTE
from ckpt_engine.gateway.dialect import ParsedRequest
from ckpt_engine.gateway.door import GatewayDoor
from ckpt_engine.gateway.fleet import FleetReplica
from ckpt_engine.gateway.json_numbers import dump, load_answer, load_request
from ckpt_engine.gateway.large_json import LARGE_BYTES, values_of
from ckpt_engine.gateway.passing import PassedRequest
from ckpt_engine.gateway.placing import Placing
from ckpt_engine.gateway.refusals import RefusedError, bad_request
from ckpt_engine.gateway.rendered_request import RenderedRequest
from ckpt_engine.gateway.responses import RESPONSES_ROUTE, PassedResponse
from ckpt_engine.gateway.wishes import once, wishes_of
from ckpt_engine.gateway.writing import PROBLEM, CallerGoneError, Writer

log = logging.getLogger("ckpt_engine.gateway")

PASSED = (CHAT_ROUTE,)
"""Routes for requests that are passed on unchanged, unless an engine renders them."""

NO_MODELS = RefusedError(503, refusals.NO_REPLICA, "no replica has said yet which model it serves")

DROP_SECONDS = 2.0
"""How long the body of a refused request is still read."""

Endpoint = Callable[[Scope, Receive, Send], Awaitable[None]]


class RequestWork(Protocol):
    """The work of answering one request."""

    @property
    def streams(self) -> bool: ...

    async def work(self) -> None: ...

    def so_far(self) -> dict[str, Any]: ...


class Gateway:
    """The requests of this process."""

    def __init__(self, placing: Placing, door: GatewayDoor) -> None:
        self.placing, self._door = placing, door
        self.stopping = False  # new requests are refused
        self.ending = asyncio.Event()  # running requests end now, with the tokens that they have
        self.inside = 0  # requests that run or wait
        self._empty = asyncio.Event()  # set while no request is inside
        self._empty.set()
        self._models: tuple[bytes, str] | None = None  # body and content type of the last good answer to /v1/models
        self._could_serve = time.monotonic()

    def application(self) -> ASGIApp:
        """The ASGI application."""
        engines = self.placing.engines
        posts = [
            Route(route, _Endpoint(self._post), methods=["POST"])
            for route in (*engines.dialects, *PASSED, *sorted(engines.passed))
        ]
        gets = [
            Route("/v1/models", _Endpoint(self._readers_only(self._list_models)), methods=["GET"]),
            Route("/v1/models/{name:path}", _Endpoint(self._readers_only(self._one_model)), methods=["GET"]),
            Route("/livez", _Endpoint(self._alive), methods=["GET"]),
            Route("/readyz", _Endpoint(self._ready), methods=["GET"]),
            Route("/health", _Endpoint(self._ready), methods=["GET"]),
            Route("/metrics", _Endpoint(self._readers_only(self._metrics)), methods=["GET"]),
        ]
        routes = [*posts, *gets]

        async def missing(request: Request, error: Exception) -> Response:
            known_routes = ", ".join(f"{'/'.join(sorted(route.methods or ()))} {route.path}" for route in routes)
            status = getattr(error, "status_code", 404)
            detail = f"{request.method} {request.url.path}: there is no such route; there are {known_routes}"
            problem = RefusedError(status, refusals.NO_ROUTE, detail).problem()
            return JSONResponse(problem, status, getattr(error, "headers", None), PROBLEM.decode())

        others = Starlette(routes=routes, exception_handlers={404: missing, 405: missing})
        others.router.redirect_slashes = False  # a client that follows no redirect would not see why it failed
        post_paths = {route.path for route in posts}

        async def application(scope: Scope, receive: Receive, send: Send) -> None:
            # Starlette wraps `send` three times, which costs for each token.
            if scope["type"] == "http" and scope["method"] == "POST" and scope["path"] in post_paths:
                await self._post(scope, receive, send)
            else:
                await others(scope, receive, send)

        return application

    async def idle(self, seconds: float) -> bool:
        """Waits up to `seconds` until no request runs. Returns whether none does."""
        try:
            await asyncio.wait_for(self._empty.wait(), seconds)
        except TimeoutError:
            return False
        return True

    def _enter(self, step: int) -> None:
        self.inside += step
        self.placing.metrics.inside.inc(step)
        if self.inside:
            self._empty.clear()
        else:
            self._empty.set()

    # -- answering

    async def _post(self, scope: Scope, receive: Receive, send: Send) -> None:
        settings, metrics, route = self.placing.settings, self.placing.metrics, scope["path"]
        writer, outcome, coming = Writer(send, settings.idle), "whole", RequestMessages(receive)
        try:
            self._admit()
            self._enter(1)
            try:
                headers = once(Headers(scope=scope).items())
                authorized = self._door.check(headers)
                data = await read_body(coming, headers, settings.body_bytes, settings.idle)
                writer.large = len(data) >= LARGE_BYTES
                prepare = partial(self._work, route, data, headers, authorized, writer)
                work = await asyncio.to_thread(prepare) if writer.large else prepare()
                outcome = await self._run(work, writer, receive)
            finally:
                self._enter(-1)
        except RefusedError as refused:
            outcome = refused.reason
            await drop_body(coming, Headers(scope=scope))
            await _quietly(writer.refuse(refused))
        except CkptEngineError as error:
            outcome = "unauthenticated"
            await drop_body(coming, Headers(scope=scope))
            await _quietly(writer.refuse(RefusedError(self._door.status_of(error), outcome, error.problem.message)))
        except CallerGoneError:
            outcome = "caller_gone"
        metrics.requests.labels(route, outcome).inc()

    def _admit(self) -> None:
        if self.stopping:
            raise RefusedError(503, refusals.STOPPING, "this gateway is stopping", {"retry-after": "1"})
        most = self.placing.settings.requests
        if self.inside >= most:
            detail = f"{self.inside} requests run or wait already, this process carries {most}"
            raise RefusedError(429, refusals.TOO_MANY, detail, {"retry-after": "1"})

    def _work(
        self, route: str, data: bytes, headers: Mapping[str, str], authorized: bool, writer: Writer
    ) -> RequestWork:
        """Parses a request. May run on any thread, since a large body takes a while."""
        body = body_of(data, self.placing.settings.body_values)
        writer.stamps = FIELD in body
        field = body.pop(FIELD, None)
        engines = self.placing.engines
        dialect = engines.dialects.get(route)
        request: ParsedRequest | None = None if dialect is None else dialect.read(body)
        prompt = request.singles[0].prompt if request else ()
        session = request.session if request else str(body.get("user") or "")
        key = session or _text_key(body, request)
        wishes = wishes_of(headers, field, key, prompt, self.placing.settings, authorized, body.get("model"))
        speakers = engines.speakers.get(route, frozenset())
        forms = engines.rendered.get(route, {})
        if dialect is None and wishes.resume and (forms or (route == CHAT_ROUTE and engines.chat_texts)):
            return RenderedRequest(self.placing, route, forms, body, wishes, writer)
        if request is None or request.whole or dialect is None:
            able = frozenset[str]() if dialect is not None and dialect.of_any_engine else speakers
            if dialect is None:
                able = engines.passed.get(route, frozenset())
            passed = PassedResponse if route == RESPONSES_ROUTE else PassedRequest
            return passed(self.placing, route, body, wishes.to(able), writer)
        return Answering(self.placing, dialect, request, wishes.to(speakers), writer)

    async def _run(self, work: RequestWork, writer: Writer, receive: Receive) -> str:
        """Runs a request until it ends, its caller disconnects, or this gateway ends. Returns how it ended."""
        tasks = [
            asyncio.ensure_future(each)
            for each in (work.work(), _until_disconnected(receive), self.ending.wait(), self._comment(work, writer))
        ]
        running, disconnect, ending, _ = tasks
        try:
            await asyncio.wait((running, disconnect, ending), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
        error = results[0]
        if error is None:
            return "whole"
        if disconnect.done() and not disconnect.cancelled():
            raise CallerGoneError("the caller has gone")
        if isinstance(error, asyncio.CancelledError):
            error = RefusedError(503, refusals.STOPPING, "this gateway stopped while the request ran")
        if not isinstance(error, (RefusedError, CallerGoneError)):
            log.error("a request failed", exc_info=error)
            error = RefusedError(500, refusals.INTERNAL, f"the gateway failed: {type(error).__name__}")
        if isinstance(error, RefusedError):
            await _quietly(writer.refuse(error, **work.so_far()))
            return error.reason
        raise error

    async def _comment(self, work: RequestWork, writer: Writer) -> None:
        """Writes a comment into a stream whenever nothing was written for `settings.comment` seconds."""
        seconds = self.placing.settings.comment
        while work.streams:
            remaining = writer.written + seconds - time.monotonic()
            if remaining > 0:
                await asyncio.sleep(remaining)
            else:
                await _quietly(writer.comment())

    # -- about itself

    def _readers_only(self, function: Endpoint) -> Endpoint:
        """Wraps an endpoint so that it requires read access."""

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            try:
                self._door.check(Headers(scope=scope), look=True)
            except CkptEngineError as error:
                refusal = RefusedError(self._door.status_of(error), "unauthenticated", error.problem.message)
                await Writer(send, self.placing.settings.idle).refuse(refusal)
            else:
                await function(scope, receive, send)

        return answer

    async def _list_models(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer = Writer(send, self.placing.settings.idle)
        await self._ask_models()
        if self._models is None:
            await writer.refuse(NO_MODELS)
        else:
            await writer.answer(200, self._models[1].encode(), self._models[0], {})

    async def _one_model(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers from the list: some engines have no route for one model."""
        writer, name = Writer(send, self.placing.settings.idle), scope["path_params"]["name"]
        await self._ask_models()
        if self._models is None:
            await writer.refuse(NO_MODELS)
            return
        try:
            models = {model["id"]: model for model in load_answer(self._models[0])["data"]}
        except (ValueError, LookupError, TypeError):
            models = {}
        if name in models:
            await writer.whole(models[name])
        else:
            detail = f"there is no model {name[:200]!r}; there are {some(sorted(models))}"
            await writer.refuse(RefusedError(404, refusals.NO_MODEL, detail))

    async def _ask_models(self) -> None:
        """Asks a replica for its models. Those of different replicas differ in the adapters that they have, so then all
        are asked."""
        now, fleet = time.monotonic(), self.placing.fleet
        members = [each for each in fleet.members.values() if each.news.url and now >= each.shunned_until]
        if fleet.shelves:
            answers = [each for each in await asyncio.gather(*map(self._models_of, members)) if each is not None]
            self._models = all_models(answers) or self._models
            return
        for member in members:
            if (answer := await self._models_of(member)) is not None:
                self._models = answer
                return

    async def _models_of(self, member: FleetReplica) -> tuple[bytes, str] | None:
        """Body and content type of a replica's answer; None: it gave none."""
        try:
            answer = await self.placing.upstream.get(member.news.url, "/v1/models")
        except Exception as error:
            log.info("no models from %s: %s", member.name, error)
            return None
        if answer.status != 200:
            return None
        return answer.content, answer.headers.get("content-type", "application/json")

    async def _alive(self, scope: Scope, receive: Receive, send: Send) -> None:
        await Writer(send, self.placing.settings.idle).whole({"alive": True})

    async def _ready(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer, why = Writer(send, self.placing.settings.idle), self.why_not_ready()
        if why:
            await writer.refuse(RefusedError(503, "not_ready", why))
        else:
            await writer.whole({"ready": True})

    def why_not_ready(self) -> str:
        """Why this gateway can neither answer requests nor hold them for a while; empty: it can."""
        fleet, now, after = self.placing.fleet, time.monotonic(), self.placing.settings.unready_after
        if self.stopping:
            return "this gateway is stopping"
        if not fleet.heard:
            return "the manager has not told of the replicas yet"
        if fleet.could_serve(now):
            self._could_serve = now
        seconds = now - self._could_serve
        return "" if seconds < after else f"no replica could serve for {seconds:.0f} s"

    async def look_after(self) -> None:
        """Keeps track of when a replica could last serve. Runs until it is cancelled."""
        while True:
            self.why_not_ready()
            await asyncio.sleep(1.0)

    async def _metrics(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = self.placing.metrics.exposition()
        await Writer(send, self.placing.settings.idle).answer(200, b"text/plain; version=0.0.4", body, {})


def all_models(answers: Sequence[tuple[bytes, str]]) -> tuple[bytes, str] | None:
    """Joins replicas' lists of models, each given as body and content type, by the models' names; None: there are
    none."""
    if len({body for body, _ in answers}) <= 1:
        return next(iter(answers), None)
    try:
        lists = [load_answer(body) for body, _ in answers]
        models = {model["id"]: model for each in lists for model in each["data"]}
    except (ValueError, LookupError, TypeError):
        return answers[0]
    return dump({**lists[0], "data": list(models.values())}), answers[0][1]


class _Endpoint:
    """The ASGI application of one route. Starlette would call a plain function with a request object instead."""

    def __init__(self, function: Endpoint) -> None:
        self._function = function

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._function(scope, receive, send)


class RequestMessages:
    """The messages of a request."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self.whole = False  # whether the whole body has come, or the caller has disconnected

    async def __call__(self) -> Message:
        """Receives the next message."""
        message = await self._receive()
        self.whole = not message.get("more_body", False)
        return message


async def read_body(receive: Receive, headers: Mapping[str, str], most: int, seconds: float) -> bytes:
    """Reads a request's body of up to `most` bytes within `seconds`.

    Raises RefusedError (too large, too slow, compressed or empty), CallerGoneError."""
    if headers.get("content-encoding", "identity").lower() != "identity":
        detail = f"the body is compressed (content-encoding: {headers['content-encoding']}); send it as it is"
        raise RefusedError(415, refusals.BAD_REQUEST, detail)
    announced = headers.get("content-length", "0")
    size, parts = 0, []
    more = not (announced.isdigit() and int(announced) > most)
    size = 0 if more else int(announced)
    try:
        async with asyncio.timeout(seconds):
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise CallerGoneError("the caller has gone")
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                more = message.get("more_body", False) and size <= most
    except TimeoutError:
        detail = f"the body did not come within {seconds:g} s: {size} bytes of it did"
        raise RefusedError(408, refusals.TOO_SLOW, detail, {"connection": "close"}) from None
    if size > most:
        detail = f"a body of {size} bytes or more; {most} are the most (--body-bytes)"
        raise RefusedError(413, refusals.TOO_LARGE, detail, {"connection": "close"})  # the rest of it is not read
    if not size:
        raise bad_request("there is no body: send a JSON object")
    return b"".join(parts)


async def drop_body(coming: RequestMessages, headers: Mapping[str, str]) -> None:
    """Reads and drops the body of a refused request for a moment: a client that is still writing when its connection
    closes never reads the answer. A client that sent Expect has not written its body."""
    if "expect" in headers:
        return
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DROP_SECONDS):
            while not coming.whole:
                await coming()


def body_of(data: bytes, most: int) -> dict[str, Any]:
    """Parses a request's JSON object. Raises RefusedError if it is none, or has more values than `most`."""
    if len(data) > most and (count := values_of(data)) > most:
        detail = f"a body of {count} values; {most} are the most (--body-values)"
        raise RefusedError(413, refusals.TOO_LARGE, detail)
    try:
        body = load_request(data)
    except ValueError as error:
        raise bad_request(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise bad_request("the body is not a JSON object")
    return body


def _text_key(body: Mapping[str, Any], request: ParsedRequest | None) -> str:
    """The routing key of a request whose prompt is text: the beginning of it; empty for prompts of ids."""
    if request is not None:
        return ""
    return json.dumps(body.get("messages") or body.get("prompt") or body.get("text") or body.get("input") or "")[:512]


async def _until_disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue


async def _quietly(writing: Awaitable[None]) -> None:
    """Writes, and ignores that the caller has disconnected."""
    try:
        await writing
    except CallerGoneError as error:
        log.info("%s", error)
