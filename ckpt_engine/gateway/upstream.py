"""Requests to engines: one leg, streamed, and how it ended. On the gateway's loop."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping

import httpx

from ckpt_engine.gateway.refusals import ENGINE_REFUSED, RefusedError
from ckpt_engine.gateway.settings import Settings
from ckpt_engine.gateway.sse import DONE, Events, EventTooLargeError
from ckpt_engine.gateway.versions import Identity

VERSION_HEADER, ROOT_HEADER = "x-ckpt-engine-admitted-version", "x-ckpt-engine-admitted-root"
READY_ROUTE = "/ckpt_engine/ready"
DEAD_WORKER = "dead_worker"
"""The gate's reason when the engine's API process has outlived a worker."""
NOBODY = (httpx.ConnectError, httpx.ConnectTimeout)
_BUSY = (429, 503)
_HEADERS = {"content-type": "application/json", "accept-encoding": "identity"}


class NotAdmittedError(Exception):
    """The request is not inside: the replica refuses for now, or nobody answers there. wait: seconds that it named."""

    def __init__(self, why: str, wait: float = 0.0, nobody: bool = False) -> None:
        super().__init__(why)
        self.wait, self.nobody = wait, nobody


class BrokenError(Exception):
    """The request was inside, and its end did not come. silent: nothing came for as long as an engine may be silent."""

    def __init__(self, why: str, silent: bool = False) -> None:
        super().__init__(why)
        self.silent = silent


class Stream:
    """An answer that has begun. admitted: the version under which it was let in, as its headers say."""

    def __init__(self, response: httpx.Response, url: str) -> None:
        self._response = response
        self._url = url
        self.status = response.status_code
        self.content_type = response.headers.get("content-type", "")
        version = response.headers.get(VERSION_HEADER, "")
        self.admitted = Identity(int(version), "", response.headers.get(ROOT_HEADER, "")) if version.isdigit() else None

    async def events(self) -> AsyncGenerator[list[bytes], None]:
        """The data of whole events, those together that came together, without the last one ([DONE]). Raises
        BrokenError if the stream ends before."""
        events, over = Events(), False
        try:
            async for data in self._response.aiter_raw():
                told = events.feed(data)
                if DONE in told:
                    over, told = True, told[: told.index(DONE)]
                if told:
                    yield told
            if over:
                return  # read to its end, so that the connection can be used again
        except (httpx.HTTPError, httpx.StreamError, EventTooLargeError) as error:
            if over:
                return
            raise _broken(self._url, error) from error
        raise BrokenError(f"{self._url}: the stream ended before its last event")

    async def whole(self) -> bytes:
        """All of a body. Raises BrokenError."""
        try:
            return await self._response.aread()
        except (httpx.HTTPError, httpx.StreamError) as error:
            raise _broken(self._url, error) from error


class Upstream:
    """All connections to engines of this process. A context manager; nothing of it outlives the loop."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        timeout = httpx.Timeout(settings.idle, connect=settings.connect)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=512, keepalive_expiry=4.0)
        self._client = httpx.AsyncClient(timeout=timeout, limits=limits, trust_env=False)

    async def __aenter__(self) -> Upstream:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    @contextlib.asynccontextmanager
    async def ask(self, url: str, route: str, body: bytes, headers: Mapping[str, str]) -> AsyncIterator[Stream]:
        """Posts a body; the connection is closed when the block is left, and the engine then drops the request.

        Raises NotAdmittedError, BrokenError (which also stands for an engine's own failure, 500 and above), and
        RefusedError for a request that no engine would take.
        """
        where = f"{url}{route}"
        request = self._client.build_request("POST", where, content=body, headers={**_HEADERS, **headers})
        try:
            response = await self._client.send(request, stream=True)
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout) as error:
            raise _not_admitted(url, error) from error
        except httpx.HTTPError as error:
            raise _broken(url, error) from error
        try:
            await self._check(response, url)
            yield Stream(response, url)
        finally:
            await response.aclose()

    async def _check(self, response: httpx.Response, url: str) -> None:
        if response.status_code < 400:
            return
        try:
            said = (await response.aread())[:4096]
        except httpx.HTTPError:
            said = b""
        words, status = _said(said), response.status_code
        if status in _BUSY:
            wait = response.headers.get("retry-after", "")
            raise NotAdmittedError(words or f"it answers {status}", float(wait) if wait.isdigit() else 0.0)
        if status >= 500:
            raise BrokenError(f"{url} answered {status}: {words}")
        raise RefusedError(status, ENGINE_REFUSED, f"the engine refused it: {words}")

    async def ready(self, url: str) -> tuple[bool, str, Identity | None]:
        """Whether a replica takes or keeps requests, why it does not, and which version it holds if it serves it.
        Raises NotAdmittedError when nobody answers."""
        try:
            response = await self._client.get(f"{url}{READY_ROUTE}", timeout=self._settings.probe)
        except httpx.HTTPError as error:
            raise _not_admitted(url, error) from error
        version = response.headers.get(VERSION_HEADER, "")
        held = Identity(int(version), "", response.headers.get(ROOT_HEADER, "")) if version.isdigit() else None
        # An engine without our gate has no such route: it is there, and says nothing of its weights.
        open_ = response.status_code == 200 or response.status_code == 404
        return open_, "" if open_ else _said(response.content), held

    async def lives(self, url: str) -> bool:
        """Whether anybody takes connections there whose workers live; one that is too busy to answer in time does."""
        try:
            response = await self._client.get(f"{url}{READY_ROUTE}", timeout=self._settings.probe)
        except NOBODY:
            return False
        except httpx.HTTPError:
            return True
        return not (response.status_code == 503 and _reason(response.content) == DEAD_WORKER)

    async def get(self, url: str, route: str) -> httpx.Response:
        """A small answer. Raises httpx.HTTPError."""
        return await self._client.get(f"{url}{route}", timeout=self._settings.probe)


def _said(body: bytes) -> str:
    """The words of an error's body, in any of the forms that engines have."""
    try:
        content = json.loads(body)
    except ValueError:
        return body.decode(errors="replace")[:300]
    if isinstance(content, dict):
        error = content.get("error", content)
        if isinstance(error, dict):
            return str(error.get("detail") or error.get("message") or error)[:1000]
        return str(error)[:1000]
    return str(content)[:300]


def _reason(body: bytes) -> str:
    """A gate's, for programs; empty: it is none's."""
    with contextlib.suppress(ValueError, AttributeError):
        return str(json.loads(body).get("reason", ""))
    return ""


def _broken(url: str, error: Exception) -> BrokenError:
    return BrokenError(f"{url}: {_words(error)}", isinstance(error, httpx.ReadTimeout))


def _not_admitted(url: str, error: Exception) -> NotAdmittedError:
    return NotAdmittedError(f"{url} does not answer: {_words(error)}", nobody=isinstance(error, NOBODY))


def _words(error: Exception) -> str:
    return f"{type(error).__name__}{f' ({error})' if str(error) else ''}"
