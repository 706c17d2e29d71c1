"""Connections to engines: idle ones are used first. On one event loop."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from typing import Any
from urllib.parse import urlsplit

from ckpt_engine.core.json_text import load_json
from ckpt_engine.http_client.connection import (
    ConnectError,
    Connection,
    SilentError,
    UnreachableError,
    WireError,
    request_head,
)

KEPT_SECONDS = 4.0
"""Seconds that an idle connection is kept: engines close theirs after 5 s or later."""

MOST_KEPT = 512
"""Most idle connections to one engine."""

MOST_ANSWER_BYTES = 64 << 20
"""Most bytes of an answer that is read as a whole."""

MOST_SMALL_BYTES = 4 << 20
"""Most bytes of a small answer; an engine's metrics and its list of routes have up to 1 MiB."""


@dataclass(frozen=True)
class HttpOrigin:
    """Where connections go, and what all requests on them have in common."""

    secure: bool
    host: str
    port: int
    authority: str  # for the Host header
    path: str  # before every route


@dataclass(frozen=True)
class Answer:
    """A small answer, read as a whole."""

    status: int
    headers: Mapping[str, str]  # names in lower case
    content: bytes

    @property
    def text(self) -> str:
        """Text of the content."""
        return self.content.decode(errors="replace")

    def json(self) -> Any:
        """The content as JSON. Raises ValueError."""
        return load_json(self.content)


@lru_cache(1024)
def origin_of(url: str) -> HttpOrigin:
    """The origin of a URL. Raises ConnectError for anything but an HTTP URL."""
    if not all("!" <= each <= "~" for each in url):
        raise ConnectError(
            f"{url!r} is not a URL: all but visible ASCII has to be escaped in it (%.., and xn-- in names)"
        )
    try:
        parts = urlsplit(url)
        secure, port = parts.scheme == "https", parts.port
    except ValueError as error:
        raise ConnectError(f"{url!r} is not a URL: {error}") from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConnectError(f"{url!r} is not an HTTP URL")
    authority = parts.netloc.rpartition("@")[2]
    return HttpOrigin(secure, parts.hostname, port or (443 if secure else 80), authority, parts.path.rstrip("/"))


@cache
def authorities() -> ssl.SSLContext:
    """The certificates that engines' must be signed by: this machine's, or those that SSL_CERT_FILE and SSL_CERT_DIR
    name."""
    return ssl.create_default_context()


class Connections:
    """The connections of one owner to engines.

    connect: seconds for connecting; a call waits no longer for its connection than for its answer.
    """

    def __init__(self, connect: float) -> None:
        self._connect = connect
        self._free: dict[HttpOrigin, list[Connection]] = {}
        self._all: set[Connection] = set()

    async def ask(
        self,
        method: str,
        url: str,
        route: str,
        headers: Mapping[str, str],
        body: bytes | None,
        idle: float,
        again: bool = True,
    ) -> Connection:
        """Sends a request and returns once the head of its answer has come. Give the connection back with `done`.

        idle: seconds that an engine may be silent. again: try an idle connection first; if it ends before a byte of the
        answer, as when the engine closes it at that moment, send the request once more on a new one. False: use a new
        connection, once. Raises ConnectError if no request was sent; WireError.
        """
        origin = origin_of(url)
        head = request_head(method, origin.path + route, origin.authority, headers, body)
        first_error: WireError | None = None
        if again and (idle_connection := self._take_idle(origin)) is not None:
            try:
                return await _ask(idle_connection, head, body, idle)
            except WireError as error:
                if isinstance(error, SilentError) or not idle_connection.unanswered:
                    raise
                first_error = error
        try:
            connection = await self._open(origin, min(self._connect, idle))
        except ConnectError as error:
            if first_error is not None and body is not None:
                raise first_error from error  # the engine may have died of what it was asked
            raise
        return await _ask(connection, head, body, idle)

    async def get(self, url: str, route: str, seconds: float) -> Answer:
        """Gets a small answer as a whole. seconds: for the answer, without connecting. Raises WireError."""
        limit = min(self._connect, seconds) + seconds
        return await self.read_all("GET", url, route, {}, None, seconds, limit=limit, most=MOST_SMALL_BYTES)

    async def read_all(
        self,
        method: str,
        url: str,
        route: str,
        headers: Mapping[str, str],
        body: bytes | None,
        seconds: float,
        *,
        limit: float = 0.0,
        most: int = MOST_ANSWER_BYTES,
        again: bool = True,
    ) -> Answer:
        """Reads an answer as a whole. seconds: that an engine may be silent. limit: seconds for the whole call with
        connecting; 0: `seconds`. most: bytes of the answer. again: as for `ask`. Raises WireError."""
        limit = limit or seconds
        headers = {"accept-encoding": "identity", **headers}
        try:
            async with asyncio.timeout(limit):
                connection = await self.ask(method, url, route, headers, body, seconds, again)
                try:
                    content = await connection.read_all(most, seconds)
                    return Answer(connection.status, connection.headers, content)
                finally:
                    self.done(url, connection)
        except TimeoutError as error:
            raise SilentError(f"no whole answer within {limit:g} s") from error

    def done(self, url: str, connection: Connection) -> None:
        """Keeps the connection for the next request if its answer was read to its end, and closes it if not."""
        origin = origin_of(url)
        if len(self._free.get(origin, ())) < MOST_KEPT and connection.keep_idle(KEPT_SECONDS):
            self._free.setdefault(origin, []).append(connection)
        else:
            connection.close()

    def close(self) -> None:
        """Closes all of them."""
        for connection in list(self._all):
            connection.close()

    def _take_idle(self, origin: HttpOrigin) -> Connection | None:
        free = self._free.get(origin, [])
        while free:
            connection = free.pop()  # the one that was used last: the others may close themselves
            if not connection.closed:
                return connection
        return None

    async def _open(self, origin: HttpOrigin, seconds: float) -> Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(seconds):
                _, connection = await loop.create_connection(
                    lambda: Connection(partial(self._forget, origin)),
                    origin.host,
                    origin.port,
                    ssl=authorities() if origin.secure else None,
                    happy_eyeballs_delay=0.25,
                )
        except TimeoutError as error:
            raise UnreachableError(f"no connection within {seconds:g} s") from error
        except ssl.SSLError as error:
            raise ConnectError(f"no TLS with it: {error}") from error
        except ConnectionRefusedError as error:
            raise UnreachableError("nothing listens there") from error
        except (OSError, UnicodeError) as error:
            raise UnreachableError(f"no connection: {error}") from error
        if connection.closed:  # its end has been reported already
            raise ConnectError("the connection ended before anything was asked")
        self._all.add(connection)
        return connection

    def _forget(self, origin: HttpOrigin, connection: Connection) -> None:
        self._all.discard(connection)
        free = self._free.get(origin, [])
        if connection in free:
            free.remove(connection)
        if not free:
            self._free.pop(origin, None)


async def _ask(connection: Connection, head: bytes, body: bytes | None, idle: float) -> Connection:
    try:
        await connection.ask(head, body or b"", idle)
    except BaseException:
        connection.close()
        raise
    return connection
