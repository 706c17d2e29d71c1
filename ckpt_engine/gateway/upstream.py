"""Sends requests to engines and reads their streams. On the gateway's loop."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Mapping

from ckpt_engine.core import adapters
from ckpt_engine.core.version_bounds import REASONS, VERSION_GONE, VERSION_NOT_YET
from ckpt_engine.gateway.json_numbers import load_answer
from ckpt_engine.gateway.refusals import ENGINE_REFUSED, RefusedError
from ckpt_engine.gateway.settings import GatewaySettings
from ckpt_engine.gateway.sse import DONE, Events, EventTooLargeError
from ckpt_engine.gateway.versions import GatewayVersion
from ckpt_engine.http_client.connection import ConnectError, Connection, SilentError, UnreachableError, WireError
from ckpt_engine.http_client.connections import MOST_ANSWER_BYTES, Answer, Connections

VERSION_HEADER, ROOT_HEADER = "x-ckpt-engine-admitted-version", "x-ckpt-engine-admitted-root"
VERSION_HEADERS = (
    *(VERSION_HEADER, ROOT_HEADER, "x-ckpt-engine-end-version", "x-ckpt-engine-end-root"),
    *(adapters.VERSION_HEADER, adapters.ROOT_HEADER),
)
READY_ROUTE = "/ckpt_engine/ready"
DEAD_WORKER = "dead_worker"
"""The gate's reason when the engine's API process has outlived a worker."""
UNKNOWN_ROUTE = "unknown_route"
"""The gate's reason for a route that its engine does not have."""
_NOT_FOUND = "Not Found"
"""The words of a server about a route; of a model or anything else that it does not know it says which."""
MOST_REFUSAL_BYTES = 1 << 20
_BUSY = (429, 503)
_ERROR = b'{"error"'
"""How the event begins with which a gate ends a stream."""
_HEADERS = {"content-type": "application/json", "accept-encoding": "identity"}


class NotAdmittedError(Exception):
    """The replica did not let the request in: it refuses for now, or does not answer."""

    def __init__(self, why: str, wait: float = 0.0, unreachable: bool = False, reason: str = "") -> None:
        super().__init__(why)
        self.wait = wait  # seconds, from Retry-After
        self.reason = reason  # its gate's; empty: it is not from a gate
        self.unreachable = unreachable  # nothing listens at its address


class NoRouteError(RefusedError):
    """The replica's server has no such route: its model or its options do not need it."""


class UnmetError(Exception):
    """The replica's gate does not answer a request, or the rest of it, since its versions are not those that the
    request accepts. All that came before is."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason, self.detail = reason, detail

    @property
    def may_have_begun(self) -> bool:
        """Whether the engine may have begun to answer the request."""
        return self.reason not in (VERSION_NOT_YET, VERSION_GONE)

    def refusal(self) -> RefusedError:
        """The same for the caller."""
        return RefusedError(409, self.reason, self.detail)


class BrokenError(Exception):
    """The request was inside, and its answer did not end properly."""

    def __init__(self, why: str, silent: bool = False) -> None:
        super().__init__(why)
        self.silent = silent  # nothing came for as long as an engine may be silent


class Stream:
    """An engine's answer, from its headers on."""

    def __init__(self, connection: Connection, url: str, idle: float) -> None:
        """idle: seconds that an engine may be silent."""
        self._connection, self._url, self._idle = connection, url, idle
        self.status = connection.status
        self.content_type = connection.headers.get("content-type", "")
        headers = connection.headers
        self.admitted = _admitted_version(headers)  # the version that the gate named when it let the request in
        self.adapter = headers.get(adapters.VERSION_HEADER, "")  # the version of an adapter that answers, by its name
        self.version_headers = {name: headers[name] for name in VERSION_HEADERS if name in headers}

    async def events(self, done: bool = True) -> AsyncGenerator[list[bytes], None]:
        """Yields the data of whole events, in batches as they arrive, without the last one ([DONE]). Raises BrokenError
        if the stream ends before that, and UnmetError. done: false for a stream that has no such event."""
        if not self.content_type.startswith("text/event-stream"):
            detail = f"answered with {self.content_type or 'nothing'} where a stream of events was asked for"
            raise BrokenError(f"{self._url} {detail}")
        events, finished = Events(), False
        try:
            while data := await self._connection.read(self._idle):
                batch = events.feed(data)
                if DONE in batch:
                    finished, batch = True, batch[: batch.index(DONE)]
                unmet = next((place for place, each in enumerate(batch) if each.startswith(_ERROR)), len(batch))
                if unmet < len(batch) and (reason := _bound_reason(batch[unmet])):
                    if unmet:
                        yield batch[:unmet]
                    raise UnmetError(reason, _error_message(batch[unmet]))
                if batch:
                    yield batch
            if finished or not done:
                return  # read to its end, so that the connection can be used again
        except (WireError, EventTooLargeError) as error:
            if finished:
                return
            raise _broken(self._url, error) from error
        raise BrokenError(f"{self._url}: the stream ended before its last event")

    async def whole(self) -> bytes:
        """Reads the whole body. Raises BrokenError."""
        try:
            return await self._connection.read_all(MOST_ANSWER_BYTES, self._idle)
        except WireError as error:
            raise _broken(self._url, error) from error


