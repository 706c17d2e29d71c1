"""vLLM for the gateway: its dialects, and how to read its load."""

from __future__ import annotations

import re

from ckpt_engine.gateway.engines import GatewaySide, Load, Mark
from ckpt_engine.http_client.connections import Answer
from ckpt_engine_adapters.vllm.chats import CHAT_TEXT, Chats
from ckpt_engine_adapters.vllm.completions import Completions
from ckpt_engine_adapters.vllm.inference import Inference

_COUNTS = re.compile(r"^vllm:num_requests_(?:running|waiting)(?:\{[^}]*\})? ([0-9.e+]+)$", re.MULTILINE)


def _count(answer: Answer) -> int | None:
    counts = _COUNTS.findall(answer.text)
    return int(sum(map(float, counts))) if counts else None


SIDE = GatewaySide(
    dialects=(Completions, Inference),
    passed=("/v1/responses", "/v1/embeddings", "/tokenize", "/detokenize"),
    rendered=(Chats,),
    chat_text=CHAT_TEXT,
    mark=Mark("/openapi.json", "/inference/v1"),
    load=Load("/metrics", _count),
)
