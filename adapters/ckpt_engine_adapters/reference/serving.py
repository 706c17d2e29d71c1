"""Serves one HTTP request's generations from the scheduler to the client: whole, or as server-sent events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from http import HTTPStatus
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from ckpt_engine.core.openai_errors import error_object
from ckpt_engine_adapters.reference.answers import AnswerForm, Event
from ckpt_engine_adapters.reference.engine import ReferenceEngine
from ckpt_engine_adapters.reference.generation import Generation, Token


async def answer(engine: ReferenceEngine, form: AnswerForm, request: Request, stream: bool) -> Response:
    """Generates, and answers in the client's form. Cancels generations that it does not wait for any more."""
    if stream:
        return StreamingResponse(_events(engine, form), media_type="text/event-stream")
    try:
        for generation in form.generations:
            engine.submit(generation)
        await _ended_or_disconnected(form.generations, request)
    finally:
        _cancel(engine, form.generations)
    error = next((generation.error for generation in form.generations if generation.error), "")
    return problem(500, error) if error else JSONResponse(form.whole())


def problem(status: int, detail: str, headers: dict[str, str] | None = None, code: str = "") -> JSONResponse:
    """A problem as in RFC 9457, with the error that OpenAI's clients read. code: of that error; empty: the status's
    name."""
    known = HTTPStatus(status)
    error = error_object(status, code or known.name.lower(), detail)
    body = {"type": "about:blank", "title": known.phrase, "status": status, "detail": detail, "error": error}
    return JSONResponse(body, status, headers, media_type="application/problem+json")


async def _events(engine: ReferenceEngine, form: AnswerForm) -> AsyncIterator[str]:
    tokens: asyncio.Queue[tuple[int, Token | None]] = asyncio.Queue()
    try:
        for number, generation in enumerate(form.generations):
            generation.on_token = partial(_put, tokens, number)
            engine.submit(generation)
        running = len(form.generations)
        while running:
            number, token = await tokens.get()
            running -= token is None
            for event in form.event(number, token):
                yield _sent(event)
        for event in form.closing():
            yield _sent(event)
    finally:
        _cancel(engine, form.generations)


def _put(tokens: asyncio.Queue[tuple[int, Token | None]], number: int, token: Token | None) -> None:
    tokens.put_nowait((number, token))


def _sent(event: Event) -> str:
    return f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n"


async def _ended_or_disconnected(generations: Sequence[Generation], request: Request) -> None:
    """Waits until the generations have ended or the client has disconnected."""
    end = asyncio.gather(*(generation.ended.wait() for generation in generations))
    disconnect = asyncio.create_task(_disconnected(request.receive))
    try:
        await asyncio.wait((end, disconnect), return_when=asyncio.FIRST_COMPLETED)
    finally:
        end.cancel()
        disconnect.cancel()


async def _disconnected(receive: Callable[[], Awaitable[Any]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue


def _cancel(engine: ReferenceEngine, generations: Sequence[Generation]) -> None:
    for generation in generations:
        engine.cancel(generation)
