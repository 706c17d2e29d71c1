"""Asks the demo's replicas to go on from the opening words, greedily, over their own HTTP APIs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass

import httpx

from ckpt_engine.demo import task

ANSWER_SECONDS = 60.0
VERSION_HEADER = "x-ckpt-engine-admitted-version"


@dataclass(frozen=True)
class Recital:
    """What one replica answered."""

    replica: str
    version: int
    """That the replica let the request in under; no update is made while it recites, so it is that of the answer."""
    continuation: bytes
    matching: int
    """How many of the first bytes are the text's."""
    seconds: float

    @property
    def matches(self) -> bool:
        """The replica went on exactly as the text does, as far as it was asked to."""
        return self.matching == task.CONTINUATION_BYTES


async def recite(engine: str, replicas: Mapping[str, str]) -> list[Recital]:
    """What every replica (name to base URL) says, asked at the same time. Raises httpx.HTTPError."""
    async with httpx.AsyncClient(timeout=ANSWER_SECONDS, trust_env=False) as client:
        return await asyncio.gather(*(_ask(client, engine, name, url) for name, url in replicas.items()))


async def _ask(client: httpx.AsyncClient, engine: str, name: str, url: str) -> Recital:
    text = task.text()
    prompt = list(text[: task.PROMPT_BYTES])
    started = time.monotonic()
    if engine == "vllm":
        # A token is a byte, so there is no tokenizer: token ids in, token ids out.
        wish = {"model": task.MODEL_NAME, "prompt": prompt, "max_tokens": task.CONTINUATION_BYTES, "temperature": 0}
        raw = {"ignore_eos": True, "return_token_ids": True, "detokenize": False}
        response = await client.post(f"{url}/v1/completions", json={**wish, **raw})
        response.raise_for_status()
        tokens = response.json()["choices"][0]["token_ids"]
    else:
        wish = {"input_ids": prompt, "max_tokens": task.CONTINUATION_BYTES}
        if engine == "sglang":
            sampling = {"max_new_tokens": task.CONTINUATION_BYTES, "temperature": 0, "ignore_eos": True}
            wish = {"input_ids": prompt, "sampling_params": sampling}
        response = await client.post(f"{url}/generate", json=wish)
        response.raise_for_status()
        tokens = response.json()["output_ids"]
    continuation = bytes(tokens)
    expected = text[task.PROMPT_BYTES : task.PROMPT_BYTES + task.CONTINUATION_BYTES]
    pairs = zip(continuation, expected, strict=False)
    matching = next((index for index, (said, due) in enumerate(pairs) if said != due), min(len(tokens), len(expected)))
    return Recital(name, int(response.headers[VERSION_HEADER]), continuation, matching, time.monotonic() - started)
