"""SGLang for the gateway: its dialect, and how to read its load."""

from __future__ import annotations

from ckpt_engine.gateway.engines import GatewaySide, Load
from ckpt_engine.http_client.connections import Answer
from ckpt_engine_adapters.sglang.chats import CHAT_TEXT
from ckpt_engine_adapters.sglang.generate import Generate


def _count(answer: Answer) -> int | None:
    if answer.status != 200:
        return None
    return sum(int(each["num_running_reqs"]) + int(each["num_waiting_reqs"]) for each in answer.json()["loads"])


SIDE = GatewaySide(
    dialects=(Generate,),
    passed=("/v1/responses", "/v1/embeddings", "/tokenize", "/detokenize"),
    chat_text=CHAT_TEXT,
    load=Load("/v1/loads?include=core", _count),
)
