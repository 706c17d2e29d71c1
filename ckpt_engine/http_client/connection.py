"""One HTTP/1.1 connection to an engine: a request, its answer piece by piece, then the next one. On one event loop.

Every token of the gateway passes here, and every call that an agent makes while its engine is paused, so it does as
little as possible. A general client (httpx) takes more processor time for a token than all the rest of the gateway, and
1.3 ms longer for a call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import httptools

MOST_HELD_BYTES = 1 << 18
"""Bytes of an answer that wait for their reader, above which no more is read and the engine has to wait."""

MOST_HEAD_BYTES = 1 << 16
"""Bytes of a head, or of anything else between two parts of an answer, above which it is refused."""


class WireError(Exception):
    """An answer did not come, or broke off."""


class SilentError(WireError):
    """The engine sent nothing for the whole idle time."""


class ConnectError(WireError):
    """There is no connection; no request was sent."""


class UnreachableError(ConnectError):
    """No server accepts connections at this address."""


class Connection(asyncio.Protocol):
    """A connection that carries one request at a time. on_end: called once when the connection has ended."""

    def __init__(self, on_end: Callable[[Connection], None]) -> None:
        self.status = 0  # of the answer, once `ask` has returned
        self.headers: dict[str, str] = {}  # of the answer, names in lower case
        self._loop = asyncio.get_running_loop()
        self._on_end = on_end
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._arrived: list[bytes] = []
        self._held = self._head = 0
        self._barren = 0  # bytes since the last that were part of an answer
        self._paused = False
        self._head_complete = False
        self._complete = True
        self._reusable = True
        self._error: WireError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._end = self._seconds = 0.0

    # -- what its owner asks

    async def ask(self, head: bytes, body: bytes, seconds: float) -> None:
        """Sends a request and waits for the head of its answer. Raises WireError; SilentError after so many seconds."""
        self.status, self.headers, self._head, self._barren = 0, {}, 0, 0
        self._complete = self._head_complete = False
        if self._transport is not None:
            self._transport.write(head + body)
        while not self._head_complete:
            await self._await_news(seconds)

    async def read(self, seconds: float) -> bytes:
        """The bytes since the last call; empty at the end. Raises WireError as `ask` does."""
        while not self._arrived:
            if self._complete:
                return b""
            await self._await_news(seconds)
        data = self._arrived[0] if len(self._arrived) == 1 else b"".join(self._arrived)
        self._arrived.clear()
        self._held = 0
        if self._paused and self._transport is not None:
            self._paused = False
            self._transport.resume_reading()
        return data

    async def read_all(self, most: int, seconds: float) -> bytes:
        """The rest of an answer. Raises WireError, also for more than `most` bytes."""
        parts, size = [], 0
        while data := await self.read(seconds):
            parts.append(data)
            size += len(data)
            if size > most:
                raise WireError(f"an answer of more than {most} bytes")
        return b"".join(parts)

    def keep_idle(self, seconds: float) -> bool:
        """Whether another request may follow; if so, the connection closes itself after `seconds` without one."""
        if self.closed or not self._complete or self._arrived or not self._reusable:
            return False
        self._until(seconds)
        return True

    @property
    def closed(self) -> bool:
        """Whether the connection can carry no further request."""
        return self._error is not None

    @property
    def unanswered(self) -> bool:
        """Whether no byte of the current answer has come."""
        return not self._head_complete and not self._barren

    def close(self) -> None:
        """Closes at once; an engine then drops the request."""
        self._error = self._error or WireError("it was closed here")  # connection_lost comes only later
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._transport is not None:
            self._transport.abort()

    # -- waiting

    async def _await_news(self, seconds: float) -> None:
        if self._error is not None:
            raise self._error
        self._waiter = self._loop.create_future()
        self._until(seconds)
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _until(self, seconds: float) -> None:
        """Sets the deadline. There is one timer, which is moved when it fires and not with each piece."""
        self._end, self._seconds = self._loop.time() + seconds, seconds
        if self._timer is not None and self._timer.when() > self._end:
            self._timer.cancel()
            self._timer = None
        if self._timer is None:
            self._timer = self._loop.call_at(self._end, self._look)

    def _look(self) -> None:
        self._timer = None
        if self._waiter is None and not self._complete:
            return  # an answer waits for its reader
        if self._loop.time() < self._end:
            self._timer = self._loop.call_at(self._end, self._look)
        elif self._waiter is not None:
            self._fail(SilentError(f"nothing came for {self._seconds:g} s"))
        else:
            self.close()  # no further request came

    def _fail(self, error: WireError) -> None:
        self._error = self._error or error
        self.close()
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # -- what the loop tells

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if self._complete:  # an answer without a request
            self._fail(WireError("it spoke without being asked"))
            return
        self._barren += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(WireError(f"its answer is not HTTP: {error}"))
            return
        if self._barren > MOST_HEAD_BYTES and not self._complete:
            self._fail(WireError(f"it sent more than {MOST_HEAD_BYTES} bytes that are not an answer"))
            return
        if self._held > MOST_HELD_BYTES and not self._paused and not self._complete and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()
        self._wake()

    def eof_received(self) -> None:
        if self._complete:
            self._error = WireError("it closed the connection")

    def connection_lost(self, error: Exception | None) -> None:
        endless = not {"content-length", "transfer-encoding"} & self.headers.keys()
        if not self._complete and self._head_complete and error is None and self._error is None and endless:
            self._complete = True  # such an answer ends with its connection
        why = f": {error}" if error is not None else ""
        self._fail(WireError(f"the connection ended before the answer did{why}"))
        self._on_end(self)

    # -- what the parser tells

    def on_message_begin(self) -> None:
        if self._complete:
            raise ValueError("more than the answer")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head += len(name) + len(value)
        if self._head > MOST_HEAD_BYTES:
            raise ValueError(f"a head of more than {MOST_HEAD_BYTES} bytes")
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:
            self.headers = {}  # another head follows
        else:
            self.status, self._head_complete, self._reusable = status, True, self._parser.should_keep_alive()
            self._barren = 0

    def on_body(self, data: bytes) -> None:
        self._arrived.append(data)
        self._held += len(data)
        self._barren = 0

    def on_message_complete(self) -> None:
        self._complete = self._head_complete


def request_head(method: str, path: str, host: str, headers: Mapping[str, str], body: bytes | None) -> bytes:
    """The bytes before a request's body. Raises ValueError for a header that would end its line."""
    lines = [f"{method} {path} HTTP/1.1", f"host: {host}", *(f"{name}: {value}" for name, value in headers.items())]
    if body is not None:
        lines.append(f"content-length: {len(body)}")
    if any(end in line for line in lines for end in "\r\n\0"):
        raise ValueError("a header has the end of a line in it")
    return "\r\n".join((*lines, "", "")).encode("latin-1")
