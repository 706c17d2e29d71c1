"""One answer on its way to a caller: at once, or as server-sent events with comments while it waits. On the loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Generator, Iterable
from typing import Any

from starlette.types import Send

from ckpt_engine.gateway import sse
from ckpt_engine.gateway.json_numbers import dump
from ckpt_engine.gateway.refusals import RefusedError

PROBLEM = b"application/problem+json"
JSON = b"application/json"


class CallerGoneError(Exception):
    """The caller does not take what it is sent."""


class Writer:
    """Writes one answer.

    send: of the request. idle: seconds that a caller may leave its answer unread.
    """

    def __init__(self, send: Send, idle: float) -> None:
        self._send, self._idle = send, idle
        self._one = asyncio.Lock()
        self.started = False
        self.large = False  # whether the request was, which an answer may repeat
        self.headers: dict[str, str] = {}  # for an answer, beside its own; not for a refusal
        self.written = time.monotonic()

    async def events(self, contents: Iterable[Any], done: bool = False) -> None:
        """Adds events to the stream, which begins with the first one."""
        events = [b"data: " + await self.dump(each) + b"\n\n" for each in contents]
        await self._stream(b"".join(events) + (sse.done() if done else b""), not done)

    async def comment(self) -> None:
        """Says nothing, so that nobody between here and the caller thinks that the connection is dead."""
        await self._stream(sse.COMMENT, True)

    async def raw(self, body: bytes, more: bool) -> None:
        """Bytes of a stream that an engine wrote."""
        await self._stream(body, more)

    async def whole(self, content: Any) -> None:
        """Everything at once."""
        await self.answer(200, JSON, await self.dump(content), {})

    async def refuse(self, refused: RefusedError, **more: Any) -> None:
        """An answer that is none; in a stream that has begun an event that says so, and the end."""
        if self.started:
            await self.events([refused.event(**more)], done=True)
        else:
            body, self.headers = await self.dump(refused.problem(**more)), {}
            await self.answer(refused.status, PROBLEM, body, refused.headers)

    async def dump(self, content: Any) -> bytes:
        """JSON; on another thread where it may take a while."""
        return await asyncio.to_thread(dump, content, True) if self.large else dump(content)

    async def answer(self, status: int, content_type: bytes, body: bytes, headers: dict[str, str]) -> None:
        """Any whole answer."""
        more = [(name.encode(), value.encode()) for name, value in (self.headers | headers).items()]
        named = [(b"content-type", content_type), (b"content-length", str(len(body)).encode()), *more]
        async with self._one:
            self.started = True
            await self._put({"type": "http.response.start", "status": status, "headers": named})
            await self._put({"type": "http.response.body", "body": body})

    async def _stream(self, body: bytes, more: bool) -> None:
        async with self._one:
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
    """Awaits it for so long at most. Raises TimeoutError. Hardly any piece of an answer has to wait for its caller, and
    those that do not are spared a timer."""
    waiting = awaitable.__await__()
    try:
        first = next(waiting)
    except StopIteration:
        return
    async with asyncio.timeout(seconds):
        await _Rest(waiting, first)


class _Rest:
    """What is left to await of something that waits for `first` already."""

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
