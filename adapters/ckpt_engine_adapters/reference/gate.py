"""The gate with the reference engine's routes."""

from __future__ import annotations

from typing import ClassVar

from ckpt_engine.gate.gate import Gate


class ReferenceGate(Gate):
    """See Gate."""

    open_routes: ClassVar[frozenset[str]] = frozenset(
        {
            "/docs",
            "/docs/oauth2-redirect",
            "/get_server_info",
            "/health",
            "/info",
            "/openapi.json",
            "/redoc",
            "/server_info",
            "/v1/models",
        }
    )
    generation_routes: ClassVar[frozenset[str]] = frozenset(
        {"/generate", "/get_model_info", "/inference/v1/generate", "/model_info", "/v1/completions"}
    )
    control_routes: ClassVar[frozenset[str]] = frozenset({"/pause", "/resume", "/sleep", "/stamp", "/wake"})
