"""Chats by text: an engine goes on with the message that its caller has, if it renders it as it stood.

The engine is a stand-in with vLLM's forms and without its routes for ids, whose tokenizer knows letters, so that legs
can break at every token. Real ones are in tests/engines.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ckpt_engine.gateway.chat_text import ChatText
from ckpt_engine.gateway.dialect import MalformedError
from ckpt_engine_adapters.sglang import chats as sglang
from ckpt_engine_adapters.vllm import chats as vllm
from tests.gateway import model_engine
from tests.gateway.misbehaving import Engine, asking, unmet_answer, unmet_event
from tests.gateway.test_passing import HEADERS, events_of
from tests.gateway.test_rendered_chats import LETTERS

OPENING = "Q"
"""Of the assistant's turn, in the template."""

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "call"}], "max_tokens": 12}
STREAM = {"stream": True, "stream_options": {"include_usage": True}}
PROMPT = [LETTERS.index(letter) for letter in f"call{OPENING}"]
TEXT = "".join(LETTERS[token] for token in model_engine.decode(PROMPT, 12, 0, frozenset()).tokens)
USAGE = {"prompt_tokens": 5, "completion_tokens": 12, "total_tokens": 17}

Ends = Callable[[int], tuple[int, str] | None]
"""Of a leg's number: after how many tokens it ends, and how: "abort" or "broken"; None: it is whole."""


class TextEngine(Engine):
    """strips: the template takes the last letter from a message that is to be continued. beside: a field of the delta
    with which each leg begins. questions: routes of those that were asked. missing: what it says to one instead of
    answering it."""

    def __init__(self, ends: Ends = lambda _leg: None, strips: bool = False, beside: str = "") -> None:
        self.ends, self.strips, self.beside = ends, strips, beside
        self.questions: list[str] = []
        self.refuses = False
        self.missing: Callable[[], Response | None] = lambda: None
        super().__init__(self._answer, kind="none")

    def rendered(self, body: dict[str, Any]) -> list[int]:
        *before, last = [each["content"] for each in body["messages"]]
        if body.get("continue_final_message"):
            assert body["add_generation_prompt"] is False
            text = "".join(before) + OPENING + (last[:-1] if self.strips else last)
        else:
            text = "".join([*before, last]) + OPENING
        return [LETTERS.index(letter) for letter in text]

    def _answer(self, number: int, body: dict[str, Any]) -> AsyncIterator[bytes] | Response:
        ends = self.ends(number)
        prompt = self.rendered(body)
        ended = model_engine.decode(prompt, body["max_tokens"], 0, frozenset())
        if not body.get("stream"):
            if ends is not None:
                return JSONResponse({"choices": [_choice(number, "x", "abort")]}) if ends[1] == "abort" else _cut()
            text = "".join(LETTERS[token] for token in ended.tokens)
            choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "length"}
            return JSONResponse({"id": "whole", "choices": [choice]}, headers=HEADERS)
        return Engine.streaming(self._events(number, len(prompt), ended.tokens, ends), HEADERS)

    async def _events(
        self, number: int, prompt: int, tokens: list[int], ends: tuple[int, str] | None
    ) -> AsyncIterator[bytes]:
        role = {"role": "assistant", "content": ""}
        yield _event(number, {"index": 0, "delta": role, "finish_reason": None})
        if self.beside:
            yield _event(number, {"index": 0, "delta": {self.beside: "hm"}, "finish_reason": None})
        after, how = ends or (len(tokens), "length")
        for token in tokens[:after]:
            yield _event(number, _choice(number, LETTERS[token], None))
        if how != "broken":
            yield _event(number, _choice(number, "\ufffd" if how == "abort" else "", how))
            usage = {"prompt_tokens": prompt, "completion_tokens": after, "total_tokens": prompt + after}
            yield _event(number, None, {**usage, "prompt_tokens_details": {"cached_tokens": 3}})
            yield b"data: [DONE]\n\n"

    def more_routes(self) -> list[Route]:
        async def routes(_request: Request) -> Response:
            return JSONResponse({"paths": {"/inference/v1/generate": {}}})

        async def ask(request: Request) -> Response:
            body, route = await request.json(), request.url.path
            self.questions.append(route)
            if (answer := self.missing()) is not None:
                return answer
            if self.refuses:
                return JSONResponse({"error": {"message": "messages must end with the user's"}}, 400)
            if route == "/tokenize":
                return JSONResponse({"tokens": self.rendered(body)})
            return JSONResponse({"prompt": "".join(LETTERS[token] for token in body["tokens"])})

        paths = ("/tokenize", "/detokenize")
        return [Route("/openapi.json", routes), *(Route(path, ask, methods=["POST"]) for path in paths)]


