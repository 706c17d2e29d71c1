"""OpenRLHF: what its policy actors publish of a DeepSpeed engine, and how its rollout actors ask replicas for tokens.

Decides neither when an update is made nor what is done with an answer: OpenRLHF calls both, where the diff of
docs/frameworks/openrlhf.md puts them in the places of its own broadcast and its own vLLM. It has no seam for that.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import torch
import torch.distributed as dist

from ckpt_engine.core.problems import CkptEngineError, deadline, error, invalid
from ckpt_engine.integrations.peft import publishable
from ckpt_engine.integrations.sampling import without_neutral
from ckpt_engine.integrations.updates import RankUpdates
from ckpt_engine.report import UpdateReport
from ckpt_engine.v1.weights_pb2 import Problem

SHARDED = 3
"""DeepSpeed's ZeRO stage in which a rank holds a part of each parameter."""

PASSED_ON = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "max_tokens",
    "min_tokens",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "seed",
    "skip_special_tokens",
)
"""Names that vLLM's SamplingParams and its HTTP API have alike."""

BUSY = (httpx.codes.TOO_MANY_REQUESTS, httpx.codes.SERVICE_UNAVAILABLE)
"""Statuses of a request that was not begun, and may be at another time: a gateway answers so after its own wait."""

AGAIN_SECONDS = 1.0
"""Between such an answer and the next try. A replica's own Retry-After is when its update ends at the latest."""


class PolicyUpdates:
    """The updates of one policy actor. Every rank has one, and every rank calls `bring` when OpenRLHF synchronises.

    engine: DeepSpeed's, after `deepspeed.initialize`. Up to ZeRO-2 its module is published as it is, and nothing is
    gathered; with ZeRO-3 each rank takes part in gathering every tensor, as in OpenRLHF's own broadcast, and publishes
    those of which it is the turn. LoRA is merged. Versions count the calls, from 0.

    Raises INVALID_ARGUMENT for DeepSpeed's tensor parallelism, and for LoRA with ZeRO-3.
    """

    def __init__(self, updates: RankUpdates, engine: Any) -> None:
        self._updates, self._weights = updates, _weights(engine)
        self._version = 0

    def bring(self) -> UpdateReport:
        """Brings the replicas to the weights as they are now. Raises CkptEngineError as `RankUpdates` does."""
        if not self._updates.opened:
            self._updates.open(self._weights, dist.get_rank(), dist.get_world_size())
        report = self._updates.bring(self._version)
        self._version += 1
        return report


def _weights(engine: Any) -> Any:
    """What `Trainer.publish` takes of a DeepSpeed engine."""
    if engine.autotp_size() > 1:
        raise invalid(f"--ds.tensor_parallel_size {engine.autotp_size()} is not supported: leave it at 1")
    weights = publishable(engine.module)
    if engine.zero_optimization_stage() != SHARDED:
        return weights
    if weights is not engine.module:
        raise invalid("LoRA with --ds.zero_stage 3 is not supported: use stage 2, in which adapters can be merged")
    return _gathered(engine.module)


def _gathered(module: torch.nn.Module) -> Callable[[], Iterator[tuple[str, torch.Tensor]]]:
    import deepspeed

    def walk() -> Iterator[tuple[str, torch.Tensor]]:
        for number, (name, tensor) in enumerate(module.state_dict(keep_vars=True).items()):
            with deepspeed.zero.GatheredParameters([tensor]):
                if number % dist.get_world_size() == dist.get_rank():
                    yield name, tensor.data

    return walk


@dataclass(frozen=True)
class Logprob:
    """Of one token, natural."""

    logprob: float


@dataclass(frozen=True)
class Completion:
    """What OpenRLHF reads of vLLM's CompletionOutput. logprobs: of the sampled tokens; None: none were asked for."""

    token_ids: list[int]
    text: str
    finish_reason: str | None
    logprobs: list[dict[int, Logprob]] | None


@dataclass(frozen=True)
class RequestAnswer:
    """What OpenRLHF reads of vLLM's RequestOutput."""

    outputs: Sequence[Completion]


