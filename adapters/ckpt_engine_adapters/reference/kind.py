"""The reference engine's EngineKind: the facts that our core needs before it loads the adapter."""

from __future__ import annotations

from ckpt_engine.engine.kinds import EngineKind, Layout, Requirement, UpdateSeconds

ENGINE = EngineKind(
    name="reference",
    title="the reference engine",
    driver="ckpt_engine_adapters.reference.driver",
    gateway="ckpt_engine_adapters.reference.gateway_side:SIDE",
    demo="ckpt_engine_adapters.reference.demo:SERVER",
    requires=Requirement("demo", ("torch", "transformers")),
    # gpu_relay.json and gpu_many.json in benchmarks/results
    seconds=UpdateSeconds(quiesce=0.0047, resume=0.0078, calls=0.0095, around=0.008),
    layout=Layout(vocabulary_for_workers=True, repeats_heads=False),
)
