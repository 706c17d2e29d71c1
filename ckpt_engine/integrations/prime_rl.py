"""The admin address that prime-rl's orchestrator expects of each inference server, answered for all replicas together.

The orchestrator POSTs `/pause`, `/update_weights {"weight_dir": ...}` and `/resume` to every server. Here
`/update_weights` is an update from a directory, which pauses each replica by itself and only as long as it must;
`/pause` sets its pause mode, and `/resume` resets that. An application of one event loop; `ckpt-engine prime-rl` serves
it.
"""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from ckpt_engine import AsyncClient, CkptEngineError, Deadlines
from ckpt_engine.core.json_text import load_json
from ckpt_engine.core.loopback import is_loopback
from ckpt_engine.core.problems import forbidden, invalid, unauthenticated, unavailable
from ckpt_engine.manager.browsers import host_of
from ckpt_engine.manager.errors import http_status
from ckpt_engine.manager.http_access import BODY_BYTES, says_json
from ckpt_engine.options import PauseMode
from ckpt_engine.security.grants import EVERYBODY, Caller, Tokens

MODES: Mapping[tuple[str, bool], PauseMode] = {
    ("keep", False): "in_place",
    ("keep", True): "keep",
    ("abort", False): "abort",
    ("abort", True): "abort",
    ("wait", False): "wait",
    ("wait", True): "wait",
}
"""Pause modes, by `mode` and `clear_cache` of `/pause`. prime-rl keeps caches, since it salts them by version."""

LORA = ("/load_lora_adapter", "/v1/load_lora_adapter", "/unload_lora_adapter", "/v1/unload_lora_adapter")
OTHER_WAYS = ("/init_broadcaster",)

OPEN = ("/health", "/liveness")
"""Routes for probes, which have no token."""

STEP = re.compile(r"(?:^|/)step_(\d{1,18})(?=/|$)")

log = logging.getLogger("ckpt_engine.prime_rl")

Handler = Callable[[Request], Awaitable[JSONResponse]]


@dataclass(frozen=True)
class PrimeRlSettings:
    """How the prime-rl front runs."""

    manager: str  # host:port
    lineage: str = ""  # of the run; empty: a fresh one
    pool: str = ""  # of the replicas
    replicas: int = 1  # that must be connected before `/health` answers 200
    min_replicas: int | None = None  # that suffice for an update; None: all that are registered
    models: tuple[str, ...] = ()  # names in `/v1/models`
    timeout: float | None = None  # of an update, seconds; None: the manager's
    tokens: Tokens | None = None  # of callers; None: no token is required
    loopback: bool = False  # whether it listens on loopback only
    deadlines: Deadlines = field(default_factory=Deadlines)


def step_of(directory: str) -> int | None:
    """The step in a directory's name: of its last part called step_N; None: there is none."""
    found = STEP.findall(directory)
    return int(found[-1]) if found else None


class Steps:
    """Assigns directories to lineages: a step that does not rise is of another run, and begins a new lineage."""

    def __init__(self, lineage: str) -> None:
        self._name = lineage
        self._runs = 1
        self._last: tuple[int, str] | None = None

    def of(self, directory: str) -> tuple[str, int | None]:
        """Lineage and version; None: the next one."""
        step = step_of(directory)
        if step is not None:
            if self._last is not None and self._last[1] != directory and step <= self._last[0]:
                self._runs += 1
                log.warning("step %d is not above step %d: lineage %s begins", step, self._last[0], self._lineage)
            self._last = step, directory
        return self._lineage, step

    @property
    def _lineage(self) -> str:
        return self._name if self._runs == 1 else f"{self._name}-{self._runs}"


