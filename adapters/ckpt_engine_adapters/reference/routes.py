"""The HTTP routes of the reference engine. They translate; the scheduler decides.

Generation, for anyone, while the gate is open:
    POST /generate (its own form and SGLang's), POST /v1/completions, POST /inference/v1/generate, GET /model_info
State, for anyone, always:
    GET /health, GET /info, and what routers ask for: GET /v1/models, GET /server_info
Development routes, only with the gate's token:
    POST /pause /resume /sleep /wake /stamp /ckpt_engine/prepare /ckpt_engine/install /ckpt_engine/score
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import Body, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field

from ckpt_engine_adapters.reference.answers import AnswerForm, CompletionForm, OwnForm, SglangForm
from ckpt_engine_adapters.reference.bodies import CompletionBody, GenerateBody, GenerateForm
from ckpt_engine_adapters.reference.engine import MAX_RUNNING, ConflictError, ReferenceEngine
from ckpt_engine_adapters.reference.generation import Generation
from ckpt_engine_adapters.reference.inference import InferenceBody, InferenceForm
from ckpt_engine_adapters.reference.pool import WorkerFailedError
from ckpt_engine_adapters.reference.serving import answer, problem
from ckpt_engine_adapters.reference.versions import engine_version

CONTROL_SECONDS = 120.0  # of a control call without a deadline


@dataclass(frozen=True)
class ModelFacts:
    """Facts of the model for GET /info; constant while the engine runs."""

    model: str  # its directory
    served_model_name: str  # by which clients ask for it
    architecture: str
    dtype: str
    vocabulary: int  # tokens
    max_positions: int
    workers: tuple[int, ...]  # process ids on this host, by rank
    tensor_parallel: int  # workers on all nodes


class _RouteBody(BaseModel):
    model_config = ConfigDict(extra="forbid")


class _Control(_RouteBody):
    seconds: float = Field(default=CONTROL_SECONDS, gt=0)


class PauseBody(_Control):
    mode: Literal["abort", "wait", "keep", "in_place"] = "keep"


class SleepBody(_Control):
    level: Literal[1, 2] = 1


class WakeBody(_Control):
    tags: list[Literal["weights", "kv_cache"]] = []


class InstallBody(_Control):
    epoch: int


class ScoreBody(_Control):
    tokens: list[int] = Field(min_length=2)
    more: int = Field(ge=0)


class StampBody(_Control):
    version: int
    lineage: str
    root: str


def create_app(engine: ReferenceEngine, facts: ModelFacts) -> FastAPI:
    """The application, without the gate around it."""
    app = FastAPI(title="ckpt-engine reference engine")
    started = int(time.time())
    model_names = {"model_path": facts.model, "served_model_name": facts.served_model_name}

    @app.exception_handler(ConflictError)
    async def conflict(_request: Request, error: ConflictError) -> Response:
        return problem(409, str(error))

    @app.exception_handler(WorkerFailedError)
    async def failed(_request: Request, error: WorkerFailedError) -> Response:
        return problem(500, str(error))

    @app.exception_handler(RequestValidationError)
    async def refused(_request: Request, error: RequestValidationError) -> Response:
        messages = (
            ": ".join(filter(None, (".".join(map(str, each["loc"][1:])), each["msg"].removeprefix("Value error, "))))
            for each in error.errors()
        )
        return problem(422, "; ".join(messages))

    @app.exception_handler(TimeoutError)
    async def timeout(_request: Request, _error: TimeoutError) -> Response:
        return problem(504, "not done within the deadline; whether it will be is unknown")

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

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        card = {"id": facts.served_model_name, "object": "model", "created": started, "owned_by": "ckpt-engine"}
        about = {"root": facts.model, "parent": None, "max_model_len": facts.max_positions}
        return {"object": "list", "data": [{**card, **about}]}

    @app.get("/server_info")
    @app.get("/get_server_info")
    async def server_info() -> dict[str, Any]:
        return {
            **model_names,
            "tp_size": facts.tensor_parallel,
            "dp_size": 1,
            "context_length": facts.max_positions,
            "max_running_requests": MAX_RUNNING,
            "version": engine_version(),
        }

    @app.get("/model_info")
    @app.get("/get_model_info")
    async def model_info() -> dict[str, Any]:
        identity = engine.identity()
        return {
            **model_names,
            "is_generation": True,
            "architectures": [facts.architecture],
            "weight_version": "default" if identity is None else str(identity.version),
        }

    async def generate(form: AnswerForm, request: Request, stream: bool, model: str | None = None) -> Response:
        if model and Path(model) != Path(facts.served_model_name):  # a path, unless it was given a name
            refusal = f"The model {model!r} does not exist; this engine serves {facts.served_model_name!r}"
            return problem(404, refusal, code="model_not_found")
        for generation in form.generations:
            too_much = _too_much(generation, facts)
            if too_much:
                return problem(400, too_much)
        if engine.asleep:
            return problem(503, "this replica is asleep", {"retry-after": "1"})
        return await answer(engine, form, request, stream)

    @app.post("/generate", response_model=None)
    async def generate_tokens(body: Annotated[GenerateForm, Body()], request: Request) -> Response:
        generations = body.generations(facts.max_positions)
        form = OwnForm(body, generations) if isinstance(body, GenerateBody) else SglangForm(body, generations)
        return await generate(form, request, bool(body.stream))

    @app.post("/v1/completions", response_model=None)
    async def completions(body: CompletionBody, request: Request) -> Response:
        form = CompletionForm(body, body.generations(facts.max_positions), facts.served_model_name)
        return await generate(form, request, bool(body.stream), body.model)

    @app.post("/inference/v1/generate", response_model=None)
    async def inference(body: InferenceBody, request: Request) -> Response:
        form = InferenceForm(body, body.generations(facts.max_positions))
        return await generate(form, request, bool(body.stream), body.model)

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

    @app.post("/ckpt_engine/score", response_model=None)
    async def score(body: ScoreBody) -> dict[str, Any] | Response:
        if too_much := _too_much(Generation(body.tokens, max_tokens=body.more), facts):
            return problem(400, too_much)
        return await engine.score(body.tokens, body.more, body.seconds)

    return app


def _too_much(generation: Generation, facts: ModelFacts) -> str:
    """Why the model cannot serve the request; empty: it can."""
    if not all(0 <= token < facts.vocabulary for token in generation.prompt):
        return f"the model has tokens 0 to {facts.vocabulary - 1}, and the prompt names others"
    if len(generation.prompt) + generation.max_tokens > facts.max_positions:
        return f"the prompt and the tokens wanted together exceed the model's {facts.max_positions} positions"
    return ""
