"""vLLM's EngineKind: the facts that our core needs before it loads the adapter."""

from __future__ import annotations

from ckpt_engine.engine.kinds import EngineKind, Layout, UpdateSeconds

ENGINE = EngineKind(
    name="vllm",
    title="vLLM",
    driver="ckpt_engine_adapters.vllm.driver",
    gateway="ckpt_engine_adapters.vllm.gateway_side:SIDE",
    demo="ckpt_engine_adapters.vllm.demo:SERVER",
    # gpu_under_load.json in benchmarks/results, before its load
    seconds=UpdateSeconds(quiesce=0.0023, resume=0.0028, calls=0.0050, around=0.0013),
    layout=Layout(
        experts_fill_stages=True, vocabulary_on_each_stage=frozenset({"MixtralForCausalLM", "Qwen3MoeForCausalLM"})
    ),
)