class GatewayEngine:
    """In the place of vLLM's AsyncLLM in a rollout actor: asks a gateway, or one replica, for the tokens.

    url: its address. timeout: seconds for one answer, waiting for an update included. Until then a request that finds
    no replica or no room is asked again.

    Sleep, wake, pause, resume and the reset of caches do nothing: agents do that in the update, for the install only.
    """

    def __init__(self, url: str, timeout: float = 1800.0) -> None:
        self._url, self._timeout = url.rstrip("/"), timeout
        self._client = httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_connections=None))
        self._model: str | None = None
        self._unfinished = 0
        self.output_processor = self
        """Where OpenRLHF asks for `get_num_unfinished_requests`."""

    def get_num_unfinished_requests(self) -> int:
        """Requests of this actor that run: OpenRLHF deals prompts to its actors by it."""
        return self._unfinished

    async def generate(
        self, prompt: Mapping[str, Any], sampling_params: Any, request_id: str
    ) -> AsyncIterator[RequestAnswer]:
        """One answer, when it is whole. prompt: vLLM's TokensPrompt. sampling_params: vLLM's SamplingParams.

        Raises INVALID_ARGUMENT for pictures and what the server refuses, INTERNAL if it fails, and DEADLINE_EXCEEDED if
        it does not answer in time, each with the server's words.
        """
        if prompt.get("multi_modal_data"):
            raise invalid("pictures are not supported: only token ids can be asked for")
        self._unfinished += 1
        try:
            yield RequestAnswer([await self._complete(list(prompt["prompt_token_ids"]), sampling_params)])
        finally:
            self._unfinished -= 1

    async def _complete(self, prompt: list[int], sampling: Any) -> Completion:
        options = without_neutral({name: getattr(sampling, name) for name in PASSED_ON})
        body = {name: value for name, value in options.items() if value is not None and value != []}
        if sampling.logprobs is not None:
            body["logprobs"] = 0  # those of the sampled tokens, which is all that OpenRLHF reads
        model = await self._model_name()
        request = {**body, "model": model, "prompt": prompt, "return_token_ids": True}
        choice = (await self._ask("POST", "/v1/completions", request))["choices"][0]
        tokens, found = choice.get("token_ids"), (choice.get("logprobs") or {}).get("token_logprobs")
        if tokens is None or ("logprobs" in body and len(found or ()) != len(tokens)):
            raise error(
                Problem.CODE_INTERNAL, f"{self._url} answers without token ids or their logprobs: {str(choice)[:500]}"
            )
        pairs = zip(tokens, found or (), strict=False)
        logprobs = [{token: Logprob(value)} for token, value in pairs] if "logprobs" in body else None
        return Completion(tokens, choice["text"], choice["finish_reason"], logprobs)

    async def _model_name(self) -> str:
        if self._model is None:
            self._model = str((await self._ask("GET", "/v1/models"))["data"][0]["id"])
        return self._model

    async def _ask(self, method: str, route: str, body: Mapping[str, Any] | None = None) -> Any:
        """The answer's JSON. Raises CkptEngineError, as `generate` does."""
        last = f"{self._url}{route} does not answer"
        try:
            async with asyncio.timeout(self._timeout):
                while True:
                    response = await self._client.request(method, f"{self._url}{route}", json=body)
                    if response.status_code not in BUSY:
                        break
                    last = _words(response)
                    await asyncio.sleep(AGAIN_SECONDS)
        except TimeoutError:
            raise deadline(f"there was no answer within {self._timeout:g} s: {last}") from None
        if response.status_code != httpx.codes.OK:
            raise _refusal(response)
        return response.json()

    async def sleep(self, level: int = 1) -> None:
        """Does nothing."""

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Does nothing."""

    async def reset_prefix_cache(self) -> None:
        """Does nothing."""

    async def pause_generation(self, mode: str = "keep") -> None:
        """Does nothing."""

    async def resume_generation(self) -> None:
        """Does nothing."""


def _refusal(response: httpx.Response) -> CkptEngineError:
    code = Problem.CODE_INTERNAL if response.is_server_error else Problem.CODE_INVALID_ARGUMENT
    return error(code, _words(response))


def _words(response: httpx.Response) -> str:
    """A refusal, for people."""
    return f"{response.url} answers {response.status_code}: {response.text[:500]}"
