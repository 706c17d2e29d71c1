"""HTTP towards an engine on this host: a client, a call with a deadline and a verdict, what most adapters do alike."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

import httpx

from ckpt_engine.engine.adapter import AdapterSettings, EngineCallError

AFTERWARDS_SECONDS = 10.0
"""For closing a session or going on, also when the time of the call that it belongs to has run out."""

Ask: TypeAlias = Callable[[float], Awaitable[None]]
"""Asks an engine for something, within so many seconds."""


def engine_client(url: str, headers: Mapping[str, str] | None = None) -> httpx.AsyncClient:
    """A client for the engine at `url`; every call brings its own timeout. No I/O.

    Each call takes a new connection. Engines answer head and body in two writes, and most of them (uvicorn on a socket
    that was bound for it, as in vLLM) leave Nagle's algorithm on: over a connection that was used before, the body
    waits for the 40 ms timer of our delayed acknowledgement. With pause, stamp and resume that was 130 ms of each
    update in which no token was produced; a new connection acknowledges at once and costs 0.2 ms on loopback.
    """
    return httpx.AsyncClient(
        base_url=url,
        headers=headers,
        timeout=None,
        limits=httpx.Limits(max_keepalive_connections=0),
        trust_env=False,  # a proxy has no business between an agent and its engine
    )


async def engine_call(
    client: httpx.AsyncClient,
    method: str,
    route: str,
    seconds: float,
    body: Mapping[str, Any] | None = None,
    params: Mapping[str, str | int | list[str]] | None = None,
) -> httpx.Response:
    """The engine's answer, if it is a good one and comes within `seconds`. On the agent's event loop.

    Raises EngineCallError: not answered (nobody knows what the engine did; 504 counts as that), or answered with an
    error.
    """
    try:
        async with asyncio.timeout(seconds):  # httpx's own timeouts are for each of its steps
            response = await client.request(method, route, json=body, params=params, timeout=seconds)
    except (httpx.HTTPError, TimeoutError) as error:
        # Also for a refused connection: an engine that has just died may have done it before.
        cause = str(error) or type(error).__name__
        message = f"{method} {route}: no answer within {seconds:.1f} s: {cause}"
        raise EngineCallError(message, answered=False) from error
    if response.status_code == 504:
        raise EngineCallError(f"{method} {route}: {_detail(response)}", answered=False)
    if response.is_error:
        raise EngineCallError(f"{method} {route}: {response.status_code} {_detail(response)}", answered=True)
    return response


class HttpAdapter:
    """The part of an `EngineAdapter` that is the same for engines with HTTP routes of JSON, among them `/health`."""

    def __init__(self, settings: AdapterSettings) -> None:
        self._client = engine_client(settings.url, settings.headers)

    async def healthy(self, seconds: float) -> bool:
        """See EngineAdapter."""
        try:
            await engine_call(self._client, "GET", "/health", seconds)
        except EngineCallError:
            return False
        return True

    async def close(self) -> None:
        """See EngineAdapter."""
        await self._client.aclose()

    async def _get(self, route: str, seconds: float) -> Any:
        return (await engine_call(self._client, "GET", route, seconds)).json()

    async def _post(self, route: str, seconds: float, /, **body: Any) -> None:
        await engine_call(self._client, "POST", route, seconds, body)

    @asynccontextmanager
    async def _session(self, begin: Ask, end: Ask, until: float) -> AsyncIterator[None]:
        """An engine's own session around what changes its weights; once it is open, it is always closed.

        begin, end: ask the engine for it, within seconds. until: on the monotonic clock; closing has AFTERWARDS_SECONDS
        also later. Raises EngineCallError.
        """
        try:
            await begin(until - time.monotonic())
        except EngineCallError as error:
            if not error.answered:
                raise
            # An agent that died in the middle left the session open.
            await end(until - time.monotonic())
            await begin(until - time.monotonic())
        try:
            yield
        finally:
            await end(max(until - time.monotonic(), AFTERWARDS_SECONDS))


def _detail(response: httpx.Response) -> str:
    try:
        return str(response.json()["detail"])
    except (ValueError, KeyError, TypeError):
        return response.text[:500]