def _choice(_number: int, content: str, reason: str | None) -> dict[str, Any]:
    return {"index": 0, "delta": {"content": content}, "finish_reason": reason, "stop_reason": None}


def _event(number: int, choice: dict[str, Any] | None, usage: dict[str, Any] | None = None) -> bytes:
    content = {"id": f"leg-{number}", "created": number, "model": "m", "choices": [choice] if choice else []}
    return b"data: " + json.dumps(content | ({"usage": usage} if usage else {})).encode() + b"\n\n"


def _cut() -> Response:
    """An answer whose connection ends before its length."""
    return Response(b'{"id"', media_type="application/json", headers={"content-length": "100"})


def joined(answer: httpx.Response) -> dict[str, Any]:
    """A stream's chat, as a client puts it together; there is one id, one `created` and one role."""
    assert answer.status_code == 200, answer.text
    events = events_of(answer)
    error = events.pop()["error"] if "error" in events[-1] else None
    assert len({(event["id"], event["created"]) for event in events}) == 1
    choices = [choice for event in events for choice in event["choices"]]
    assert ["role" in choice["delta"] for choice in choices] == [True] + [False] * (len(choices) - 1)
    return {
        "text": "".join(choice["delta"].get("content") or "" for choice in choices),
        "finish": choices[-1]["finish_reason"],
        "about": choices[-1].get("ckpt_engine"),
        "usage": events[-1].get("usage"),
        "error": error,
    }


async def ask(*engines: TextEngine, **fields: Any) -> dict[str, Any]:
    async with asking(*engines) as client:
        for _ in range(100):  # a gateway that has just started does not know the kind of its engines yet
            found = joined(await client.post("/v1/chat/completions", json={**CHAT, **STREAM, **fields}))
            if "of kind unknown" not in str(found):
                break
            await asyncio.sleep(0.1)
        return found


@pytest.mark.parametrize("how", ["abort", "broken"])
@pytest.mark.parametrize("after", [1, 6, 11])
async def test_a_chat_goes_on_with_its_callers_text(after: int, how: str) -> None:
    engine = TextEngine(lambda leg: (after, how) if leg == 0 else None)
    found = await ask(engine)
    assert (found["text"], found["finish"], found["usage"]) == (TEXT, "length", USAGE)
    about = found["about"]
    assert (about["resumed_by"], about["resumes"], "not_resumable" in about) == ("text", 1, False)
    ended = "aborted" if how == "abort" else "broken"
    assert [(leg["first"], leg["ended"]) for leg in about["legs"]] == [(0, ended), (after, "whole")]
    assert (about["legs"][0]["count"], about["legs"][1]["count"]) == (after, None)
    assert (about["min_version"], about["max_version"]) == (4, 4)
    assert [body["max_tokens"] for body in engine.asked] == [12, 12 - after]
    assert engine.asked[1]["messages"][-1] == {"role": "assistant", "content": TEXT[:after]}


