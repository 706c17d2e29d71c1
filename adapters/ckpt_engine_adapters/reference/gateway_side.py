"""The reference engine for the gateway: it has vLLM's dialects and SGLang's, and reports how many requests it has."""

from __future__ import annotations

from ckpt_engine.gateway.engines import GatewaySide, Load, Mark
from ckpt_engine.http_client.connections import Answer
from ckpt_engine_adapters.sglang.generate import Generate
from ckpt_engine_adapters.vllm.completions import Completions
from ckpt_engine_adapters.vllm.inference import Inference


def _count(answer: Answer) -> int:
    info = answer.json()
    return int(info["running"]) + int(info["waiting"])


SIDE = GatewaySide(
    dialects=(Completions, Inference, Generate),
    mark=Mark("/info", '"reference"'),
    load=Load("/info", _count),
    labels_each_token=True,
)
