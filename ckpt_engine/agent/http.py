"""HTTP calls to an engine on this host, with deadlines, and the parts that most adapters share."""

from __future__ import annotations

import json
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeAlias
from urllib.parse import urlencode

from ckpt_engine.engine.adapter import AdapterSettings, EngineCallError
from ckpt_engine.http_client.connection import WireError
from ckpt_engine.http_client.connections import Answer, Connections
from ckpt_engine.v1 import manager_pb2

ENGINE_SHARE = 0.95
"""Of a deadline: the engine gives up first, so that it can still say so."""

AFTERWARDS_SECONDS = 10.0
"""Time for closing a session or resuming, even if the deadline of the call that it belongs to has passed."""

Ask: TypeAlias = Callable[[float], Awaitable[None]]
"""A call to an engine; takes the seconds that it may take."""


class EngineClient:
    """Calls to the engine at `url`, on the agent's event loop. headers: of every call.

    Each call opens a new connection. Engines write head and body separately, and most of them (uvicorn on a socket
    that was bound for it, as in vLLM) leave Nagle's algorithm on. Over a reused connection the body would wait for the
    40 ms timer of our delayed acknowledgement: for pause, stamp and resume 130 ms of each update without a token. A new
    connection acknowledges at once and costs 0.2 ms on loopback.
    """

    def __init__(self, url: str, headers: Mapping[str, str] | None = None) -> None:
        self.url = url
        self._headers = {"connection": "close", **(headers or {})}
        self._connections = Connections(connect=math.inf)

    async def call(
        self,
        method: str,
        route: str,
        seconds: float,
        body: Mapping[str, Any] | None = None,
        params: Mapping[str, str | int | list[str]] | None = None,
    ) -> Answer:
        """Calls the engine and returns its answer of a status below 300. body: sent as JSON.

        Raises EngineCallError: no answer within `seconds`, or 504 (so that it is unknown what the engine did), or an
        answer with an error status.
        """
        path = f"{route}?{urlencode(params, doseq=True)}" if params else route
        headers, content = self._headers, b""
        if body is not None:
            headers, content = {**headers, "content-type": "application/json"}, json.dumps(body).encode()
        try:
            answer = await self._connections.read_all(
                method, self.url, path, headers, content, max(seconds, 0.0), again=False
            )
        except WireError as error:
            # Also for a refused connection: an engine that has just died may have carried the call out before.
            message = f"{method} {route}: no answer within {seconds:.1f} s: {error}"
            raise EngineCallError(message, answered=False) from error
        if answer.status == 504:
            raise EngineCallError(f"{method} {route}: {_detail(answer)}", answered=False)
        if answer.status >= 300:
            message = f"{method} {route}: {answer.status} {_detail(answer)}"
            raise EngineCallError(message, answered=True, status=answer.status)
        return answer

    def close(self) -> None:
        """Ends all calls."""
        self._connections.close()


class HttpAdapter:
    """The common part of an `EngineAdapter` for engines with HTTP routes of JSON, among them `/health`."""

    def __init__(self, settings: AdapterSettings) -> None:
        self._client = EngineClient(settings.url, settings.headers)

    async def healthy(self, seconds: float) -> bool:
        """See EngineAdapter."""
        try:
            await self._client.call("GET", "/health", seconds)
        except EngineCallError:
            return False
        return True

    guesses: manager_pb2.Guesses | None = None

    async def count_guesses(self, seconds: float) -> None:
        """See EngineAdapter. Counts nothing."""

    def keeps_caches(self, mode: manager_pb2.PauseMode) -> bool:
        """See EngineAdapter."""
        return mode == manager_pb2.PAUSE_MODE_IN_PLACE

    async def close(self) -> None:
        """See EngineAdapter."""
        self._client.close()

    async def _get(self, route: str, seconds: float) -> Any:
        return (await self._client.call("GET", route, seconds)).json()

    async def _post(self, route: str, seconds: float, /, **body: Any) -> None:
        await self._client.call("POST", route, seconds, body)

    async def _post_within(self, route: str, seconds: float, /, **body: Any) -> None:
        """Posts to a route of ours in the engine, with the time that it may take there as `seconds` of the body."""
        await self._post(route, seconds, **{**body, "seconds": seconds * ENGINE_SHARE})

    @asynccontextmanager
    async def _session(self, begin: Ask, end: Ask, until: float) -> AsyncIterator[None]:
        """Opens an engine's own session around a change of its weights; once open, it is always closed.

        begin, end: the calls, which take seconds. until: on the monotonic clock; closing has AFTERWARDS_SECONDS even
        after it. Raises EngineCallError.
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


def _detail(answer: Answer) -> str:
    try:
        return str(answer.json()["detail"])
    except (ValueError, KeyError, TypeError):
        return answer.text[:500]
