"""Engines that misbehave, and a gateway before them in this process: an HTTP server that breaks off, overruns or dies.

A fake, since no honest engine does these things when asked to. It decodes as tests/gateway/model_engine.py does.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from ckpt_engine.gateway.app import Gateway
from ckpt_engine.gateway.server import running_gateway
from ckpt_engine.gateway.settings import GatewaySettings
from ckpt_engine.gateway.versions import GatewayVersion
from tests.gateway import model_engine
from tests.ports import free_port
from tests.waiting import until

PROMPT = [1, 2, 3]
BODY = {"prompt": PROMPT, "max_tokens": 12, "return_token_ids": True}
WHOLE = model_engine.decode(PROMPT, 12, 0, frozenset()).tokens

Behaviour = Callable[[int, dict[str, Any]], "AsyncIterator[bytes] | Response"]
"""Of the request with this number: its body to a stream of bytes, or a whole answer."""


class Engine:
    """One misbehaving engine. tls: the files of its certificate and key; none: it is asked in the clear. asked: bodies
    of its requests. inside: how many are open. looked: called when somebody asks whether it is ready."""

    def __init__(self, behave: Behaviour, tls: tuple[Path, Path] | None = None, kind: str = "reference") -> None:
        self.behave = behave
        self._tls, self._kind = tls, kind
        self.version = 4  # that its gate names
        self.looked: Callable[[], None] = lambda: None
        self.server: uvicorn.Server
        self.stack: contextlib.AsyncExitStack
        self.gateway: Gateway
        self.port = 0
        self.dead_worker = False
        self.asked: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.inside = 0

    async def _complete(self, request: Request) -> Response:
        body = await request.json()
        self.asked.append(body)
        self.headers.append(dict(request.headers))
        answer = self.behave(len(self.asked) - 1, body)
        if isinstance(answer, Response):
            return answer
        return StreamingResponse(self._counted(answer), media_type="text/event-stream")

    async def _counted(self, events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        self.inside += 1
        try:
            async for event in events:
                yield event
        finally:
            self.inside -= 1

    def listen(self, stack: contextlib.AsyncExitStack) -> str:
        """Where; on the port of last time if there was one. Nobody else takes it while this one is away."""
        self.port = self.port or free_port()
        bound = socket.create_server(("127.0.0.1", self.port))
        certificate, key = self._tls or (None, None)
        config = uvicorn.Config(
            self.app(),
            log_level="critical",
            lifespan="off",
            timeout_graceful_shutdown=1,
            ssl_certfile=certificate,
            ssl_keyfile=key,
        )
        self.server, self.stack = uvicorn.Server(config), stack
        self.server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign, assignment]
        stack.push_async_callback(_end, self.server, asyncio.ensure_future(self.server.serve(sockets=[bound])))
        return f"http{'s' if self._tls else ''}://127.0.0.1:{self.port}"

    @staticmethod
    def streaming(events: AsyncIterator[bytes], headers: dict[str, str]) -> Response:
        """A stream with headers."""
        return StreamingResponse(events, media_type="text/event-stream", headers=headers)

    def tell(self, **more: Any) -> None:
        """Lets the gateway hear which version it holds now. more: what else is told of it."""
        fleet = self.gateway.placing.fleet
        told = fleet.members[f"http://127.0.0.1:{self.port}"].news
        fleet.tell([replace(told, **{"identity": GatewayVersion(self.version), **more})])

    def die(self) -> None:
        """Soon nobody listens there."""
        self.server.should_exit = True

    async def is_seen_dead_and_comes_back(self) -> None:
        """As far as the gateway knows."""
        member = self.gateway.placing.fleet.members[f"http://127.0.0.1:{self.port}"]
        self.die()
        await until(lambda: member.down)
        self.listen(self.stack)
        await until(lambda: not member.down)

    def more_routes(self) -> list[Route]:
        """Of a kind of engine that has others."""
        return []

    def app(self) -> Starlette:
        async def info(_request: Request) -> Response:
            return JSONResponse({"engine": self._kind, "running": self.inside, "waiting": 0})

        async def ready(_request: Request) -> Response:
            self.looked()
            if self.dead_worker:
                return JSONResponse({"detail": "worker 0 is dead", "reason": "dead_worker"}, 503)
            return JSONResponse({"ready": True}, headers={"x-ckpt-engine-admitted-version": str(self.version)})

        return Starlette(
            routes=[
                *self.more_routes(),
                Route("/v1/completions", self._complete, methods=["POST"]),
                Route("/v1/chat/completions", self._complete, methods=["POST"]),
                Route("/generate", self._complete, methods=["POST"]),
                Route("/inference/v1/generate", self._complete, methods=["POST"]),
                Route("/v1/models", info),
                Route("/info", info),
                Route("/ckpt_engine/ready", ready),
            ]
        )


async def told(body: dict[str, Any], events: int | None = None, done: bool = True) -> AsyncIterator[bytes]:
    """What a sound engine streams; only so many events of it."""
    for place, event in enumerate(model_engine.completions(body, lambda count: [1] * count, 4)):
        if place == events:
            return
        yield b"data: " + json.dumps(event).encode() + b"\n\n"
    if done:
        yield b"data: [DONE]\n\n"


def unmet_event(reason: str) -> bytes:
    """How a gate ends a stream that has begun, when a bound of its caller does not hold any more."""
    error = {"message": f"the replica says {reason}", "code": reason, "status": 409, "reason": reason}
    return b"data: " + json.dumps({"error": error}).encode() + b"\n\ndata: [DONE]\n\n"


def unmet_answer(reason: str) -> Response:
    """How a gate refuses a request whose bounds do not hold."""
    problem = {"status": 409, "detail": f"the replica says {reason}", "reason": reason}
    return JSONResponse(problem, 409, media_type="application/problem+json")


@contextlib.asynccontextmanager
async def asking(*engines: Engine, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a gateway before these engines, in this process."""
    async with contextlib.AsyncExitStack() as stack:
        urls = [engine.listen(stack) for engine in engines]
        made = GatewaySettings(replicas=tuple(urls), jitter=0.0, **{"queue_seconds": 20.0, "probe": 0.2, **settings})
        gateway = await stack.enter_async_context(running_gateway(made))
        for engine in engines:
            engine.gateway = gateway
        transport = httpx.ASGITransport(app=gateway.application())
        client = await stack.enter_async_context(
            httpx.AsyncClient(transport=transport, base_url="http://gateway", timeout=120)
        )
        await until(lambda: not gateway.why_not_ready())
        yield client


async def _end(server: uvicorn.Server, serving: asyncio.Future[None]) -> None:
    server.should_exit = True
    await serving


async def forever() -> AsyncIterator[bytes]:
    while True:
        yield b": nothing\n\n"
        await asyncio.sleep(0.02)