class Facade:
    """Answers prime-rl's orchestrator. Used on one event loop."""

    def __init__(self, settings: PrimeRlSettings) -> None:
        self._settings = settings
        self._steps = Steps(settings.lineage or f"prime-rl-{secrets.token_hex(4)}")
        self._pause_mode: PauseMode | None = None

    def application(self) -> Starlette:
        """The application, for any ASGI server."""
        routes = [
            *(Route(path, self._with_answers(self._health), methods=["GET"]) for path in OPEN),
            Route("/v1/models", self._with_answers(self._models), methods=["GET"]),
            Route("/pause", self._with_answers(self._pause), methods=["POST"]),
            Route("/resume", self._with_answers(self._resume), methods=["POST"]),
            Route("/update_weights", self._with_answers(self._update), methods=["POST"]),
            *(Route(path, self._with_answers(self._no_lora), methods=["POST"]) for path in LORA),
            *(Route(path, self._with_answers(self._no_other_way), methods=["POST"]) for path in OTHER_WAYS),
        ]
        return Starlette(routes=routes)

    def _with_answers(self, handler: Handler) -> Handler:
        """Checks the caller, and turns errors into a status: prime-rl repeats a request after 5xx, not after 4xx."""

        async def answer(request: Request) -> JSONResponse:
            try:
                self._check_page(request)
                caller = self._caller(request)
                if request.method == "POST":
                    caller.require_any("trainer")
                return await handler(request)
            except CkptEngineError as error:
                log.warning("%s %s: %s", request.method, request.url.path, error.problem.message)
                body = {"error": {"code": error.code, "message": error.problem.message}}
                return JSONResponse(body, http_status(error.problem))

        return answer

    def _check_page(self, request: Request) -> None:
        """Refuses requests that a page in a browser could make: it can post to this machine without reading answers."""
        headers = request.headers
        if self._settings.loopback and not is_loopback(host_of(headers.get("host", ""))):
            raise forbidden(f"this is not {headers.get('host')!r}; it serves its own machine only")
        if "origin" in headers:
            raise forbidden(f"no page may ask here, and this request is of one (Origin: {headers['origin']})")
        empty = headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers
        if not empty and not says_json(headers):
            raise invalid("send the body as application/json")

    def _caller(self, request: Request) -> Caller:
        if self._settings.tokens is None or request.url.path in OPEN:
            return EVERYBODY
        kind, _, token = request.headers.get("authorization", "").partition(" ")
        caller = self._settings.tokens.caller(token.strip()) if kind.lower() == "bearer" else None
        if caller is None:
            raise unauthenticated("show a token of this facade: in the variable that `api_key_var` of prime-rl names")
        return caller

    # -- routes

    async def _health(self, request: Request) -> JSONResponse:
        settings = self._settings
        async with AsyncClient(settings.manager, deadlines=settings.deadlines) as client:
            try:
                status = await client.status()
            except CkptEngineError as error:
                raise unavailable(f"the manager at {settings.manager}: {error.problem.message}") from error
        up = [each for each in status.replicas if each.pool == settings.pool and each.connected and each.engine.url]
        if len(up) < settings.replicas:
            raise unavailable(f"{len(up)} of {settings.replicas} replicas are connected")
        return JSONResponse({"status": "ok", "replicas": [each.name for each in up]})

    async def _models(self, request: Request) -> JSONResponse:
        return JSONResponse({"object": "list", "data": [{"id": name} for name in self._settings.models]})

    async def _pause(self, request: Request) -> JSONResponse:
        query = request.query_params
        mode, clear = query.get("mode", "abort"), query.get("clear_cache", "true").lower()
        if clear not in ("true", "false") or (mode, clear == "true") not in MODES:
            raise invalid(f"mode={mode}, clear_cache={clear} means nothing: modes are keep, abort and wait")
        self._pause_mode = MODES[mode, clear == "true"]
        return JSONResponse({"status": "paused"})

    async def _resume(self, request: Request) -> JSONResponse:
        self._pause_mode = None
        return JSONResponse({"status": "resumed"})

    async def _update(self, request: Request) -> JSONResponse:
        directory = await _weight_dir(request)
        settings = self._settings
        lineage, version = self._steps.of(directory)
        async with AsyncClient(settings.manager, deadlines=settings.deadlines) as client:
            report = await client.update_from_directory(
                directory,
                version,
                lineage=lineage,
                pause_mode=self._pause_mode,
                timeout=settings.timeout,
                min_replicas=settings.min_replicas,
                pool=settings.pool,
            )
        if not report.ok:
            raise unavailable(f"not all replicas that must serve {directory} do:\n{report}")
        log.info("%s is served as version %d of lineage %s", directory, report.version, report.lineage)
        return JSONResponse({"status": "ok", "lineage": report.lineage, "version": report.version})

    async def _no_lora(self, request: Request) -> JSONResponse:
        raise invalid("adapters are not loaded here: let the trainer merge them (no `lora` in prime-rl's orchestrator)")

    async def _no_other_way(self, request: Request) -> JSONResponse:
        raise invalid('weights come by way of a directory here: set [weight_broadcast] type = "filesystem"')


async def _weight_dir(request: Request) -> str:
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > BODY_BYTES:
            raise invalid(f"the request's body must have at most {BODY_BYTES} bytes, and has more")
    try:
        directory: Any = load_json(body)["weight_dir"]
    except (ValueError, KeyError, TypeError):
        directory = None
    if not isinstance(directory, str) or not directory:
        raise invalid(
            'the body must be {"weight_dir": "/absolute/path"}; prime-rl sends none where weights come over NCCL: set '
            '[weight_broadcast] type = "filesystem"'
        )
    return directory
