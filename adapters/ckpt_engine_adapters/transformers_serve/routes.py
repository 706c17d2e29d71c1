"""The agent's routes into a transformers server, below /ckpt_engine/, which the gate keeps for the agent. They
translate; served.py acts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

from fastapi import APIRouter, HTTPException
from pydantic import BaseModel, ConfigDict, Field

from ckpt_engine_adapters.transformers_serve.gate import STATE_ROUTE
from ckpt_engine_adapters.transformers_serve.generation import Mode
from ckpt_engine_adapters.transformers_serve.served import NotPausedError, ServedModel


class Call(BaseModel):
    """The body of an order of the agent's."""

    model_config = ConfigDict(extra="forbid")
    seconds: float = Field(gt=0)  # that it may take; then it is answered 504


class PauseCall(Call):
    mode: Mode


class InstallCall(Call):
    epoch: int


class ScoreCall(Call):
    tokens: list[int] = Field(min_length=1)
    more: int = Field(ge=0)


def agents_routes(served: ServedModel) -> APIRouter:
    """The routes that only the replica's agent may call: state, pause, resume and what else it orders."""
    router = APIRouter(include_in_schema=False)

    @router.get(STATE_ROUTE)
    async def state() -> dict[str, Any]:
        return {"version": version("transformers"), "paused": served.paused}

    @router.post("/ckpt_engine/pause")
    async def pause(call: PauseCall) -> None:
        with _refusals():
            try:
                await served.pause(call.mode, call.seconds)
            except RuntimeError as error:
                raise HTTPException(500, str(error)) from error

    @router.post("/ckpt_engine/resume")
    async def resume(call: Call) -> None:
        with _refusals():
            await served.resume(call.seconds)

    @router.post("/ckpt_engine/prepare")
    async def prepare(call: Call) -> dict[str, bool]:
        with _refusals():
            return {"done": await served.prepare(call.seconds)}

    @router.post("/ckpt_engine/install")
    async def install(call: InstallCall) -> dict[str, bool]:
        with _refusals():
            return {"done": await served.install(call.epoch, call.seconds)}

    @router.post("/ckpt_engine/score")
    async def score(call: ScoreCall) -> dict[str, list[Any]]:
        with _refusals():
            prompt, output, values, top = await served.score(call.tokens, call.more, call.seconds)
            return {"prompt": prompt, "output": output, "output_log_probabilities": values, "top": top}

    return router


@contextmanager
def _refusals() -> Iterator[None]:
    """Answers for a call that could not be done."""
    try:
        yield
    except TimeoutError as error:
        raise HTTPException(504, str(error) or "it takes longer than the call allows, and may go on") from None
    except NotPausedError as error:
        raise HTTPException(409, str(error)) from None