@pytest.mark.parametrize(
    ("after", "models"),
    [((0, 4), ["policy", "policy", "policy@8"]), ((4, 2), ["policy", "policy@7", "policy@7"])],
)
async def test_a_chat_goes_on_with_the_version_of_its_adapter(after: tuple[int, int], models: list[str]) -> None:
    """Which is the one that the first word is of. The newest one is another by then."""
    engine = TextEngine(lambda leg: (after[leg], "broken") if leg < 2 else None)
    behave = engine.behave

    def of_an_adapter(number: int, body: dict[str, Any]) -> Response:
        answer = behave(number, body)
        assert isinstance(answer, Response)
        newest = f"policy@{7 + number}"
        answer.headers["x-ckpt-engine-adapter"] = newest if body["model"] == "policy" else body["model"]
        return answer

    engine.behave = of_an_adapter
    found = await ask(engine, model="policy")
    assert (found["text"], found["error"]) == (TEXT, None)
    assert [body["model"] for body in engine.asked] == models


async def test_a_chat_whose_first_content_has_not_come_keeps_its_adapter_too() -> None:
    """Once its caller has anything of it."""
    engine = TextEngine()
    behave = engine.behave

    async def early() -> AsyncIterator[bytes]:
        for _ in range(9):  # more events than are held back
            yield _event(0, _choice(0, "", None))

    def first(number: int, body: dict[str, Any]) -> AsyncIterator[bytes] | Response:
        headers = {**HEADERS, "x-ckpt-engine-adapter": "policy@7"}
        return behave(number, body) if number else Engine.streaming(early(), headers)

    engine.behave = first
    async with asking(engine) as client:
        await client.post("/v1/chat/completions", json={**CHAT, **STREAM, "model": "policy"})
    assert [body["model"] for body in engine.asked] == ["policy", "policy@7"]


async def test_a_tokenizer_that_lacks_an_adapter_is_asked_again_and_not_shunned() -> None:
    """As between an update of the base and that of the adapter."""
    engine = TextEngine(lambda leg: (4, "broken") if leg == 0 else None)
    failures: list[int] = []

    def missing() -> Response | None:
        failures.extend(member.failures for member in engine.gateway.placing.fleet.members.values())
        problem = {"status": 503, "detail": "adapter policy: it is not here", "reason": "adapter_not_here"}
        return JSONResponse(problem, 503) if len(failures) == 1 else None

    engine.missing = missing
    found = await ask(engine, model="policy")
    assert (found["text"], found["error"]) == (TEXT, None)
    assert len(failures) > 1
    assert failures[1] <= failures[0], "the gateway counts no failure of the replica"


async def test_it_goes_on_again_and_again_and_so_does_a_message_of_the_callers() -> None:
    engine = TextEngine(lambda leg: (2, "broken") if leg < 5 else None)
    messages = [*CHAT["messages"], {"role": "assistant", "content": "ab"}]
    engine.rendered = lambda body: TextEngine.rendered(engine, {**body, "add_generation_prompt": False})  # type: ignore[method-assign]
    found = await ask(engine, messages=messages, continue_final_message=True)
    prompt = [*PROMPT, LETTERS.index("a"), LETTERS.index("b")]
    whole = model_engine.decode(prompt, 12, 0, frozenset()).tokens
    assert found["text"] == "".join(LETTERS[token] for token in whole)
    assert found["about"]["resumes"] == 5
    assert len(engine.asked[-1]["messages"]) == 2
    assert engine.questions.count("/tokenize") == 6, "the first prompt is rendered once"


async def test_a_chat_that_is_rendered_otherwise_is_not_resumed() -> None:
    engine = TextEngine(lambda leg: (4, "abort") if leg == 0 else None, strips=True)
    found = await ask(engine)
    assert (found["text"], found["finish"], found["error"]["reason"]) == (TEXT[:4], None, "not_resumable")
    assert "as the engine renders it" in found["error"]["message"]
    refusing = TextEngine(lambda leg: (4, "abort") if leg == 0 else None)
    refusing.refuses = True
    found = await ask(refusing)
    assert found["error"]["reason"] == "not_resumable"
    assert "messages must end with the user's" in found["error"]["message"]


