"""Chats and texts: how they end when an update interrupts them, and which version they say they are of.

The engines are stand-ins that answer as vLLM and SGLang do; no small model has a chat. A real one is in tests/engines.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import httpx
import pytest
from starlette.responses import JSONResponse, Response

from tests.gateway.misbehaving import Engine, asking, told, unmet_answer, unmet_event

CHAT = {"messages": [{"role": "user", "content": "Call me"}]}
HEADERS = {"x-ckpt-engine-admitted-version": "4", "x-ckpt-engine-admitted-root": "abcd"}
ROLE: dict[str, Any] = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}

Answer = AsyncIterator[bytes] | Response


def said(content: str | None, reason: str | None = None) -> dict[str, Any]:
    delta = {} if content is None else {"content": content}
    return {"index": 0, "delta": delta, "finish_reason": reason}


def vllm(words: Sequence[str], reason: str) -> list[dict[str, Any]]:
    """Choices of a stream: the last token comes with the end, and an abort is one of its reasons."""
    return [ROLE, *map(said, words[:-1]), said(words[-1] if words else "", reason)]


def sglang(words: Sequence[str], reason: str) -> list[dict[str, Any]]:
    """The end has an event of its own."""
    return [ROLE, *map(said, words), said(None, reason)]


async def streamed(choices: Sequence[dict[str, Any]]) -> AsyncIterator[bytes]:
    for choice in choices:
        chunk = {"id": "chat", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}
        yield b"data: " + json.dumps(chunk).encode() + b"\n\n"
    yield b"data: [DONE]\n\n"


def whole(reason: str) -> Response:
    message = {"role": "assistant", "content": "Ishmael" if reason == "stop" else "Ish"}
    choice = {"index": 0, "message": message, "finish_reason": reason}
    usage = {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}
    return JSONResponse({"id": "chat", "choices": [choice], "usage": usage}, headers=HEADERS)


def named(answer: Answer) -> Answer:
    """With what a gate adds."""
    if isinstance(answer, Response):
        return answer
    return Engine.streaming(answer, HEADERS)


def events_of(answer: httpx.Response) -> list[Any]:
    parts = [part.removeprefix("data: ") for part in answer.text.split("\n\n") if part.startswith("data: ")]
    assert parts[-1] == "[DONE]"
    return [json.loads(part) for part in parts[:-1]]


def as_openai(answer: httpx.Response) -> str:
    """What a caller with the usual client gets of a stream: its text; RuntimeError where that client raises, which it
    does at an event with a true `error`."""
    text = ""
    for event in events_of(answer):
        if event.get("error"):
            raise RuntimeError(event["error"]["message"])
        for choice in event["choices"]:
            text += choice["delta"].get("content") or ""
            assert choice["finish_reason"] in (None, "stop", "length", "tool_calls", "content_filter")
    return text


@pytest.mark.parametrize("form", [vllm, sglang])
async def test_a_chat_that_an_update_cuts_off_ends_with_the_reason(form: Callable[..., Any]) -> None:
    engine = Engine(lambda _number, _body: named(streamed(form(["Ish", "ma"], "abort"))))
    async with asking(engine) as client:
        answer = await client.post("/v1/chat/completions", json={**CHAT, "stream": True})
    *events, last = events_of(answer)
    assert (last["error"]["code"], last["error"]["status"], len(engine.asked)) == ("not_resumable", 502, 1)
    text = "".join(choice["delta"].get("content") or "" for event in events for choice in event["choices"])
    assert text == "Ishma"
    with pytest.raises(RuntimeError, match="interrupted"):
        as_openai(answer)


@pytest.mark.parametrize("form", [vllm, sglang])
async def test_a_chat_that_is_cut_off_before_its_first_word_is_asked_for_again(form: Callable[..., Any]) -> None:
    def behave(number: int, _body: dict[str, Any]) -> Answer:
        return named(streamed(form(["Ish", "mael"], "stop") if number else form([], "abort")))

    engine = Engine(behave)
    async with asking(engine) as client:
        answer = await client.post("/v1/chat/completions", json={**CHAT, "stream": True})
    assert (as_openai(answer), len(engine.asked)) == ("Ishmael", 2)
    roles = [event["choices"][0]["delta"].get("role") for event in events_of(answer)]
    assert roles.count("assistant") == 1


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", {"prompt": "Call me"}),
        ("/v1/completions", {"prompt": [1, 2], "prompt_logprobs": 1}),
        ("/v1/completions", {"prompt": [[1, 2], [3]], "echo": True, "logprobs": 1, "max_tokens": 0}),
    ],
)
async def test_what_is_not_streamed_is_asked_for_again(route: str, body: dict[str, Any]) -> None:
    engine = Engine(lambda number, _body: whole("stop" if number == 2 else "abort"))
    async with asking(engine) as client:
        answer = await client.post(route, json=body)
        assert (answer.status_code, len(engine.asked)) == (200, 3)
        assert answer.json()["choices"][0]["message"]["content"] == "Ishmael"
        assert engine.asked == [body] * 3


@pytest.mark.parametrize(("resume", "reason", "asked"), [("off", "resume_off", 1), ("on", "no_progress", 3)])
async def test_tries_are_bounded(resume: str, reason: str, asked: int) -> None:
    engine = Engine(lambda _number, _body: whole("abort"))
    async with asking(engine, dry=2) as client:
        answer = await client.post("/v1/chat/completions", json=CHAT, headers={"x-ckpt-engine-resume": resume})
    assert (answer.status_code, answer.json()["reason"], len(engine.asked)) == (502, reason, asked)


async def test_sglangs_texts_are_asked_for_again_too() -> None:
    def behave(number: int, _body: dict[str, Any]) -> Answer:
        reason = {"type": "stop", "matched": 9} if number else {"type": "abort", "message": "Aborted"}
        labels = [{"version": "4", "start": 0, "end": 3}]
        meta = {"finish_reason": reason, "completion_tokens": 3, "weight_versions": labels}
        return JSONResponse({"text": "Ishmael", "meta_info": meta}, headers=HEADERS)

    engine = Engine(behave, kind="sglang")
    async with asking(engine) as client:
        answer = await client.post("/generate", json={"text": "Call me"})
    meta = answer.json()["meta_info"]
    assert (meta["finish_reason"]["type"], len(engine.asked)) == ("stop", 2)
    (span,) = meta["ckpt_engine"]["spans"]
    assert (span["version"], span["count"], span["exact"]) == (4, 3, True)


async def test_ids_of_a_try_that_was_given_up_are_not_counted() -> None:
    """A token may have no text yet: half of a character. A caller who asked for ids has got it all the same."""
    half = {**said(""), "token_ids": [5]}

    def behave(number: int, _body: dict[str, Any]) -> Answer:
        if number:
            return named(streamed([ROLE, {**said("Ish"), "token_ids": [6]}, {**said("", "stop"), "token_ids": [7]}]))
        return named(streamed([ROLE, half, said("", "abort")] if with_ids else [ROLE, said(""), said("", "abort")]))

    for with_ids in (False, True):
        engine = Engine(behave)
        async with asking(engine) as client:
            answer = await client.post("/v1/chat/completions", json={**CHAT, "stream": True})
        last = events_of(answer)[-1]
        if with_ids:
            assert last["error"]["choices"] == [{"index": 0, "token_ids": [5]}]
        else:
            (span,) = last["choices"][0]["ckpt_engine"]["spans"]
            assert (len(engine.asked), span["count"]) == (2, 2)


async def test_labels_that_are_not_believed_are_none() -> None:
    meta = {"finish_reason": {"type": "stop"}, "completion_tokens": 3}
    labels = {"weight_versions": [{"version": "9", "start": 0, "end": 3}]}
    engine = Engine(lambda *_: JSONResponse({"text": "x", "meta_info": {**meta, **labels}}, headers=HEADERS), kind="")
    async with asking(engine, probe=60.0) as client:
        engine.tell(mislabels=True)
        answer = await client.post("/generate", json={"text": "Call me"})
    (span,) = answer.json()["meta_info"]["ckpt_engine"]["spans"]
    assert (span["version"], span["exact"]) == (4, False)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_chat_names_its_version_in_headers_and_body(stream: bool) -> None:
    def behave(_number: int, _body: dict[str, Any]) -> Answer:
        return named(streamed(vllm(["Ish", "mael"], "stop"))) if stream else whole("stop")

    engine = Engine(behave)
    async with asking(engine) as client:
        answer = await client.post("/v1/chat/completions", json={**CHAT, "stream": stream})
    assert {name: answer.headers[name] for name in HEADERS} == HEADERS
    choices = [event["choices"][0] for event in (events_of(answer) if stream else [answer.json()])]
    assert ["ckpt_engine" in choice for choice in choices] == [False] * (len(choices) - 1) + [True]
    spoken = choices[-1]["ckpt_engine"]
    (span,) = spoken["spans"]
    assert (span["version"], span["exact"], span["count"]) == (4, False, None if stream else 3)
    assert (spoken["min_version"], spoken["max_version"], spoken["legs"][0]["ended"]) == (4, 4, "whole")


@pytest.mark.parametrize(
    ("wish", "reason"), [("x-ckpt-engine-min-version", "rolled_back"), ("x-ckpt-engine-version", "version_changed")]
)
async def test_a_gate_ends_a_chat_whose_version_goes(wish: str, reason: str) -> None:
    async def ends() -> AsyncIterator[bytes]:
        async for event in streamed(vllm(["Ish", "mael"], "stop")):
            if b"finish_reason" in event and b"stop" in event:
                break
            yield event
        yield unmet_event(reason)

    engine = Engine(lambda _number, _body: named(ends()))
    async with asking(engine) as client:
        answer = await client.post("/v1/chat/completions", json={**CHAT, "stream": True}, headers={wish: "4"})
    assert engine.headers[0][wish] == "4"
    assert events_of(answer)[-1]["error"]["reason"] == reason
    with pytest.raises(RuntimeError):
        as_openai(answer)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_chat_that_a_gate_does_not_answer_goes_to_another_replica(stream: bool) -> None:
    """Also if the role has come already: its caller has got nothing."""

    async def ends() -> AsyncIterator[bytes]:
        async for event in streamed(vllm(["Ish"], "stop")):
            yield event
            break
        yield unmet_event("version_changed")

    one = Engine(lambda _number, _body: named(ends()) if stream else unmet_answer("version_changed"))
    other = Engine(lambda _number, _body: named(streamed(vllm(["Ish", "mael"], "stop"))) if stream else whole("stop"))
    async with asking(one, other, probe=60.0) as client:
        while not one.asked:
            headers = {"x-ckpt-engine-version": "4", "x-session-id": str(len(other.asked))}
            answer = await client.post("/v1/chat/completions", json={**CHAT, "stream": stream}, headers=headers)
            assert answer.status_code == 200, answer.text
    last = events_of(answer)[-1] if stream else answer.json()
    assert last["choices"][0]["finish_reason"] == "stop"
    assert last["choices"][0]["ckpt_engine"]["max_version"] == 4


async def test_a_request_that_a_gate_let_in_under_another_version_goes_on_elsewhere() -> None:
    def behave(_number: int, body: dict[str, Any]) -> Answer:
        return Engine.streaming(told(body), {"x-ckpt-engine-admitted-version": "3"})

    def sound(_number: int, body: dict[str, Any]) -> Answer:
        return Engine.streaming(told(body), {"x-ckpt-engine-admitted-version": "4"})

    late, right = Engine(behave), Engine(sound)
    asks = {"prompt": [1, 2, 3], "max_tokens": 2, "return_token_ids": True}
    async with asking(late, right) as client:
        for number in range(60):  # sessions go to either
            headers = {"x-ckpt-engine-min-version": "4", "x-session-id": str(number)}
            answer = await client.post("/v1/completions", json=asks, headers=headers)
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["ckpt_engine"]["min_version"] == 4
            assert len(right.asked) == number + 1
            if late.asked and number >= 5:
                return
    raise AssertionError("no session went to the engine whose gate has another version")
