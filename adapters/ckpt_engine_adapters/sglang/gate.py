"""The gate with SGLang's routes, which `launch.py` puts around SGLang's own application.

It also keeps state that SGLang does not report: whether generation is paused, and which memory is given up. SGLang's
schedulers die if they are asked twice to give up, or to take back, the same memory; the gate removes such tags.
"""

from __future__ import annotations

import json
import os
from typing import Any, ClassVar

from ckpt_engine.core.json_text import load_json
from ckpt_engine.gate.asgi import Application, Message, Receive, Scope, Send, answer_json, with_headers
from ckpt_engine.gate.gate import Gate
from ckpt_engine.gate.request_body import replay
from ckpt_engine.gate.routes import listed

STATE_ROUTE = "/ckpt_engine/sglang"
"""Answers `{"paused": bool, "released": [tag, ...], "routes": [path, ...], "in_place": reason}`, for the agent only.

in_place: why the server cannot be updated in place; empty: it can."""

HEALTH_ROUTE = "/health"
RELEASE_ROUTE = "/release_memory_occupation"
RESUME_ROUTE = "/resume_memory_occupation"
PAUSE_ROUTE = "/pause_generation"
CONTINUE_ROUTE = "/continue_generation"

MEMORY = ("kv_cache", "weights", "cuda_graph")
"""All that SGLang can give up; it means all of it if a request names no tag."""


_OLLAMA = ("CHAT", "GENERATE", "ROOT", "SHOW", "TAGS")
_RENAMED = frozenset(
    os.environ.get(name, "") for name in ("AIP_PREDICT_ROUTE", *(f"SGLANG_OLLAMA_{each}_ROUTE" for each in _OLLAMA))
)
"""SGLang lets the environment rename some of its routes that generate; empty: it does not."""


