"""An engine as the dialects know it, in a few lines: deterministic tokens, the fields that change them, any chunks.

A stand-in, so that legs can be broken at every token: how real engines answer is in tests/engines and tests/reference.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

VOCABULARY = 50


def next_token(context: Sequence[int], barred: frozenset[int] = frozenset()) -> int:
    """Of everything before it: greedy decoding of one version."""
    for salt in range(1000):
        digest = hashlib.sha256(f"{salt}:{list(context)}".encode()).digest()
        token = digest[0] % VOCABULARY
        if token not in barred:
            return token
    raise AssertionError("all tokens are barred")


@dataclass
class Ended:
    """tokens: of a request's output; ends: what the engine says in the end."""

    tokens: list[int]
    reason: str
    stop: int | None


def decode(
    prompt: Sequence[int], most: int, least: int, stops: frozenset[int], allowed: frozenset[int] | None = None
) -> Ended:
    """What an engine makes of it."""
    output: list[int] = []
    while len(output) < most:
        barred = stops if len(output) < least else frozenset()
        if allowed is not None:
            barred |= frozenset(range(VOCABULARY)) - allowed
        token = next_token([*prompt, *output], barred)
        output.append(token)
        if token in stops:
            return Ended(output, "stop", token)
    return Ended(output, "length", None)


def logprob(context: Sequence[int], token: int) -> float:
    return -(1 + next_token([*context, token, 7])) / 8


Chunks = Callable[[int], Sequence[int]]
"""Of a number of tokens: how many are in each event."""


def completions(body: Mapping[str, Any], chunks: Chunks, version: int) -> Iterator[dict[str, Any]]:
    """Events of `/v1/completions`, streamed."""
    assert body["stream"] is True
    assert body["return_token_ids"] is True
    assert "n" not in body
    prompt = body["prompt"]
    allowed = frozenset(body["allowed_token_ids"]) if "allowed_token_ids" in body else None
    ended = decode(
        prompt, body["max_tokens"], body.get("min_tokens", 0), frozenset(body.get("stop_token_ids") or ()), allowed
    )
    at = offset = 0
    for count in chunks(len(ended.tokens)) or [0]:
        tokens = ended.tokens[at : at + count]
        context = [*prompt, *ended.tokens[:at]]
        values = [logprob([*context, *tokens[:index]], token) for index, token in enumerate(tokens)]
        scored, first = tokens, at == 0
        if first and body.get("echo"):
            values = [logprob(prompt[:index], token) for index, token in enumerate(prompt)] + values
            scored = [*prompt, *tokens]
        at += count
        over = at == len(ended.tokens)
        choice: dict[str, Any] = {"index": 0, "text": "".join(f"<{token}>" for token in tokens), "token_ids": tokens}
        if first:
            choice["prompt_token_ids"] = prompt
        if body["max_tokens"] == 0:
            choice["token_ids"] = [next_token(prompt)]
        if body.get("logprobs") is not None:
            names = [f"<{token}>" for token in scored]
            offsets = []
            for name in names:
                offsets.append(offset)
                offset += len(name)
            choice["logprobs"] = {
                "tokens": names,
                "token_logprobs": values,
                "top_logprobs": [{name: value} for name, value in zip(names, values, strict=True)],
                "text_offset": offsets,
            }
        choice |= {"finish_reason": ended.reason if over else None, "stop_reason": ended.stop if over else None}
        yield {"choices": [choice], "metadata": {"weight_version": str(version)}}


def inference(body: Mapping[str, Any], chunks: Chunks, version: int) -> Iterator[dict[str, Any]]:
    """Events of `/inference/v1/generate`, streamed; versions on the last one only."""
    assert body["stream"] is True
    params, prompt = body["sampling_params"], body["token_ids"]
    assert "n" not in params
    ended = decode(
        prompt, params["max_tokens"], params.get("min_tokens", 0), frozenset(params.get("stop_token_ids") or ())
    )
    at = 0
    for count in chunks(len(ended.tokens)):
        tokens = ended.tokens[at : at + count]
        content = [
            {"token_id": token, "logprob": logprob([*prompt, *ended.tokens[: at + index]], token), "top_logprobs": []}
            for index, token in enumerate(tokens)
        ]
        at += count
        over = at == len(ended.tokens)
        span = [{"version": str(version), "start": 0, "end": at}]
        yield {
            "choices": [
                {
                    "index": 0,
                    "token_ids": tokens,
                    "logprobs": {"content": content} if params.get("logprobs") is not None else None,
                    "finish_reason": ended.reason if over else None,
                    "stop_reason": ended.stop if over else None,
                    "weight_versions": span if over else None,
                }
            ]
        }


def sglang(body: Mapping[str, Any], chunks: Chunks, version: int, repeats: bool = True) -> Iterator[dict[str, Any]]:
    """Events of `/generate`, streamed. repeats: each has the tokens before it, as servers have it by default."""
    assert body["stream"] is True
    params, prompt = body["sampling_params"], body["input_ids"]
    assert "n" not in params
    ended = decode(
        prompt, params["max_new_tokens"], params.get("min_new_tokens", 0), frozenset(params.get("stop_token_ids") or ())
    )
    at = 0
    for count in chunks(len(ended.tokens)):
        before, at = at, at + count
        first = 0 if repeats else before
        over = at == len(ended.tokens)
        reason = {"type": ended.reason, "matched": ended.stop, "length": at}
        meta: dict[str, Any] = {
            "prompt_tokens": len(prompt),
            "completion_tokens": at,
            "cached_tokens": 0,
            "finish_reason": reason if over else None,
        }
        if over:
            meta["weight_versions"] = [{"version": str(version), "start": 0, "end": at}]
        if body.get("return_logprob"):
            meta["output_token_logprobs"] = [
                [logprob([*prompt, *ended.tokens[:index]], ended.tokens[index]), ended.tokens[index], None]
                for index in range(first, at)
            ]
            start = body.get("logprob_start_len", -1)
            meta["input_token_logprobs"] = (
                [[logprob(prompt[:index], token), token, None] for index, token in enumerate(prompt)][start:]
                if start >= 0
                else []
            )
        text = "".join(f"<{token}>" for token in ended.tokens[first:at])
        yield {"text": text, "output_ids": ended.tokens[first:at], "meta_info": meta}
