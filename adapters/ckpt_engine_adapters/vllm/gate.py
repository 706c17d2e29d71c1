"""The gate with vLLM's routes, for `--middleware ckpt_engine_adapters.vllm.gate.VllmGate`.

It also has a route of its own that pauses at once. vLLM's `/pause` sleeps for 20 ms after its scheduler has stopped, to
let the last answers out first; an update needs none of that, and no token is generated meanwhile.
"""

from __future__ import annotations

from typing import Any, ClassVar
from urllib.parse import parse_qs

from ckpt_engine.install.gate import Gate, Receive, Scope, Send, answer_json

PAUSE_ROUTE = "/ckpt_engine/pause"
"""Takes `mode` and `clear_cache` as vLLM's `/pause` does. 404: this vLLM keeps its scheduler elsewhere."""


class VllmGate(Gate):
    """See Gate. Every route that is neither named here nor a control route generates, or may, and is gated."""

    open_routes: ClassVar[frozenset[str]] = frozenset(
        {"/health", "/ping", "/metrics", "/version", "/load", "/v1/models", "/openapi.json", "/docs", "/redoc"}
    )
    control_routes: ClassVar[tuple[str, ...]] = (
        "/abort_requests",
        "/collective_rpc",
        "/finish_weight_update",
        "/get_world_size",
        "/init_weight_transfer_engine",
        "/is_paused",
        "/is_sleeping",
        "/pause",
        "/release_kv_cache_memory",
        "/reset_encoder_cache",
        "/reset_mm_cache",
        "/reset_prefix_cache",
        "/resume",
        "/scale_elastic_ep",
        "/server_info",
        "/shutdown_weight_transfer_engine",
        "/sleep",
        "/start_draft_weight_update",
        "/start_weight_update",
        "/update_weight_version",
        "/update_weights",
        "/wake_up",
        "/weight_checker",
        "/weight_info",
        "/ckpt_engine/",
    )

    async def control(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pauses the scheduler as `AsyncLLM.pause_generation` does, without its sleep; else vLLM's own routes."""
        if scope["path"] != PAUSE_ROUTE:
            await super().control(scope, receive, send)
            return
        engine: Any = getattr(scope["app"].state, "engine_client", None)
        stop = getattr(getattr(engine, "engine_core", None), "pause_scheduler_async", None)
        clear = getattr(getattr(engine, "renderer", None), "clear_mm_cache_async", None)
        if stop is None or clear is None:
            await answer_json(send, 404, {"detail": "this vLLM keeps its scheduler elsewhere: use /pause"})
            return
        wanted = parse_qs(scope["query_string"].decode())
        clear_cache = wanted.get("clear_cache", ["true"])[0] != "false"
        if clear_cache:
            await clear()
        await stop(mode=wanted["mode"][0], clear_cache=clear_cache)
        await answer_json(send, 200, {"status": "paused"})
