"""SGLang's EngineKind: the facts that our core needs before it loads the adapter."""

from __future__ import annotations

from ckpt_engine.engine.kinds import EngineKind, UpdateSeconds

ENGINE = EngineKind(
    name="sglang",
    title="SGLang",
    driver="ckpt_engine_adapters.sglang.driver",
    gateway="ckpt_engine_adapters.sglang.gateway_side:SIDE",
    demo="ckpt_engine_adapters.sglang.demo:SERVER",
    # gpu_sglang.json in benchmarks/results
    seconds=UpdateSeconds(quiesce=0.0108, resume=0.0070, calls=0.0124, around=0.0085),
)
