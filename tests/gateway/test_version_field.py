"""The field `weight_version`, with which bodies ask for versions: it holds as headers do, and no engine gets it."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from starlette.responses import JSONResponse

from tests.gateway import model_engine
from tests.gateway.misbehaving import BODY, PROMPT, Engine, asking, told

HEADERS = {"x-ckpt-engine-admitted-version": "4", "x-ckpt-engine-admitted-root": "abcd"}


def engine_of(route: str) -> Engine:
    """It answers as an engine that holds version 4."""

    def behave(_number: int, body: dict[str, Any]) -> Any:
        if "chat" in route:
            message = {"index": 0, "message": {"role": "assistant", "content": "Ishmael"}, "finish_reason": "stop"}
            return JSONResponse({"id": "chat", "choices": [message]}, headers=HEADERS)
        if route == "/generate":
            return Engine.streaming(streamed(model_engine.sglang(body, lambda count: [1] * count, 4)), HEADERS)
        return Engine.streaming(told(body), HEADERS)

    return Engine(behave)


async def streamed(events: Any) -> Any:
    for event in events:
        yield b"data: " + json.dumps(event).encode() + b"\n\n"
    yield b"data: [DONE]\n\n"


ASKS: dict[str, dict[str, Any]] = {
    "/v1/completions": BODY,
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Call me"}]},
    "/generate": {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 3}},
}


FIELDS: tuple[Any, ...] = ({"exact_version": 4}, {"min_required_version": 3, "exact_version": None}, {}, None)


@pytest.mark.parametrize("route", ASKS)
async def test_the_answer_says_under_which_versions_it_was_made(route: str) -> None:
    engine = engine_of(route)
    async with asking(engine) as client:
        answers = [await client.post(route, json={**ASKS[route], "weight_version": field}) for field in FIELDS]
        other = await client.post(route, json=ASKS[route])
    assert all("weight_version" not in asked for asked in engine.asked)
    assert "weight_version_start" not in other.text
    for answer in answers:
        assert answer.status_code == 200, answer.text
        content = answer.json()
        if route == "/generate":
            content = content["meta_info"]
            assert content["weight_version"] == "4"
        assert (content["weight_version_start"], content["weight_version_end"]) == (4, 4)
        if "chat" not in route:
            spoken = (content if route == "/generate" else content["choices"][0])["ckpt_engine"]
            assert "not_resumable" not in spoken


async def test_a_stream_says_it_on_its_last_event() -> None:
    async with asking(engine_of("/v1/completions")) as client:
        body = {**BODY, "stream": True, "weight_version": {"min_version": 1}}
        answer = await client.post("/v1/completions", json=body)
    parts = [part.removeprefix("data: ") for part in answer.text.split("\n\n") if part.startswith("data: ")]
    *first, last = [json.loads(part) for part in parts[:-1]]
    assert (last["weight_version_start"], last["weight_version_end"]) == (4, 4)
    assert not any("weight_version_start" in event for event in first)


REFUSALS: list[tuple[Any, int, str, str]] = [
    ({"exact_version": 5}, 503, "version_not_yet", "asks for version 5"),
    ({"min_version": 5, "exact_version": None}, 503, "version_not_yet", "asks for version 5 or a later one"),
    ({"lineage": "other", "max_lag": 0}, 503, "version_not_yet", "at most 0 behind the last of lineage 'other'"),
    ({"min": 5}, 400, "bad_request", "weight_version.min: there is no such member"),
    (5, 400, "bad_request", "weight_version: '5' must be an object"),
    ({"exact_version": 4.0}, 400, "bad_request", "weight_version.exact_version: '4.0' must be an integer"),
    ({"lineage": ""}, 400, "bad_request", "weight_version.lineage: '' must be the name of a lineage"),
    ({"session": 4}, 400, "bad_request", "weight_version.session: '4' must be a text"),
    ({"session": "four"}, 400, "bad_request", "'four' must be 'new' or what the last answer names"),
    ({"session": "5::"}, 503, "version_not_yet", "asks for version 5 or a later one"),
    ({"session": "4::a", "lineage": "b"}, 400, "bad_request", "lineage 'a', and 'b' is asked for"),
    ({"session": "5::", "exact_version": 4}, 400, "bad_request", "or the session's 5: no version is both"),
]


async def test_a_version_that_is_not_there_is_no_answer() -> None:
    engine = engine_of("/v1/completions")
    async with asking(engine) as client:
        for field, status, reason, words in REFUSALS:
            headers = {"x-ckpt-engine-queue-seconds": "0"}
            answer = await client.post("/v1/completions", json={**BODY, "weight_version": field}, headers=headers)
            assert (answer.status_code, answer.json()["reason"]) == (status, reason), answer.text
            assert words in answer.json()["detail"]
    assert not engine.asked


async def test_header_and_field_may_not_contradict_each_other() -> None:
    async with asking(engine_of("/v1/completions")) as client:

        async def ask(version: str) -> httpx.Response:
            body = {**BODY, "weight_version": {"exact_version": 4}}
            return await client.post("/v1/completions", json=body, headers={"x-ckpt-engine-version": version})

        assert (await ask("4")).status_code == 200
        refused = await ask("5")
    assert (refused.status_code, refused.json()["reason"]) == (400, "bad_request")
    assert "4, and 5 is asked for beside it" in refused.json()["detail"]
