"""The gate with vLLM's routes, for `--middleware ckpt_engine_adapters.vllm.gate.VllmGate`."""

from __future__ import annotations

from typing import ClassVar

from ckpt_engine.install.gate import Gate


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
