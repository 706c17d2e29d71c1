"""transformers' EngineKind: the facts that our core needs before it loads the adapter."""

from __future__ import annotations

from ckpt_engine.engine.kinds import EngineKind

ENGINE = EngineKind(
    name="transformers",
    title="transformers serve",
    driver="ckpt_engine_adapters.transformers_serve.driver",
)
