"""The gate with the reference engine's routes."""

from __future__ import annotations

from typing import ClassVar

from ckpt_engine.install.gate import Gate


class ReferenceGate(Gate):
    """See Gate."""

    open_routes: ClassVar[frozenset[str]] = frozenset(
        {"/docs", "/docs/oauth2-redirect", "/health", "/info", "/openapi.json", "/redoc"}
    )
    generation_routes: ClassVar[frozenset[str]] = frozenset({"/generate", "/server_info", "/v1/models"})
    control_routes: ClassVar[frozenset[str]] = frozenset({"/pause", "/resume", "/sleep", "/stamp", "/wake"})