class Upstream:
    """This process's connections to engines. A context manager; it closes all of them."""

    def __init__(self, settings: GatewaySettings) -> None:
        self._settings = settings
        self._connections = Connections(settings.connect)

    async def __aenter__(self) -> Upstream:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._connections.close()

    @contextlib.asynccontextmanager
    async def ask(
        self, url: str, route: str, body: bytes, headers: Mapping[str, str], again: bool = True
    ) -> AsyncIterator[Stream]:
        """Posts a body. Leaving the block before the answer's end closes the connection, so that the engine drops the
        request. again: whether to post it a second time if a reused connection ends before any byte of the answer.

        Raises NotAdmittedError, UnmetError, BrokenError (also for an engine's own failure, 500 and above), and
        RefusedError for a request that no engine would take.
        """
        idle = self._settings.idle
        try:
            connection = await self._connections.ask("POST", url, route, {**_HEADERS, **headers}, body, idle, again)
        except ConnectError as error:
            raise _not_admitted(url, error) from error
        except WireError as error:
            raise _broken(url, error) from error
        try:
            if connection.status >= 400:
                await self._refuse(connection, url)
            yield Stream(connection, url, idle)
        finally:
            self._connections.done(url, connection)

    async def _refuse(self, connection: Connection, url: str) -> None:
        try:
            body = await connection.read_all(MOST_REFUSAL_BYTES, self._settings.idle)
        except WireError:
            body = b""
        words, status = _error_message(body[:4096]), connection.status
        if status in _BUSY:
            wait = connection.headers.get("retry-after", "")
            seconds = float(wait) if wait.isdigit() else 0.0
            raise NotAdmittedError(words or f"it answers {status}", seconds, reason=_reason(body))
        if status == 409 and (reason := _bound_reason(body)):
            raise UnmetError(reason, words)
        if status >= 500:
            raise BrokenError(f"{url} answered {status}: {words}")
        missing = (status == 404 and words == _NOT_FOUND) or (status == 403 and _reason(body) == UNKNOWN_ROUTE)
        refusal = NoRouteError if missing else RefusedError
        raise refusal(status, ENGINE_REFUSED, f"the engine refused it: {words}")

    async def ready(self, url: str) -> tuple[bool, str, GatewayVersion | None]:
        """Asks whether a replica takes or keeps requests, why not, and which version it serves. Raises NotAdmittedError
        if it does not answer."""
        try:
            answer = await self.get(url, READY_ROUTE)
        except WireError as error:
            raise _not_admitted(url, error) from error
        # An engine without our gate has no such route: it serves, and names no version.
        open_ = answer.status in (200, 404)
        return open_, "" if open_ else _error_message(answer.content), _admitted_version(answer.headers)

    async def lives(self, url: str) -> bool:
        """Whether an engine with living workers takes connections there, even if it is too busy to answer in time."""
        try:
            answer = await self.get(url, READY_ROUTE)
        except UnreachableError:
            return False
        except WireError:
            return True
        return not (answer.status == 503 and _reason(answer.content) == DEAD_WORKER)

    async def get(self, url: str, route: str) -> Answer:
        """Gets a small answer. Raises WireError."""
        return await self._connections.get(url, route, self._settings.probe)


def _admitted_version(headers: Mapping[str, str]) -> GatewayVersion | None:
    """The version that a gate names in an answer's headers; None: it names none."""
    version = headers.get(VERSION_HEADER, "")
    return GatewayVersion(int(version), "", headers.get(ROOT_HEADER, "")) if version.isdecimal() else None


def _error_message(body: bytes) -> str:
    """The message in an error's body, in any of the forms that engines have."""
    try:
        content = load_answer(body)
    except ValueError:
        return body.decode(errors="replace")[:300]
    if isinstance(content, dict):
        error = content.get("error", content)
        if isinstance(error, dict):
            return str(error.get("detail") or error.get("message") or error)[:1000]
        return str(error)[:1000]
    return str(content)[:300]


def _reason(body: bytes) -> str:
    """The reason in a gate's refusal, or in its event of a stream; empty: it is not from a gate."""
    with contextlib.suppress(ValueError, AttributeError, LookupError, TypeError):
        content = load_answer(body)
        return str(content.get("reason") or content["error"].get("reason", ""))
    return ""


def _bound_reason(body: bytes) -> str:
    """The same if the gate refused it for the versions that the request accepts; else empty."""
    reason = _reason(body)
    return reason if reason in REASONS else ""


def _broken(url: str, error: Exception) -> BrokenError:
    return BrokenError(f"{url}: {error}", isinstance(error, SilentError))


def _not_admitted(url: str, error: Exception) -> NotAdmittedError:
    return NotAdmittedError(f"{url} does not answer: {error}", unreachable=isinstance(error, UnreachableError))
