"""The served model between the agent's calls and transformers: its worker, its generation, and the one thread for both.

It decides which models can be updated. What a pause does is decided in generation.py, what an install does in our core.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from ckpt_engine.gate.directory import EngineDirectory
from ckpt_engine.install.worker import EngineWorker
from ckpt_engine_adapters.transformers_serve.generation import Mode, PausableGeneration
from ckpt_engine_adapters.transformers_serve.target import TransformersTarget

Result = TypeVar("Result")


class NotPausedError(Exception):
    """An install was asked for while the engine computes."""


class ServedModel:
    """One model of a server. Its methods are called on the event loop, and run one after the other on one thread.

    Raises OSError, ValueError: the model cannot be updated, or its worker's slot cannot be had; the server should not
    start then.
    """

    def __init__(self, model: Any, generation: PausableGeneration, directory: EngineDirectory) -> None:
        if reason := refusal(model):
            raise ValueError(reason)
        self._model = model
        self._generation = generation
        facts = f"{type(model).__name__}, {model.dtype}, {model.config._attn_implementation}, {model.device.type}"
        self._worker = EngineWorker(directory, 0, 1, TransformersTarget(model), model=facts)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ckpt-engine")

    @property
    def paused(self) -> bool:
        return self._generation.paused

    async def pause(self, mode: Mode, seconds: float) -> None:
        """See PausableGeneration.pause. Raises TimeoutError also if a step does not end within `seconds`."""
        await self._run(seconds, lambda: self._generation.pause(mode, seconds))

    async def resume(self, seconds: float) -> None:
        await self._run(seconds, self._generation.resume)

    async def prepare(self, seconds: float) -> bool:
        """See EngineWorker.prepare. No step runs meanwhile."""
        return await self._run(seconds, self._prepare)

    async def install(self, epoch: int, seconds: float) -> bool:
        """See EngineWorker.install. Raises NotPausedError."""
        return await self._run(seconds, lambda: self._install(epoch))

    async def score(
        self, tokens: Sequence[int], more: int, seconds: float
    ) -> tuple[list[float], list[int], list[float], list[int]]:
        """Log-probabilities of `tokens` but the first, `more` greedy tokens after them, and theirs; and the likeliest
        token at each place of the first. Without a cache: it is for checks and probes."""
        return await self._run(seconds, lambda: self._score(tokens, more))

    async def _run(self, seconds: float, what: Callable[[], Result]) -> Result:
        """Raises TimeoutError after `seconds`; then it is not known what has been done, and it may still be."""
        return await asyncio.wait_for(asyncio.wrap_future(self._thread.submit(what)), seconds)

    def _prepare(self) -> bool:
        with self._generation.between_steps():
            return self._worker.prepare()

    def _install(self, epoch: int) -> bool:
        if not self._generation.paused:
            raise NotPausedError("install was asked for while the engine computes: pause it first")
        done = self._worker.install(epoch)
        if self._model.device.type == "cuda":
            torch.cuda.synchronize()  # steps run on a stream of their own
        return done

    def _score(self, tokens: Sequence[int], more: int) -> tuple[list[float], list[int], list[float], list[int]]:
        with self._generation.between_steps(), torch.inference_mode(), self._plain_attention():
            found = self._log_probabilities(tokens)
            prompt = [float(found[place, token]) for place, token in enumerate(tokens[1:])]
            top = found[:-1].argmax(dim=-1).tolist()
            output, values = [], []
            for _ in range(more):
                value, token = found[-1].max(dim=-1)
                output.append(int(token))
                values.append(float(value))
                found = self._log_probabilities([*tokens, *output])
            return prompt, output, values, top

    def _log_probabilities(self, tokens: Sequence[int]) -> torch.Tensor:
        """Of the token after each of these: [tokens, vocabulary], float32."""
        logits = self._model(input_ids=torch.tensor([tokens], device=self._model.device), use_cache=False).logits[0]
        return torch.log_softmax(logits.float(), dim=-1)

    @contextmanager
    def _plain_attention(self) -> Iterator[None]:
        """Attention over the tokens of one request: continuous batching's eager kind needs its paged caches."""
        used = str(self._model.config._attn_implementation)
        _, paged, plain = used.partition("|")
        if not paged:
            yield
            return
        self._model.set_attn_implementation(plain)
        try:
            yield
        finally:
            self._model.set_attn_implementation(used)


def refusal(model: Any) -> str:
    """Why no update can be made of this model; empty: it can."""
    kind = type(model).__name__
    if getattr(model, "hf_quantizer", None) is not None:
        return f"{kind} is quantised: transformers repacks its weights where no update could follow"
    devices = sorted({str(parameter.device) for parameter in model.parameters()})
    if len(devices) > 1 or devices == ["meta"]:
        return f"{kind} lies on {', '.join(devices)}: it must be on one device (--device)"
    return ""
