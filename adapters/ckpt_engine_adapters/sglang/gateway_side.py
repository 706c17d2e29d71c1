"""SGLang for the gateway: its dialect, and how to read its load."""

from __future__ import annotations

from ckpt_engine.gateway.engines import GatewaySide, Load
from ckpt_engine.http_client.connections import Answer
from ckpt_engine_adapters.sglang.chats import CHAT_TEXT
from ckpt_engine_adapters.sglang.generate import Generate


def _count(answer: Answer) -> int | None:
    return sum(int(each["num_reqs"]) for each in answer.json()) if answer.status == 200 else None


SIDE = GatewaySide(
    dialects=(Generate,),
    passed=("/v1/responses", "/v1/embeddings", "/tokenize", "/detokenize"),
    chat_text=CHAT_TEXT,
    load=Load("/get_load", _count),
)