@pytest.mark.parametrize("beside", ["reasoning_content", "reasoning", "tool_calls"])
async def test_only_content_goes_on(beside: str) -> None:
    found = await ask(TextEngine(lambda leg: (4, "abort") if leg == 0 else None, beside=beside))
    assert (found["text"], found["error"]["reason"]) == (TEXT[:4], "not_resumable")
    assert f"`{beside}` has come" in found["error"]["message"]


async def test_what_goes_on_as_reasoning_is_no_answer() -> None:
    engine = TextEngine(lambda leg: (4, "abort") if leg == 0 else None)
    behave = engine.behave

    def later(number: int, body: dict[str, Any]) -> AsyncIterator[bytes] | Response:
        engine.beside = "reasoning" if number else ""
        return behave(number, body)

    engine.behave = later
    found = await ask(engine)
    assert (found["text"], found["error"]["reason"]) == (TEXT[:4], "not_resumable")


@pytest.mark.parametrize(("stops", "goes_on"), [([TEXT[3] + "-"], False), ("-", True), (["", TEXT[2] + "-"], True)])
async def test_a_stop_string_that_may_have_begun_is_not_lost(stops: Any, goes_on: bool) -> None:
    found = await ask(TextEngine(lambda leg: (4, "abort") if leg == 0 else None), stop=stops)
    assert (found["error"] is None) == goes_on
    assert goes_on or "stop string" in found["error"]["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"presence_penalty": 1},
        {"n": 2},
        {"logprobs": True},
        {"return_token_ids": True},
        {"response_format": {"type": "x"}},
    ],
)
async def test_what_a_text_does_not_tell_is_passed_on_and_says_why(fields: dict[str, Any]) -> None:
    found = await ask(TextEngine(), **fields)
    assert next(iter(fields)) in found["about"]["not_resumable"]
    found = await ask(TextEngine(lambda leg: (4, "abort")), **fields)
    assert found["error"]["reason"] == "not_resumable"


async def test_all_that_was_asked_for_is_a_whole_answer() -> None:
    found = await ask(TextEngine(lambda _leg: (12, "broken")))
    assert (found["text"], found["finish"], found["usage"]) == (TEXT, "length", USAGE)
    assert found["about"]["legs"] == [{**found["about"]["legs"][0], "first": 0, "count": 12, "ended": "broken"}]


async def test_an_end_without_the_streams_end_is_an_end() -> None:
    """The engine dies behind it: nothing is asked for again."""
    engine = TextEngine()
    behave = engine.behave

    async def cut(events: Response) -> AsyncIterator[bytes]:
        async for event in events.body_iterator:  # type: ignore[attr-defined]
            yield event
            if b'"length"' in event:
                return

    engine.behave = lambda number, body: Engine.streaming(cut(behave(number, body)), HEADERS)  # type: ignore[arg-type]
    found = await ask(engine)
    assert (found["text"], found["finish"], found["error"], len(engine.asked)) == (TEXT, "length", None, 1)


async def test_a_chat_that_a_gate_ended_before_its_first_word_begins_again() -> None:
    """With the role and the id of the leg that its caller gets."""

    async def role_alone() -> AsyncIterator[bytes]:
        yield _event(7, {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None})
        yield unmet_event("version_changed")

    one, other = TextEngine(), TextEngine()
    for engine in (one, other):
        behave = engine.behave

        def first(number: int, body: dict[str, Any], behave: Any = behave) -> AsyncIterator[bytes] | Response:
            if len(one.asked) + len(other.asked) == 1:
                return Engine.streaming(role_alone(), HEADERS)
            answer: AsyncIterator[bytes] | Response = behave(number, body)
            return answer

        engine.behave = first
    found = await ask(one, other)
    assert (found["text"], found["about"]["resumes"], found["error"]) == (TEXT, 0, None)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("how", ["abort", "broken"])
