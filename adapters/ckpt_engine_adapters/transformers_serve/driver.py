"""Drives a `transformers serve` over the routes that our half adds to it, and starts one behind our gate.

It decides which servers it can drive. It moves no weights, and what its calls do is decided inside the server.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

from ckpt_engine.agent.http import ENGINE_SHARE, HttpAdapter
from ckpt_engine.core.check_verdict import Score
from ckpt_engine.engine.adapter import (
    AdapterAvailability,
    AdapterSettings,
    Capabilities,
    EngineCallError,
    EngineInfo,
    LaunchPlan,
)
from ckpt_engine.engine.command import completed
from ckpt_engine.v1 import manager_pb2, weights_pb2
from ckpt_engine_adapters.transformers_serve.command import (
    SUPPORTED,
    WRAPPER,
    check_command,
    model_of,
    options_of,
    wrapped,
)
from ckpt_engine_adapters.transformers_serve.gate import STATE_ROUTE

_MODES = {
    manager_pb2.PAUSE_MODE_UNSPECIFIED: "keep",
    manager_pb2.PAUSE_MODE_KEEP: "keep",
    manager_pb2.PAUSE_MODE_ABORT: "abort",
    manager_pb2.PAUSE_MODE_WAIT: "wait",
    manager_pb2.PAUSE_MODE_IN_PLACE: "in_place",
}
_SERVING = ("accelerate", "fastapi", "openai", "pydantic", "uvicorn")
"""Modules that `transformers serve` needs beside transformers."""

CAPABILITIES = Capabilities(
    pause_modes=frozenset(mode for mode in _MODES if mode != manager_pb2.PAUSE_MODE_UNSPECIFIED),
    default_pause_mode=manager_pb2.PAUSE_MODE_KEEP,
    layouts=("one worker",),
    versions=("5.23.0 on CPUs",),
    notes=(
        "keep has running requests begin again with what they have generated as a part of their prompt; in_place keeps "
        "the old caches. Caches are not shared between requests.",
        "abort ends a stream with an event that has `error`, and other requests with 503: the server has no form for a "
        "part of an answer.",
        "/v1/completions and /v1/chat/completions say which version made which token (`weight_versions`).",
        "The server is for one model, which its command names; a request that names another is refused with 400.",
        "The first request fixes how all requests are sampled, as without us.",
        "Checkpoints come under their published names, also with experts one by one, or under those of the model's "
        "state_dict.",
    ),
    cannot=(
        "It cannot sleep.",
        "/v1/systemone and /v1/audio/transcriptions are for the agent only: they compute outside continuous batching, "
        "which is all that can be paused. For the same reason only language models can be served.",
        "Quantised models, GGUF files and models on several devices are refused.",
        "Checkpoint tensors that transformers computes on while it loads, beyond fusing experts, are refused.",
        "Only CPUs were run.",
    ),
)


class TransformersAdapter(HttpAdapter):
    """Drives a running server over the routes of our half inside it. One call at a time, except `healthy`."""

    kind = "transformers"
    capabilities = CAPABILITIES

    async def probe(self, seconds: float) -> EngineInfo:
        """Asks for the version. A server without our wrapper is reported as not supported."""
        try:
            state = await self._get(STATE_ROUTE, seconds)
        except EngineCallError as error:
            if not error.answered:
                raise
            return EngineInfo(
                "", 0, False, f"start it with `python -m {WRAPPER}`, which puts it behind our gate: {error}"
            )
        version = str(state["version"])
        refusal = SUPPORTED.refusal(version)
        paused, untested = bool(state["paused"]), SUPPORTED.untested(version)
        return EngineInfo(version, 1, not refusal, refusal, paused, False, untested)

    async def prepare(self, seconds: float) -> None:
        await self._post_within("/ckpt_engine/prepare", seconds)

    async def score(self, tokens: Sequence[int], more: int, seconds: float, cached: bool = False) -> Score:
        """Without a cache in any case: transformers' server keeps none from one request to the next."""
        body = {"tokens": list(tokens), "more": more, "seconds": seconds * ENGINE_SHARE}
        answer = (await self._client.call("POST", "/ckpt_engine/score", seconds, body)).json()
        return Score(
            tuple(map(float, answer["prompt"])),
            tuple(map(int, answer["output"])),
            tuple(map(float, answer["output_log_probabilities"])),
            tuple(map(int, answer["top"])),
        )

    async def pause(self, mode: manager_pb2.PauseMode, seconds: float) -> None:
        await self._post_within("/ckpt_engine/pause", seconds, mode=_MODES[mode])

    async def install(self, epoch: int, seconds: float) -> None:
        await self._post_within("/ckpt_engine/install", seconds, epoch=epoch)

    async def resume(self, seconds: float) -> None:
        await self._post_within("/ckpt_engine/resume", seconds)

    async def discard(self, seconds: float) -> None:
        raise _no_sleep()

    async def sleep(self, level: int, seconds: float) -> None:
        raise _no_sleep()

    async def wake(self, tags: Sequence[str], seconds: float) -> None:
        raise _no_sleep()

    async def stamp(self, identity: weights_pb2.Identity, seconds: float) -> None:
        """Does nothing: answers name the version in the worker's state word."""


def _no_sleep() -> EngineCallError:
    return EngineCallError("transformers serve cannot sleep", answered=True)


def create_adapter(settings: AdapterSettings) -> TransformersAdapter:
    return TransformersAdapter(settings)


def launch_plan(arguments: Sequence[str], port: int, model: str) -> LaunchPlan:
    """Plans the start of transformers' server. arguments: `transformers serve` with its model and options, or only
    these (then with this Python).

    The user's options are kept; model, host and port are added if missing.
    """
    start, rest = wrapped(arguments)
    named = model_of(rest)
    if model and named:
        raise ValueError(f"two models: --model {model}, and {named} behind --; leave one of them out")
    rest = [*([model] if model else []), *rest]
    check_command(rest)
    additions, url = completed(options_of(rest), "", "", port)
    return LaunchPlan(argv=(*start, *rest, *additions), url=url, workers=1)


def refused_command(command: Sequence[str]) -> str:
    return SUPPORTED.refused_command(command)


def availability() -> AdapterAvailability:
    """Whether transformers is installed here, in a version that can be driven, with what its server needs."""
    installed = SUPPORTED.installed()
    missing = [module for module in _SERVING if importlib.util.find_spec(module) is None]
    if not installed.ok or not missing:
        return installed
    reason = f"its server needs {', '.join(missing)} besides: pip install 'ckpt-engine[transformers]'"
    return AdapterAvailability(False, installed.version, reason)
