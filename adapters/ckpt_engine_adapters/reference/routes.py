"""The HTTP routes of the reference engine. They translate; the scheduler decides.

Generation, for anyone, while the gate is open:
    POST /generate
State, for anyone, always:
    GET /health, GET /info
Development routes, only with the gate's token:
    POST /pause /resume /sleep /wake /stamp /ckpt_engine/prepare /ckpt_engine/install
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import asdict, dataclass
from http import HTTPStatus
from typing import Any, Literal

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field

from ckpt_engine_adapters.reference.engine import ConflictError, Engine
from ckpt_engine_adapters.reference.generation import Generation
from ckpt_engine_adapters.reference.pool import WorkerFailedError
from ckpt_engine_adapters.reference.versions import engine_version

CONTROL_SECONDS = 120.0  # of a control call that names no deadline


@dataclass(frozen=True)
class ModelFacts:
    """What GET /info says of the model; constant while the engine runs. workers: process ids
    of this host's, by rank. tensor_parallel: how many there are on all nodes."""

    model: str
    architecture: str
    dtype: str
    vocabulary: int
    max_positions: int
    workers: tuple[int, ...]
    tensor_parallel: int


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class GenerateBody(_Body):
    """temperature 0 is greedy; equal seeds draw equal samples from equal weights; a stop token ends the output."""

    input_ids: list[int] = Field(min_length=1)
    max_tokens: int = Field(default=16, ge=1)
    temperature: float = Field(default=0.0, ge=0.0)
    seed: int = Field(default=0, ge=0)
    logprobs: bool = False
    stream: bool = False
    stop_token_ids: list[int] = []


class _Control(_Body):
    seconds: float = Field(default=CONTROL_SECONDS, gt=0)


class PauseBody(_Control):
    mode: Literal["abort", "wait", "keep", "in_place"] = "keep"


class SleepBody(_Control):
    level: Literal[1, 2] = 1


class WakeBody(_Control):
    tags: list[Literal["weights", "kv_cache"]] = []


class InstallBody(_Control):
    epoch: int


class StampBody(_Control):
    version: int
    lineage: str
    root: str


def create_app(engine: Engine, facts: ModelFacts) -> FastAPI:
    """The application, without the gate around it."""
    app = FastAPI(title="ckpt-engine reference engine")

    @app.exception_handler(ConflictError)
    async def conflict(_request: Request, error: ConflictError) -> Response:
        return _problem(409, str(error))

    @app.exception_handler(WorkerFailedError)
    async def failed(_request: Request, error: WorkerFailedError) -> Response:
        return _problem(500, str(error))

    @app.exception_handler(TimeoutError)
    async def late(_request: Request, _error: TimeoutError) -> Response:
        return _problem(504, "not done within the deadline; whether it will be is unknown")

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/info")
    async def info() -> dict[str, Any]:
        return {
            "engine": "reference",
            "engine_version": engine_version(),
            "tensor_parallel": facts.tensor_parallel,
            **asdict(facts),
            **engine.info(),
        }

    @app.post("/generate", response_model=None)
    async def generate(body: GenerateBody, request: Request) -> Response:
        too_much = _too_much(body, facts)
        if too_much:
            return _problem(400, too_much)
        if engine.asleep:
            return _problem(503, "this replica is asleep", {"retry-after": "1"})
        generation = Generation(
            body.input_ids,
            max_tokens=body.max_tokens,
            temperature=body.temperature,
            seed=body.seed,
            stop_tokens=body.stop_token_ids,
        )
        engine.submit(generation)
        if body.stream:
            return StreamingResponse(_events(engine, generation, body.logprobs), media_type="text/event-stream")
        try:
            await _ended_or_disconnected(generation, request)
        finally:
            engine.cancel(generation)
        return _problem(500, generation.error) if generation.error else JSONResponse(_result(generation, body.logprobs))

    @app.post("/pause")
    async def pause(body: PauseBody) -> dict[str, Any]:
        await engine.pause(body.mode, body.seconds)
        return engine.info()

    @app.post("/resume")
    async def resume() -> dict[str, Any]:
        engine.resume()
        return engine.info()

    @app.post("/sleep")
    async def sleep(body: SleepBody) -> dict[str, Any]:
        await engine.sleep(body.level, body.seconds)
        return engine.info()

    @app.post("/wake")
    async def wake(body: WakeBody) -> dict[str, Any]:
        await engine.wake(body.tags, body.seconds)
        return engine.info()

    @app.post("/stamp")
    async def stamp(body: StampBody) -> dict[str, Any]:
        engine.confirm(body.lineage, body.version, body.root)
        return {"version": body.version}

    @app.post("/ckpt_engine/prepare")
    async def prepare(body: _Control) -> dict[str, list[bool]]:
        return {"done": await engine.prepare(body.seconds)}

    @app.post("/ckpt_engine/discard")
    async def discard(body: _Control) -> dict[str, Any]:
        await engine.discard(body.seconds)
        return engine.info()

    @app.post("/ckpt_engine/install")
    async def install(body: InstallBody) -> dict[str, list[bool]]:
        return {"done": await engine.install(body.epoch, body.seconds)}

    return app


def _too_much(body: GenerateBody, facts: ModelFacts) -> str:
    """Why the model cannot do that; empty: it can."""
    if not all(0 <= token < facts.vocabulary for token in body.input_ids):
        return f"input_ids: the model has tokens 0 to {facts.vocabulary - 1}"
    if len(body.input_ids) + body.max_tokens > facts.max_positions:
        return f"input_ids and max_tokens together exceed the model's {facts.max_positions} positions"
    return ""


async def _ended_or_disconnected(generation: Generation, request: Request) -> None:
    """Returns when the request has ended or nobody waits for it any more."""
    ended = asyncio.create_task(generation.ended.wait())
    gone = asyncio.create_task(_disconnected(request.receive))
    try:
        await asyncio.wait((ended, gone), return_when=asyncio.FIRST_COMPLETED)
    finally:
        ended.cancel()
        gone.cancel()


async def _disconnected(receive: Callable[[], Awaitable[Any]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue


async def _events(engine: Engine, generation: Generation, logprobs: bool) -> AsyncIterator[str]:
    """One server-sent event a token, and a last one with the whole result (or an error)."""
    try:
        while (token := await generation.events.get()) is not None:
            event: dict[str, Any] = {"token": token.token, "version": token.version}
            if logprobs:
                event["logprob"] = token.logprob
            yield f"data: {json.dumps(event)}\n\n"
        last = {"error": generation.error} if generation.error else _result(generation, logprobs)
        yield f"data: {json.dumps(last)}\n\n"
    finally:
        engine.cancel(generation)


def _result(generation: Generation, logprobs: bool) -> dict[str, Any]:
    versions = generation.weight_versions()
    return {
        "output_ids": generation.output,
        **({"logprobs": generation.logprobs} if logprobs else {}),
        "finish_reason": generation.finish_reason,
        "version": versions[-1]["version"] if versions else None,
        "weight_versions": versions,
    }


def _problem(status: int, detail: str, headers: dict[str, str] | None = None) -> JSONResponse:
    body = {"type": "about:blank", "title": HTTPStatus(status).phrase, "status": status, "detail": detail}
    return JSONResponse(body, status, headers, media_type="application/problem+json")
