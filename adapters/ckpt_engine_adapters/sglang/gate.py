"""The gate with SGLang's routes, which `launch.py` puts around SGLang's own application.

It also remembers what SGLang does not tell: whether generation is paused, and which memory is given up. SGLang's
schedulers die of being asked to give up, or to take back, the same memory twice; the gate takes such parts out.
"""

from __future__ import annotations

import json
from typing import Any, ClassVar

from ckpt_engine.install.gate import Application, Gate, Message, Receive, Scope, Send, answer_json

STATE_ROUTE = "/ckpt_engine/sglang"
"""Answers `{"paused": bool, "released": [tag, ...], "routes": [path, ...]}`, for the agent only."""

RELEASE_ROUTE = "/release_memory_occupation"
RESUME_ROUTE = "/resume_memory_occupation"
PAUSE_ROUTE = "/pause_generation"
CONTINUE_ROUTE = "/continue_generation"

MEMORY = ("kv_cache", "weights", "cuda_graph")
"""All that SGLang can give up; it means all of it if a request names no tag."""


class SglangGate(Gate):
    """See Gate. Every route that is neither named here nor a control route generates, or may, and is gated."""

    open_routes: ClassVar[frozenset[str]] = frozenset(
        {
            "/docs",
            "/freeze_gc",  # the server calls it itself, without a token, once it has started
            "/get_load",
            "/health",
            "/metrics",
            "/openapi.json",
            "/ping",
            "/redoc",
            "/v1/loads",
            "/v1/models",
        }
    )
    control_routes: ClassVar[tuple[str, ...]] = (
        "/add_external_corpus",
        "/begin_weight_update",
        "/clear_hicache_storage_backend",
        "/configure_logging",
        "/continue_generation",
        "/destroy_weights_update_group",
        "/dump_expert_distribution_record",
        "/end_weight_update",
        "/flush_cache",
        "/get_hicache_l3_cache_layout",
        "/get_remote_instance_transfer_engine_info",
        "/get_server_info",
        "/get_weights_by_name",
        "/hicache/storage-backend",
        "/init_weights_send_group_for_remote_instance",
        "/init_weights_update_group",
        "/load_lora_adapter",
        "/load_lora_adapter_from_tensors",
        "/pause_generation",
        "/pd_role_switch",
        "/release_memory_occupation",
        "/remote_instance_transfer_engine_info",
        "/remove_external_corpus",
        "/resume_memory_occupation",
        "/send_weights_to_remote_instance",
        "/server_info",
        "/set_internal_state",
        "/set_trace_level",
        "/slow_down",
        "/start_expert_distribution_record",
        "/start_profile",
        "/stop_expert_distribution_record",
        "/stop_profile",
        "/unload_lora_adapter",
        "/update_weight_version",
        "/update_weights_from_disk",
        "/update_weights_from_distributed",
        "/update_weights_from_ipc",
        "/update_weights_from_tensor",
        "/weights_checker",
        "/ckpt_engine/",
        "/dumper/",
        "/hicache/storage-backend/",
    )

    def __init__(self, app: Application) -> None:
        super().__init__(app)
        self._paused = False
        self._released: set[str] = set()

    async def control(self, scope: Scope, receive: Receive, send: Send) -> None:
        """SGLang answers, except for what it must not be asked twice. Calls come one at a time, from the agent."""
        path = scope["path"].rstrip("/")
        scope = _with_key(scope)
        if path == STATE_ROUTE:
            routes = sorted({route.path for route in scope["app"].routes if hasattr(route, "path")})
            state = {"paused": self._paused, "released": sorted(self._released), "routes": routes}
            await answer_json(send, 200, state)
        elif path in (RELEASE_ROUTE, RESUME_ROUTE):
            await self._memory(path, scope, receive, send)
        elif path in (PAUSE_ROUTE, CONTINUE_ROUTE):
            if await _passed(super().control, scope, receive, send):
                self._paused = path == PAUSE_ROUTE
        else:
            await super().control(scope, receive, send)

    async def _memory(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            wanted = set(json.loads(await _body(receive) or b"{}").get("tags") or MEMORY)
        except (ValueError, AttributeError, TypeError) as error:
            await answer_json(send, 400, {"detail": f"{path} takes a JSON object with a list of tags: {error}"})
            return
        wanted = wanted - self._released if path == RELEASE_ROUTE else wanted & self._released
        if not wanted:
            await answer_json(send, 200, None)
            return
        body = json.dumps({"tags": [tag for tag in MEMORY if tag in wanted]}).encode()
        headers = [
            (name, value) for name, value in scope["headers"] if name not in (b"content-length", b"content-type")
        ]
        headers += [(b"content-length", str(len(body)).encode()), (b"content-type", b"application/json")]
        if await _passed(super().control, {**scope, "headers": headers}, _receive(body, receive), send):
            self._released = self._released | wanted if path == RELEASE_ROUTE else self._released - wanted


def _with_key(scope: Scope) -> Scope:
    """The token is all that an agent has; where the server asks for a key of its own, it gets that one.

    SGLang notes at an endpoint whether it takes the administrators' key, if there is one, or the users'.
    """
    app: Any = scope.get("app")
    arguments: Any = getattr(app, "server_args", None)
    users, admins = getattr(arguments, "api_key", None), getattr(arguments, "admin_api_key", None)
    if not (users or admins):
        return scope
    path = scope["path"].rstrip("/")
    endpoints = [route.endpoint for route in app.routes if getattr(route, "path", "") == path]
    privileged = any(getattr(endpoint, "_auth_level", "normal") != "normal" for endpoint in endpoints)
    key = (privileged and admins) or users
    headers = [(name, value) for name, value in scope["headers"] if name != b"authorization"]
    return {**scope, "headers": [*headers, (b"authorization", f"Bearer {key}".encode())]} if key else scope


async def _passed(control: Any, scope: Scope, receive: Receive, send: Send) -> bool:
    """Whether the answer was a good one."""
    status = 0

    async def watched(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        await send(message)

    await control(scope, receive, watched)
    return status == 200


async def _body(receive: Receive) -> bytes:
    found = b""
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return found
        found += bytes(message.get("body", b""))
        if not message.get("more_body", False):
            return found


def _receive(body: bytes, after: Receive) -> Receive:
    """A request with `body`; then what the client does."""
    first = True

    async def receive() -> Message:
        nonlocal first
        if first:
            first = False
            return {"type": "http.request", "body": body, "more_body": False}
        return await after()

    return receive
