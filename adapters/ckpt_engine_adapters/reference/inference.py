"""Requests and answers of `/inference/v1/generate` as vLLM has it with `--enable-scale-out`: token ids in and out. The
last event has the versions of all tokens."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ckpt_engine_adapters.reference.answers import Event, Streamed
from ckpt_engine_adapters.reference.bodies import COMPLETION_REFUSED, MAX_SAMPLES, fields, samples, without
from ckpt_engine_adapters.reference.generation import Generation, Token

_REFUSED = fields("features content_parts kv_transfer_params ec_transfer_params", output_mode=(None, "tokens"))
_DEFAULT_TOKENS = 16


class InferenceSampling(BaseModel):
    """`sampling_params` of `/inference/v1/generate`."""

    model_config = ConfigDict(extra="ignore")

    max_tokens: int | None = Field(default=_DEFAULT_TOKENS, ge=1)  # None: as many as the model has room for
    temperature: float | None = Field(default=None, ge=0.0, allow_inf_nan=False)
    seed: int | None = None
    n: int | None = Field(default=None, ge=1, le=MAX_SAMPLES)
    stop_token_ids: list[int] | None = None
    logprobs: int | None = Field(default=None, ge=0, le=1)  # of the chosen tokens

    @model_validator(mode="before")
    @classmethod
    def _usable(cls, values: Any) -> Any:
        return without(values, COMPLETION_REFUSED)


class InferenceBody(BaseModel):
    """See vLLM's GenerateRequest."""

    model_config = ConfigDict(extra="ignore")

    token_ids: Annotated[list[Annotated[int, Field(strict=True)]], Field(min_length=1)]
    sampling_params: InferenceSampling = InferenceSampling()
    model: str | None = None
    request_id: str | None = None
    stream: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _usable(cls, values: Any) -> Any:
        return without(values, _REFUSED)

    def generations(self, max_positions: int) -> list[Generation]:
        """One generation for each sample."""
        params = self.sampling_params
        most = params.max_tokens or max(1, max_positions - len(self.token_ids))
        stops = params.stop_token_ids or ()
        return samples(self.token_ids, params.n or 1, most, params.temperature, params.seed, stops)


class InferenceForm(Streamed):
    """See Form."""

    def __init__(self, body: InferenceBody, generations: Sequence[Generation]) -> None:
        super().__init__(generations)
        self._body = body
        self._head = {"request_id": body.request_id or uuid.uuid4().hex, "output_mode": "tokens"}

    def whole(self) -> Any:
        choices = [
            self._choice(number, 0, len(generation.output), finished=True)
            for number, generation in enumerate(self.generations)
        ]
        return {**self._head, "choices": choices}

    def piece(self, number: int, token: Token | None, finished: bool) -> dict[str, Any]:
        end = self.sent[number]
        return {**self._head, "choices": [self._choice(number, end - (token is not None), end, finished)]}

    def closing(self) -> Iterator[Event]:
        yield "[DONE]"

    def _choice(self, number: int, start: int, end: int, finished: bool) -> dict[str, Any]:
        generation = self.generations[number]
        tokens, values = generation.output[start:end], generation.logprobs[start:end]
        content = [
            {"token_id": token, "logprob": value, "rank": None, "top_logprobs": [{"token_id": token, "logprob": value}]}
            for token, value in zip(tokens, values, strict=True)
        ]
        spans = [
            {**span, "version": "default" if span["version"] is None else str(span["version"])}
            for span in generation.weight_versions()
        ]
        return {
            "index": number,
            "token_ids": tokens,
            "logprobs": {"content": content} if self._body.sampling_params.logprobs is not None else None,
            "finish_reason": generation.finish_reason if finished else None,
            "stop_reason": generation.output[-1] if finished and generation.finish_reason == "stop" else None,
            "weight_versions": spans if finished else None,
        }
