"""NaN and infinities, which Python's JSON has and JSON has not, through a gateway and real HTTP servers."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from starlette.responses import Response

from ckpt_engine.gateway import json_numbers
from tests.gateway.misbehaving import BODY, Engine, told
from tests.gateway.test_raw_callers import request, sent, serving, sound

CHAT = b"POST /v1/chat/completions HTTP/1.1"


def strictly(data: bytes) -> Any:
    """As other languages read it."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(data, parse_constant=refuse)


@pytest.mark.parametrize("line", [b"POST /v1/completions HTTP/1.1", CHAT], ids=["resumable", "passed on"])
@pytest.mark.parametrize(
    ("more", "said"),
    [
        (b'"temperature": NaN', "temperature: NaN"),
        (b'"temperature": -Infinity', "temperature: -Infinity"),
        (b'"top_p": 1e999', "top_p: 1e999"),
        (b'"logit_bias": {"7": 0, "8": [1, {"a": Infinity}]}', "logit_bias.8[1].a: Infinity"),
        (b'"seed": NaN, "seed": 1', "NaN is not a number"),
    ],
)
async def test_a_request_with_what_is_no_number_reaches_no_engine(more: bytes, said: str, line: bytes) -> None:
    engine = sound()
    content = b'{"prompt": [1, 2], "messages": [], "max_tokens": 4, ' + more + b"}"
    async with serving(engine) as port:
        answer = await sent(port, request(content, line=line))
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert said in strictly(answer.partition(b"\r\n\r\n")[2])["detail"]
    assert not engine.asked


async def test_numbers_that_are_some_arrive_as_they_were() -> None:
    engine = sound()
    body = {**BODY, "temperature": 0.1, "top_p": 1e-300, "user": "NaN, Infinity", "frequency_penalty": -0.5}
    async with serving(engine) as port:
        answer = await sent(port, request(json.dumps(body).encode()))
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert {name: engine.asked[0][name] for name in ("temperature", "top_p", "frequency_penalty")} == {
        name: body[name] for name in ("temperature", "top_p", "frequency_penalty")
    }


async def infinite(body: dict[str, Any]) -> AsyncIterator[bytes]:
    """What a sound engine streams, with log-probabilities that are none."""
    async for event in told(body):
        if b"DONE" in event:
            yield event
            continue
        content = json.loads(event.removeprefix(b"data: "))
        for choice in content["choices"]:
            tops = [{"a": float("-inf"), "b": float("nan"), "c": -0.5} for _ in choice["token_ids"]]
            tokens = [str(token) for token in choice["token_ids"]]
            values = [float("-inf") for _ in tokens]
            choice["logprobs"] = {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops}
        yield b"data: " + json.dumps(content).encode() + b"\n\n"


@pytest.mark.parametrize("stream", [True, False])
async def test_infinite_log_probabilities_are_null(stream: bool) -> None:
    async with serving(Engine(lambda _number, body: infinite(body))) as port:
        body = {**BODY, "logprobs": 3, "stream": stream}
        answer = await sent(port, request(json.dumps(body).encode(), line=b"POST /v1/completions HTTP/1.0", last=False))
    head, _, rest = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 "), answer
    events = [part[6:] for part in rest.split(b"\n\n") if part and b"DONE" not in part] if stream else [rest]
    said = [choice["logprobs"] for event in events for choice in strictly(event)["choices"]]
    assert {value for each in said for value in each["token_logprobs"]} == {None}
    tops = [top for each in said for top in each["top_logprobs"]]
    assert len(tops) == BODY["max_tokens"]
    assert all(top == {"a": None, "b": None, "c": -0.5} for top in tops)


def whole(_number: int, _body: dict[str, Any]) -> Response:
    return Response(b'{"text": "NaN", "logprob": -Infinity, "x": [NaN, 1.5]}', media_type="application/json")


def streamed(_number: int, _body: dict[str, Any]) -> AsyncIterator[bytes]:
    async def events() -> AsyncIterator[bytes]:
        yield b'data: {"text": "NaN", "logprob": -Infinity, "x": [NaN, 1.5]}\n\n'
        yield b"data: [DONE]\n\n"

    return events()


@pytest.mark.parametrize("behave", [whole, streamed])
async def test_what_is_passed_on_has_null_for_them_too(behave: Callable[..., Any]) -> None:
    async with serving(Engine(behave)) as port:
        content = json.dumps({"messages": [], "stream": behave is streamed}).encode()
        line = b"POST /v1/chat/completions HTTP/1.0"
        answer = await sent(port, request(content, line=line, last=False))
    rest = answer.partition(b"\r\n\r\n")[2].removeprefix(b"data: ").partition(b"\n\n")[0]
    assert strictly(rest) == {"text": "NaN", "logprob": None, "x": [None, 1.5]}


@pytest.mark.parametrize(
    "data", [b"[DONE]", b'{"text": "NaN and Infinity",  "x": 1.50}', b"NaN of a text", b"\xff NaN"]
)
def test_what_needs_no_change_is_passed_byte_for_byte(data: bytes) -> None:
    assert json_numbers.finite_json(data) == data


@pytest.mark.parametrize("large", [False, True])
def test_what_is_too_large_for_a_double_is_written_as_null(large: bool) -> None:
    """It is a number of JSON, so that it is read as infinity, and not as one of the names."""
    content = json_numbers.load_answer(b'{"a": [1e999, {"b": -1e999}, 1.5], "c": 1e999}')
    assert json_numbers.dump(content, large) == b'{"a":[null,{"b":null},1.5],"c":null}'
