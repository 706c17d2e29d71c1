"""Writes one answer to a caller: whole, or as server-sent events with comments while it waits. On the loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Generator, Iterable
from typing import Any

from starlette.types import Send

from ckpt_engine.gateway import sse
from ckpt_engine.gateway.json_numbers import dump
from ckpt_engine.gateway.refusals import RefusedError
from ckpt_engine.gateway.samples import stamp_versions

PROBLEM = b"application/problem+json"
JSON = b"application/json"


class CallerGoneError(Exception):
    """The caller has disconnected, or does not read its answer."""


class Writer:
    """Writes one answer."""

    def __init__(self, send: Send, idle: float) -> None:
        """send: of the request. idle: seconds that a caller may leave its answer unread."""
        self._send, self._idle = send, idle
        self._lock = asyncio.Lock()
        self.started = False  # whether anything was sent
        self.large = False  # the request was large, and the answer may repeat it: encode on another thread
        self.stamps = False  # the caller looks for the first and the last version where clients of slime do
        self.headers: dict[str, str] = {}  # further headers of an answer, not of a refusal
        self.written = time.monotonic()  # when something was sent last

    async def events(self, contents: Iterable[Any], done: bool = False) -> None:
        """Writes events to the stream, and its headers before the first one."""
        events = [b"data: " + await self.dump(self._stamped(each)) + b"\n\n" for each in contents]
        await self._stream(b"".join(events) + (sse.done() if done else b""), not done)

    async def comment(self) -> None:
        """Writes a comment, so that proxies on the way do not close the connection as idle."""
        await self._stream(sse.COMMENT, True)

    async def raw(self, body: bytes, more: bool) -> None:
        """Writes bytes of an engine's stream."""
        await self._stream(body, more)

    async def whole(self, content: Any) -> None:
        """Writes a whole answer of JSON."""
        await self.answer(200, JSON, await self.dump(self._stamped(content)), {})

    async def refuse(self, refusal: RefusedError, **more: Any) -> None:
        """Writes a refusal: as the answer, or, in a stream that has started, as an event and the end."""
        if self.started:
            await self.events([refusal.event(**more)], done=True)
        else:
            body, self.headers = await self.dump(refusal.problem(**more)), {}
            await self.answer(refusal.status, PROBLEM, body, refusal.headers)

    def _stamped(self, content: Any) -> Any:
        if self.stamps:
            stamp_versions(content)
        return content

    async def dump(self, content: Any) -> bytes:
        """Encodes JSON, on another thread if it may take a while."""
        return await asyncio.to_thread(dump, content, True) if self.large else dump(content)

    async def answer(self, status: int, content_type: bytes, body: bytes, headers: dict[str, str]) -> None:
        """Writes a whole answer of any type."""
        more = [(name.encode(), value.encode()) for name, value in (self.headers | headers).items()]
        standard = [(b"content-type", content_type), (b"content-length", str(len(body)).encode())]
        async with self._lock:
            self.started = True
            await self._put({"type": "http.response.start", "status": status, "headers": [*standard, *more]})
            await self._put({"type": "http.response.body", "body": body})

    async def _stream(self, body: bytes, more: bool) -> None:
        async with self._lock:
            if not self.started:
                self.started = True
                headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]
                headers += [(name.encode(), value.encode()) for name, value in self.headers.items()]
                await self._put({"type": "http.response.start", "status": 200, "headers": headers})
            await self._put({"type": "http.response.body", "body": body, "more_body": more})

    async def _put(self, message: dict[str, Any]) -> None:
        try:
            await within(self._idle, self._send(message))
        except (TimeoutError, OSError) as error:
            raise CallerGoneError("the caller does not read its answer") from error
        self.written = time.monotonic()


async def within(seconds: float, awaitable: Awaitable[None]) -> None:
    """Awaits it for at most `seconds`. Raises TimeoutError. A timer starts only if it has to wait, which hardly any
    piece of an answer does."""
    waiting = awaitable.__await__()
    try:
        first = next(waiting)
    except StopIteration:
        return
    async with asyncio.timeout(seconds):
        await _Rest(waiting, first)


class _Rest:
    """The rest of an awaitable that already waits for `first`."""

    def __init__(self, waiting: Generator[Any, Any, None], first: Any) -> None:
        self._waiting, self._first = waiting, first

    def __await__(self) -> Generator[Any, Any, None]:
        awaited = self._first
        try:
            while True:
                try:
                    sent = yield awaited
                except BaseException as error:
                    awaited = self._waiting.throw(error)
                else:
                    awaited = self._waiting.send(sent)
        except StopIteration:
            return
