"""The toy engine, as far as ckpt-engine asks about it before it loads anything of the adapter."""

from __future__ import annotations

from ckpt_engine.engine.kinds import EngineKind

ENGINE = EngineKind(
    name="toy",
    title="the toy engine",
    driver="toy_engine.driver",
    gateway="toy_engine.gateway_side:SIDE",
)
