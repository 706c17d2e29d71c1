"""Chats by token ids: legs go on where one broke off, and the caller gets one chat with one role and one id.

The engine is a stand-in with vLLM's forms, whose tokenizer knows letters, so that legs can break at every token. Real
ones, with their parsers, are in tests/engines.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tests.gateway import model_engine
from tests.gateway.misbehaving import Engine, asking
from tests.gateway.test_passing import events_of

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWX"
assert len(LETTERS) == model_engine.VOCABULARY
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "call"}], "max_tokens": 12}
PROMPT = [LETTERS.index(letter) for letter in "call"]
IDS = model_engine.decode(PROMPT, 12, 0, frozenset()).tokens
TEXT = "".join(LETTERS[token] for token in IDS)

Breaks = Callable[[int], int | None]
"""Of a leg's number: after how many tokens it breaks off; None: it does not."""


class Vllm(Engine):
    """Renders, generates and derenders as vLLM does. parses: it has a parser for reasoning, so that it repeats the
    output in its state and streams no log-probabilities. questions: the bodies that its tokenizer was asked with."""

    def __init__(self, breaks: Breaks = lambda _leg: None, parses: bool = False, together: int = 1) -> None:
        self.breaks, self.parses, self.together = breaks, parses, together
        self.questions: list[tuple[str, dict[str, Any]]] = []
        self.refusals: dict[str, list[int]] = {}  # the status of each answer on a route; 0: it is answered
        super().__init__(self._generate, kind="none")

    def _generate(self, number: int, body: dict[str, Any]) -> AsyncIterator[bytes] | Response:
        if "messages" in body:  # passed on as it came
            message = {"role": "assistant", "content": "passed on"}
            choice = {"index": 0, "message": message, "delta": message, "finish_reason": "stop"}
            content = {"id": "theirs", "choices": [choice]}
            if not body.get("stream"):
                return JSONResponse(content)
            return self._lines([content])
        events = list(model_engine.inference(body, self._chunks, 4))
        after = self.breaks(number)
        return self._lines(events, None if after is None else after)

    def _chunks(self, count: int) -> list[int]:
        return [min(self.together, count - at) for at in range(0, count, self.together)]

    @staticmethod
    async def _lines(events: list[Any], after: int | None = None) -> AsyncIterator[bytes]:
        for event in events[:after]:
            yield b"data: " + json.dumps(event).encode() + b"\n\n"
        if after is None:
            yield b"data: [DONE]\n\n"

    def more_routes(self) -> list[Route]:
        async def routes(_request: Request) -> Response:
            return JSONResponse({"paths": {"/inference/v1/generate": {}}})

        async def convert(request: Request) -> Response:
            body, path = await request.json(), request.url.path
            self.questions.append((path, body))
            if self.refusals.get(path) and (status := self.refusals[path].pop(0)):
                return JSONResponse({"error": {"message": "no"}}, status)
            answer = self.render(body) if path.endswith("/render") else self.derender(path, body)
            return JSONResponse(answer)

        paths = ("/v1/chat/completions/render", "/v1/chat/completions/derender", "/v1/completions/derender")
        return [Route("/openapi.json", routes), *(Route(path, convert, methods=["POST"]) for path in paths)]

    @staticmethod
    def render(body: dict[str, Any]) -> dict[str, Any]:
        text = body["messages"][-1]["content"]
        names = ("max_tokens", "min_tokens", "stop", "seed", "n", "temperature", "include_stop_str_in_output")
        params = {name: body[name] for name in (*names, "stop_token_ids") if name in body}
        if body.get("logprobs"):
            params["logprobs"] = body.get("top_logprobs", 0)
        own = {"output_kind": 1, "skip_clone": True, "output_text_buffer_length": 2}
        return {"token_ids": [LETTERS.index(letter) for letter in text], "sampling_params": {**params, **own}}

    def derender(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if not body["stream"]:
            (choice,) = body["generate_response"]["choices"]
            text = "".join(LETTERS[token] for token in choice["token_ids"])
            message = {"role": "assistant", "content": text, "tool_calls": []}
            shown = choice["token_ids"] if body["chat_request"].get("return_token_ids") else None
            told = {"index": 0, "message": message, "logprobs": choice["logprobs"], "token_ids": shown}
            return {"id": "theirs", "model": "served", "choices": [told]}
        (choice,) = body["generate_chunk"]["choices"]
        state = body["stream_state"] or {"output_token_ids": [], "prev_tokens": []}
        asks = body.get("chat_request") or {}
        if state["prev_tokens"] == [] or self.parses:
            assert body["prompt_token_ids"] == PROMPT
        text = "".join(LETTERS[token] for token in choice["token_ids"])
        at = state.get("read", 0)
        assert IDS[at : at + len(text)] == choice["token_ids"], "a state is of the tokens before"
        seen = [*state["prev_tokens"], text][-2:]
        state = {"prev_tokens": seen, "output_token_ids": state["output_token_ids"], "read": at + len(text)}
        if path == "/v1/completions/derender":
            return {"chunk": {"choices": [{"text": text}]}, "stream_state": state}
        if self.parses:
            assert asks["messages"]
            state["output_token_ids"] = [*state["output_token_ids"], *choice["token_ids"]]
        delta: dict[str, Any] = {"role": "assistant", "content": text or None, "reasoning": None, "tool_calls": []}
        told = {
            "index": 0,
            "delta": delta,
            "token_ids": choice["token_ids"] if asks.get("return_token_ids") else None,
            "logprobs": None if self.parses else choice.get("logprobs"),
        }
        return {"chunk": {"id": "x", "model": "served", "choices": [told]}, "stream_state": state}


def joined(answer: httpx.Response) -> dict[str, Any]:
    """A stream's chat, as a client puts it together; there is one id, one `created` and one role."""
    assert answer.status_code == 200, answer.text
    events = events_of(answer)
    assert all("error" not in event for event in events), events[-1]
    assert len({(event["id"], event["created"], event["model"]) for event in events}) == 1
    choices = [choice for event in events for choice in event["choices"]]
    assert choices[0]["delta"].get("role") == "assistant"
    assert sum("role" in choice["delta"] for choice in choices) == 1
    last = choices[-1]
    return {
        "text": "".join(choice["delta"].get("content") or "" for choice in choices),
        "ids": [token for choice in choices for token in choice.get("token_ids") or []],
        "finish": (last["finish_reason"], last["stop_reason"]),
        "about": last["ckpt_engine"],
        "usage": events[-1].get("usage"),
        "logprobs": [each for choice in choices for each in (choice["logprobs"] or {}).get("content", [])],
    }


STREAM = {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
USAGE = {"prompt_tokens": 4, "completion_tokens": 12, "total_tokens": 16}


def breaking(*after: int) -> Breaks:
    return lambda leg: after[leg] if leg < len(after) else None


@pytest.mark.parametrize("parses", [False, True])
async def test_a_streamed_chat_goes_on_where_a_leg_broke_off(parses: bool) -> None:
    engine = Vllm(parses=parses)
    async with asking(engine) as client:
        for after in ((), (1,), (5, 3), (0, 11)):
            engine.breaks = breaking(*after)
            engine.asked.clear()
            engine.questions.clear()
            chat = joined(await client.post("/v1/chat/completions", json={**CHAT, **STREAM}))
            assert (chat["text"], chat["ids"], chat["finish"]) == (TEXT, IDS, ("length", None))
            assert (chat["usage"], chat["about"]["resumes"]) == (USAGE, len(after))
            assert engine.asked[-1]["sampling_params"]["max_tokens"] == 12 - sum(after)
            (render, first, *others) = engine.questions
            assert render[0] == "/v1/chat/completions/render"
            assert first[1]["prompt_token_ids"] == PROMPT
            assert {path for path, _ in (first, *others)} == {"/v1/chat/completions/derender"}
            assert all(("prompt_token_ids" in each) is parses for _, each in others)


@pytest.mark.parametrize("after", [(), (4,)])
async def test_a_whole_chat_goes_on_too(after: tuple[int, ...]) -> None:
    engine = Vllm(breaking(*after), parses=True)
    async with asking(engine) as client:
        answer = await client.post("/v1/chat/completions", json={**CHAT, "logprobs": True, "return_token_ids": True})
    content = answer.json()
    (choice,) = content["choices"]
    assert choice["message"] == {"role": "assistant", "content": TEXT, "tool_calls": []}
    assert (choice["token_ids"], content["prompt_token_ids"], content["usage"]) == (IDS, PROMPT, USAGE)
    assert [entry["token_id"] for entry in choice["logprobs"]["content"]] == IDS
    expected = [model_engine.logprob([*PROMPT, *IDS[:at]], token) for at, token in enumerate(IDS)]
    assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == expected
    assert choice["ckpt_engine"]["resumes"] == len(after)
    assert [path for path, _ in engine.questions][1:] == ["/v1/chat/completions/derender"]


STOPPED = [
    *((seam, 1, False, True) for seam in (4, 6, 7)),
    *((5, together, keep, not keep) for together in (1, 5) for keep in (False, True)),
]
"""Where the first leg breaks off, how many tokens come together, whether the stop string is kept, and a stream."""


async def test_a_stop_string_across_a_seam_ends_the_chat() -> None:
    """Also in the middle of what came together; nothing of it was told before."""
    stop, engine = TEXT[4:7], Vllm()
    async with asking(engine) as client:
        for seam, together, keep, stream in STOPPED:
            engine.breaks, engine.together = breaking(seam if together == 1 else seam // together), together
            engine.asked.clear()
            body = {**CHAT, "stop": ["zzz", stop], "include_stop_str_in_output": keep}
            answer = await client.post("/v1/chat/completions", json={**body, **(STREAM if stream else {})})
            text = TEXT[: 7 if keep else 4]
            if stream:
                chat = joined(answer)
                assert (chat["text"], chat["ids"], chat["finish"]) == (text, IDS[:7], ("stop", stop))
                usage = chat["usage"]
            else:
                (choice,), usage = answer.json()["choices"], answer.json()["usage"]
                end = choice["message"]["content"], choice["finish_reason"], choice["stop_reason"]
                assert end == (text, "stop", stop)
            assert usage["completion_tokens"] == 7
            chunks = [body for path, body in engine.questions if path == "/v1/chat/completions/derender"]
            ends = [each.get("generate_chunk") or each["generate_response"] for each in chunks]
            words = [token for each in ends for token in each["choices"][0]["token_ids"]]
            assert words == IDS[: len(text)], "no parser sees a stop string that is cut off"
            engine.questions.clear()
            assert all(body["sampling_params"]["stop"] == ["zzz", stop] for body in engine.asked)


async def test_a_stream_with_stop_strings_is_told_as_it_comes() -> None:
    async with asking(Vllm(breaking(5))) as client:
        answer = await client.post("/v1/chat/completions", json={**CHAT, "stop": ["zz", TEXT[8] + "z"], **STREAM})
    contents = [choice["delta"].get("content") for event in events_of(answer) for choice in event["choices"]]
    told = [content for content in contents if content]
    assert len(told) > 1
    assert TEXT[:5].startswith(told[0])
    assert "".join(told) == TEXT


async def test_a_stop_string_within_the_minimum_is_text() -> None:
    first, second = [at for at, letter in enumerate(TEXT) if letter == "k"]
    async with asking(Vllm(together=4)) as client:
        body = {**CHAT, "stop": "k", "min_tokens": first + 1, **STREAM}
        chat = joined(await client.post("/v1/chat/completions", json=body))
    assert (chat["text"], chat["ids"]) == (TEXT[:second], IDS[: second + 1])


async def test_the_token_that_stops_a_chat_is_counted_and_is_no_text() -> None:
    engine = Vllm(breaking(3))
    body = {**CHAT, "stop_token_ids": [IDS[6]]}
    async with asking(engine) as client:
        chat = joined(await client.post("/v1/chat/completions", json={**body, **STREAM, "logprobs": True}))
        answer = (await client.post("/v1/chat/completions", json=body)).json()
    assert (chat["text"], chat["ids"], chat["finish"]) == (TEXT[:6], IDS[:7], ("stop", IDS[6]))
    assert [entry["token_id"] for entry in chat["logprobs"]] == IDS[:7]
    assert (answer["choices"][0]["message"]["content"], answer["usage"]["completion_tokens"]) == (TEXT[:6], 7)


async def test_several_samples_are_resumed_each_by_itself() -> None:
    engine = Vllm(breaking(3, 5))
    async with asking(engine) as client:
        answer = await client.post("/v1/chat/completions", json={**CHAT, "n": 2, "seed": 7})
    content = answer.json()
    assert [choice["message"]["content"] for choice in content["choices"]] == [TEXT, TEXT]
    assert sum(choice["ckpt_engine"]["resumes"] for choice in content["choices"]) == 2
    assert {body["sampling_params"]["seed"] for body in engine.asked} > {7, 8}
    assert content["usage"] == {"prompt_tokens": 4, "completion_tokens": 24, "total_tokens": 28}


REASONS: list[tuple[dict[str, Any], str]] = [
    ({"presence_penalty": 0.5}, "presence_penalty: it counts the tokens"),
    ({"tool_choice": "required"}, "tool_choice: its grammar"),
    ({"unheard_of": 1}, "unheard_of: the gateway does not know it"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages: the prompt is not"),
    ({"prompt_logprobs": 1}, "engines do not stream"),
]


async def test_what_cannot_be_resumed_is_passed_on_and_says_why() -> None:
    engine = Vllm()
    async with asking(engine) as client:
        for more, why in REASONS:
            answer = await client.post("/v1/chat/completions", json={**CHAT, **more})
            (choice,) = answer.json()["choices"]
            assert choice["message"]["content"] == "passed on"
            assert choice["ckpt_engine"]["not_resumable"].startswith(why)
            assert (engine.questions, engine.asked[-1]) == ([], {**CHAT, **more})


@pytest.mark.parametrize("route", ["/v1/chat/completions/render", "/v1/chat/completions/derender"])
async def test_an_engine_without_the_routes_gets_the_chat_as_it_came(route: str) -> None:
    engine = Vllm()
    engine.refusals[route] = [403]
    async with asking(engine) as client:
        answer = await client.post("/v1/chat/completions", json=CHAT)
    (choice,) = answer.json()["choices"]
    assert choice["message"]["content"] == "passed on"
    assert "403" in choice["ckpt_engine"]["not_resumable"] or "no" in choice["ckpt_engine"]["not_resumable"]


async def test_a_chat_is_never_begun_twice_for_its_caller() -> None:
    """Its engine refuses to turn ids into words after the first of them."""
    engine = Vllm(breaking(5))
    engine.refusals["/v1/chat/completions/derender"] = [0, 400]
    async with asking(engine) as client:
        answer = await client.post("/v1/chat/completions", json={**CHAT, "stream": True})
    *events, last = events_of(answer)
    text = "".join(event["choices"][0]["delta"]["content"] for event in events)
    assert text
    assert TEXT[:5].startswith(text)
    assert last["error"]["code"] == "engine_refused"
    assert not any("messages" in body for body in engine.asked)


async def test_logprobs_that_a_parser_keeps_from_the_stream_come_as_the_engine_sends_them() -> None:
    engine = Vllm(parses=True)
    async with asking(engine) as client:
        answer = await client.post("/v1/chat/completions", json={**CHAT, "stream": True, "logprobs": True})
    (event,) = events_of(answer)
    (choice,) = event["choices"]
    assert choice["ckpt_engine"]["not_resumable"].startswith("logprobs: ")


async def test_another_replica_turns_ids_into_words_where_one_fails() -> None:
    engines = [Vllm(), Vllm()]
    for engine in engines:
        engine.refusals["/v1/chat/completions/derender"] = [500, 503]
    async with asking(*engines) as client:
        chat = joined(await client.post("/v1/chat/completions", json={**CHAT, **STREAM}))
    assert (chat["text"], chat["about"]["resumes"]) == (TEXT, 0)


async def test_a_chat_that_broke_after_its_first_words_ends_with_the_reason_where_nothing_serves() -> None:
    engine = Vllm(breaking(3, 0, 0, 0))
    async with asking(engine, dry=1) as client:
        answer = await client.post("/v1/chat/completions", json={**CHAT, **STREAM})
    *_, last = events_of(answer)
    assert (last["error"]["code"], last["error"]["choices"][0]["token_ids"]) == ("no_progress", IDS[:3])