class SglangGate(Gate):
    """See Gate. A test compares this with the routes of a real server, so that new routes are classified by people."""

    open_routes: ClassVar[frozenset[str]] = frozenset(
        {
            "/docs",
            "/docs/oauth2-redirect",
            "/freeze_gc",  # the server calls it itself, without a token, once it has started
            "/get_load",
            HEALTH_ROUTE,
            "/is_scaling_elastic_ep",
            "/metrics",
            "/metrics/",
            "/openapi.json",
            "/ping",
            "/redoc",
            "/v1/loads",
            "/v1/models",
        }
    )
    generation_routes: ClassVar[frozenset[str]] = frozenset(
        {
            "/",
            "/abort_request",
            "/api/chat",
            "/api/generate",
            "/api/show",
            "/api/tags",
            "/classify",
            "/close_session",
            "/detokenize",
            "/encode",
            "/generate",
            "/get_model_info",
            "/get_weight_version",
            "/health_generate",
            "/invocations",
            "/list_external_corpora",
            "/model_info",
            "/open_session",
            "/parse_function_call",
            "/ready",
            "/separate_reasoning",
            "/tokenize",
            "/v1/audio/transcriptions",
            "/v1/chat/completions",
            "/v1/classify",
            "/v1/completions",
            "/v1/decisions",
            "/v1/detokenize",
            "/v1/embeddings",
            "/v1/messages",
            "/v1/messages/count_tokens",
            "/v1/models/{model:path}",
            "/v1/realtime",
            "/v1/rerank",
            "/v1/responses",
            "/v1/responses/{response_id}",
            "/v1/responses/{response_id}/cancel",
            "/v1/score",
            "/v1/systemone",
            "/v1/tokenize",
            "/vertex_generate",
            "/weight_version",
            *_RENAMED,
        }
    )
    control_routes: ClassVar[frozenset[str]] = frozenset(
        {
            "/add_external_corpus",
            "/begin_weight_update",
            "/clear_hicache_storage_backend",
            "/configure_logging",
            "/continue_generation",
            "/destroy_weights_update_group",
            "/dump_expert_distribution_record",
            "/dumper/",
            "/end_weight_update",
            "/flush_cache",
            "/get_hicache_l3_cache_layout",
            "/get_remote_instance_transfer_engine_info",
            "/get_server_info",
            "/get_weights_by_name",
            "/hicache/storage-backend",
            "/hicache/storage-backend/",
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
            "/scale_elastic_ep",
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
        }
    )

    def __init__(self, app: Application, in_place: str = "") -> None:
        """in_place: why the server cannot be updated in place; empty: it can."""
        super().__init__(app)
        self._in_place = in_place
        self._paused = False
        self._released: set[str] = set()

    async def open(self, route: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Removes the root path: only at the path `/health` SGLang answers without computing a token. Under a root path
        it would compute one, and so fail while generation is paused."""
        if route == HEALTH_ROUTE:
            scope = {**scope, "root_path": "", "path": HEALTH_ROUTE, "raw_path": HEALTH_ROUTE.encode()}
        await super().open(route, scope, receive, send)

    async def control(self, route: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a call on to SGLang, without parts that it must not be asked for twice. Calls come one at a time, from
        the agent."""
        path = route.rstrip("/")
        scope = _with_key(path, scope)
        if path == STATE_ROUTE:
            routes = sorted(set(listed(scope["app"])))
            state = {"paused": self._paused, "released": sorted(self._released), "routes": routes}
            await answer_json(send, 200, {**state, "in_place": self._in_place})
        elif path in (RELEASE_ROUTE, RESUME_ROUTE):
            await self._memory(path, scope, receive, send)
        elif path in (PAUSE_ROUTE, CONTINUE_ROUTE):
            if await _passed(super().control, path, scope, receive, send):
                self._paused = path == PAUSE_ROUTE
        else:
            await super().control(path, scope, receive, send)

    async def _memory(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            tags = set(load_json(await _body(receive) or b"{}").get("tags") or MEMORY)
        except (ValueError, AttributeError, TypeError) as error:
            await answer_json(send, 400, {"detail": f"{path} takes a JSON object with a list of tags: {error}"})
            return
        tags = tags - self._released if path == RELEASE_ROUTE else tags & self._released
        if not tags:
            await answer_json(send, 200, None)
            return
        body = json.dumps({"tags": [tag for tag in MEMORY if tag in tags]}).encode()
        described = [(b"content-length", str(len(body)).encode()), (b"content-type", b"application/json")]
        message = {"type": "http.request", "body": body, "more_body": False}
        if await _passed(super().control, path, with_headers(scope, described), replay(message, receive), send):
            self._released = self._released | tags if path == RELEASE_ROUTE else self._released - tags


def _with_key(path: str, scope: Scope) -> Scope:
    """Adds the server's own API key, if it has one: the agent has only our token.

    SGLang notes at an endpoint whether it needs the administrators' key, if there is one, or the users'.
    """
    app: Any = scope.get("app")
    arguments: Any = getattr(app, "server_args", None)
    users, admins = getattr(arguments, "api_key", None), getattr(arguments, "admin_api_key", None)
    if not (users or admins):
        return scope
    endpoints = [route.endpoint for route in app.routes if getattr(route, "path", "") == path]
    privileged = any(getattr(endpoint, "_auth_level", "normal") != "normal" for endpoint in endpoints)
    key = (privileged and admins) or users
    headers = [(name, value) for name, value in scope["headers"] if name != b"authorization"]
    return {**scope, "headers": [*headers, (b"authorization", f"Bearer {key}".encode())]} if key else scope


async def _passed(control: Any, route: str, scope: Scope, receive: Receive, send: Send) -> bool:
    """Passes a call on. Returns whether the answer was a success."""
    status = 0

    async def watched(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        await send(message)

    await control(route, scope, receive, watched)
    return status == 200


async def _body(receive: Receive) -> bytes:
    body = b""
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return body
        body += bytes(message.get("body", b""))
        if not message.get("more_body", False):
            return body
