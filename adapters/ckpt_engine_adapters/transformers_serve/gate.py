"""The gate with the routes of `transformers serve`, which `launch.py` puts around its application."""

from __future__ import annotations

from typing import ClassVar

from ckpt_engine.gate.gate import Gate

STATE_ROUTE = "/ckpt_engine/transformers"
"""Answers `{"version": of transformers, "paused": bool}`, for the agent only."""


class TransformersGate(Gate):
    """See Gate. Two routes that generate are among the control routes: they call `model.generate`, which nothing can
    pause, so no request of a client may reach them."""

    open_routes: ClassVar[frozenset[str]] = frozenset(
        {"/docs", "/docs/oauth2-redirect", "/health", "/openapi.json", "/redoc", "/v1/models"}
    )
    generation_routes: ClassVar[frozenset[str]] = frozenset(
        {"/v1/chat/completions", "/v1/completions", "/v1/responses"}
    )
    control_routes: ClassVar[frozenset[str]] = frozenset(
        {"/load_model", "/reset", "/v1/audio/transcriptions", "/v1/systemone"}
    )