async def test_a_chat_of_which_nothing_was_sent_begins_again(how: str, stream: bool) -> None:
    engine = TextEngine(lambda leg: (0, how) if leg < 2 else None)
    async with asking(engine) as client:
        answer = await client.post("/v1/chat/completions", json={**CHAT, **(STREAM if stream else {})})
        off = {"x-ckpt-engine-resume": "off"}
        engine.ends = lambda _leg: (0, how)
        refused = await client.post("/v1/chat/completions", json=CHAT, headers=off)
    text = joined(answer)["text"] if stream else answer.json()["choices"][0]["message"]["content"]
    assert (text, [body["messages"] for body in engine.asked[:3]]) == (TEXT, [CHAT["messages"]] * 3)
    assert (refused.status_code, refused.json()["reason"]) == (502, "resume_off")


async def test_a_chat_that_a_gate_ends_goes_on_at_another_replica_of_that_version() -> None:
    async def ends(events: Response) -> AsyncIterator[bytes]:
        count = 0
        async for event in events.body_iterator:  # type: ignore[attr-defined]
            if count == 5:  # the role and four letters
                break
            count += 1
            yield event
        yield unmet_event("version_changed")

    one, other = TextEngine(), TextEngine()
    for engine in (one, other):
        behave = engine.behave

        def first(number: int, body: dict[str, Any], behave: Any = behave) -> AsyncIterator[bytes] | Response:
            answer: AsyncIterator[bytes] | Response = behave(number, body)
            return answer if len(body["messages"]) > 1 else Engine.streaming(ends(answer), HEADERS)  # type: ignore[arg-type]

        engine.behave = first
    async with asking(one, other, probe=60.0) as client:
        headers = {"x-ckpt-engine-version": "4"}
        found = joined(await client.post("/v1/chat/completions", json={**CHAT, **STREAM}, headers=headers))
    assert (found["text"], found["error"], found["about"]["resumed_by"]) == (TEXT, None, "text")
    assert (len(one.asked), len(other.asked)) == (1, 1)
    async with asking(alone := TextEngine()) as client:
        behave = alone.behave
        alone.behave = lambda number, body: Engine.streaming(ends(behave(number, body)), HEADERS)  # type: ignore[arg-type]
        headers = {"x-ckpt-engine-version": "4"}
        found = joined(await client.post("/v1/chat/completions", json={**CHAT, **STREAM}, headers=headers))
    assert (found["text"], found["error"]["reason"]) == (TEXT[:4], "version_changed")


async def test_a_leg_that_a_gate_refuses_goes_elsewhere() -> None:
    """The first leg came from a replica that has gone over to another version since."""
    engines: list[TextEngine] = []

    def behave(engine: TextEngine, number: int, body: dict[str, Any]) -> AsyncIterator[bytes] | Response:
        if len(body["messages"]) > 1 and refused[0] is None:
            refused[0] = engine
            return unmet_answer("version_gone")
        return TextEngine._answer(engine, number, body)

    refused: list[TextEngine | None] = [None]
    for _ in range(2):
        engine = TextEngine(lambda _leg: None)
        engine.ends = lambda _leg, _own=engine: (4, "abort") if len(_own.asked[-1]["messages"]) == 1 else None  # type: ignore[misc]
        engine.behave = lambda number, body, _own=engine: behave(_own, number, body)  # type: ignore[misc]
        engines.append(engine)
    async with asking(*engines, probe=60.0) as client:
        headers = {"x-ckpt-engine-version": "4"}
        found = joined(await client.post("/v1/chat/completions", json={**CHAT, **STREAM}, headers=headers))
    assert (found["text"], found["error"]) == (TEXT, None)
    assert refused[0] is not None


@pytest.mark.parametrize("chat_text", [vllm.CHAT_TEXT, sglang.CHAT_TEXT])
@pytest.mark.parametrize("text", [..., None, 3, ["a"]])
def test_words_that_an_engine_does_not_say_are_not_taken_for_some(chat_text: ChatText, text: Any) -> None:
    with pytest.raises(MalformedError, match=f"no {chat_text.text_name}"):
        chat_text.text_of({} if text is ... else {chat_text.text_name: text})
