"""JSON that nests deeper than Python reads or writes, from callers and from engines: refused by name."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import pytest
from starlette.requests import Request
from starlette.responses import Response

from ckpt_engine.gateway.json_numbers import LEVELS
from ckpt_engine.gateway.large_json import LARGE_BYTES
from tests.gateway.misbehaving import BODY, Engine, asking, told

DEEP = b"[" * 100_000


def answer(status: int) -> Response:
    return Response(DEEP, status, media_type="application/json")


async def test_an_engine_that_refuses_with_deep_json_refuses() -> None:
    engine = Engine(lambda _number, _body: answer(400))
    async with asking(engine) as client:
        refused = await client.post("/v1/completions", json=BODY)
    assert (refused.status_code, refused.json()["reason"], len(engine.asked)) == (400, "engine_refused", 1)


async def test_an_engine_that_fails_with_deep_json_is_left_for_another() -> None:
    engines = [Engine(lambda _number, _body: answer(500)), Engine(lambda _number, body: told(body))]
    async with asking(*engines) as client:
        for _ in range(8):
            assert (await client.post("/v1/completions", json=BODY)).status_code == 200
            if engines[0].asked:
                break


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
async def test_an_event_of_deep_json(route: str) -> None:
    async def events() -> AsyncIterator[bytes]:
        yield b'data: {"choices": [{"index": 0, "token_ids": ' + DEEP + b"\n\n"
        yield b"data: [DONE]\n\n"

    engine = Engine(lambda _number, _body: events())
    async with asking(engine) as client:
        body = {**BODY, "stream": True, "messages": []}
        got = await client.post(route, json=body, headers={"x-ckpt-engine-resume": "off"})
    if route == "/v1/completions":
        assert (got.status_code, got.json()["reason"]) == (502, "resume_off")
        assert "an engine's event is not JSON" in got.json()["detail"]
    else:
        assert got.status_code == 200
        assert DEEP in got.content, "what the gateway cannot read it passes on as it came"


class Unread(Engine):
    """Refuses every request without having read it."""

    async def _complete(self, request: Request) -> Response:
        self.asked.append({})
        return Response(b'{"detail": "not now"}', 400)


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("large", [False, True])
async def test_a_body_is_sent_on_or_refused_at_each_depth(route: str, large: bool) -> None:
    """Also where it could be read and not written, for which less of the stack is left."""
    engine, rest = Unread(lambda _number, body: told(body)), {**BODY, "messages": [], "user": "a" * large * LARGE_BYTES}
    async with asking(engine) as client:
        for depth in (LEVELS - 1, LEVELS, *range(LEVELS + 50, 1100, 50), *range(900, 1000, 5), 100_000):
            nested = b"[" * (depth - 1) + b"]" * (depth - 1)
            content = b'{"extra": ' + nested + b", " + json.dumps(rest).encode()[1:]
            got = await client.post(route, content=content)
            assert got.status_code == 400
            assert got.json()["reason"] == ("engine_refused" if depth <= LEVELS else "bad_request"), (depth, got.text)
            assert depth <= LEVELS or "it is nested too deeply" in got.json()["detail"]
    assert len(engine.asked) == 2
