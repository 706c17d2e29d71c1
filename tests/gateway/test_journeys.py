"""What becomes of requests at engines that misbehave: they break off, overrun, stammer or refuse."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.responses import JSONResponse, Response

from ckpt_engine.addresses import listen_on
from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.gateway import placing
from ckpt_engine.gateway.server import check
from ckpt_engine.gateway.settings import GatewaySettings
from ckpt_engine.gateway.versions import GatewayVersion
from ckpt_engine.security.grants import digest_of
from ckpt_engine.security.server import ServerSecurity
from tests.gateway import model_engine
from tests.gateway.misbehaving import (
    BODY,
    PROMPT,
    WHOLE,
    Engine,
    asking,
    forever,
    told,
    unmet_answer,
    unmet_event,
)
from tests.waiting import until


async def test_a_stream_that_ends_without_its_end_goes_on() -> None:
    engine = Engine(
        lambda number, body: told(body, 3 if number < 3 else None, done=False) if number < 3 else told(body)
    )
    async with asking(engine) as client:
        answer = await client.post("/v1/completions", json=BODY)
    assert answer.json()["choices"][0]["token_ids"] == WHOLE
    assert [len(body["prompt"]) for body in engine.asked] == [3, 6, 9, 12]
    assert [body["max_tokens"] for body in engine.asked] == [12, 9, 6, 3]
    assert len({body["request_id"] for body in engine.asked}) == 4


async def test_a_request_for_an_adapter_goes_on_with_the_version_that_it_began_with() -> None:
    """The newest one is another by then."""

    def behave(number: int, body: dict[str, Any]) -> Response:
        events = told(body, 3, done=False) if number == 0 else told(body)
        return Engine.streaming(events, {"x-ckpt-engine-adapter": "policy@7" if number == 0 else body["model"]})

    engine = Engine(behave)
    async with asking(engine) as client:
        answer = await client.post("/v1/completions", json={**BODY, "model": "policy"})
    assert answer.json()["choices"][0]["token_ids"] == WHOLE
    assert answer.json()["choices"][0]["ckpt_engine"]["adapter"] == "policy@7"
    assert [body["model"] for body in engine.asked] == ["policy", "policy@7"]


async def test_a_request_for_an_adapter_of_which_nothing_has_come_gets_the_newest_version() -> None:
    """The one that let it in may be for a base that is nowhere any more."""

    def behave(number: int, body: dict[str, Any]) -> Response:
        events = told(body, 0, done=False) if number == 0 else told(body)
        return Engine.streaming(events, {"x-ckpt-engine-adapter": f"policy@{7 + number}"})

    engine = Engine(behave)
    async with asking(engine) as client:
        answer = await client.post("/v1/completions", json={**BODY, "model": "policy"})
    assert answer.json()["choices"][0]["token_ids"] == WHOLE
    assert [body["model"] for body in engine.asked] == ["policy", "policy"]


def without_adapter() -> Response:
    """How a gate refuses a request for an adapter that its engine does not have."""
    problem = {"status": 503, "detail": "adapter policy@9: it is not here", "reason": "adapter_not_here"}
    return JSONResponse(problem, 503, {"retry-after": "1"}, media_type="application/problem+json")


def sound(body: dict[str, Any]) -> AsyncIterator[bytes] | Response:
    """The answer of an engine to ids, or to a text."""
    return told(body) if body.get("stream") else JSONResponse({"choices": []})


@pytest.mark.parametrize("prompt", [PROMPT, "a text"])
async def test_a_replica_that_lacks_an_adapter_is_shunned_by_the_request_for_it_alone(
    prompt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loop that asks for what is nowhere would take all replicas from all."""
    monkeypatch.setattr(placing, "BRING_SECONDS", 60.0)

    def behave(number: int, body: dict[str, Any]) -> AsyncIterator[bytes] | Response:
        return without_adapter() if body["model"] == "policy@9" else sound(body)

    engines = [Engine(behave), Engine(behave)]
    body = {**BODY, "prompt": prompt}
    async with asking(*engines, queue_seconds=0.5, probe=60.0) as client:
        answer = await client.post("/v1/completions", json={**body, "model": "policy@9"})
        assert (answer.status_code, answer.json()["reason"]) == (503, "adapter_not_here")
        assert "adapter policy@9: it is not here" in answer.json()["detail"]
        assert max(len(engine.asked) for engine in engines) == 1, "it does not spin"
        members = engines[0].gateway.placing.fleet.members.values()
        assert [(member.failures, member.shunned_until) for member in members] == [(0, 0.0)] * 2
        assert (await client.post("/v1/completions", json={**body, "model": "policy"})).status_code == 200


@pytest.mark.parametrize("prompt", [PROMPT, "a text"])
async def test_an_adapter_that_is_brought_meanwhile_is_found(prompt: Any) -> None:
    """At the same replica."""
    engine = Engine(lambda number, body: without_adapter() if number < 2 else sound(body))
    async with asking(engine, probe=60.0) as client:
        answer = await client.post("/v1/completions", json={**BODY, "prompt": prompt, "model": "policy@9"})
    assert answer.status_code == 200
    assert len(engine.asked) == 3


async def test_what_is_no_stream_of_events_is_named() -> None:
    """Whatever listens at an address that was mistaken."""
    engine = Engine(lambda *_: Response("<html>", media_type="text/html"))
    async with asking(engine, dry=0) as client:
        answer = await client.post("/v1/completions", json=BODY)
    assert (answer.status_code, answer.json()["reason"]) == (502, "no_progress")
    assert "answered with text/html" in answer.json()["detail"]


@pytest.mark.parametrize("breaks", [False, True])
async def test_events_that_come_together_are_told_together_and_none_is_lost(breaks: bool) -> None:
    async def at_once(body: dict[str, Any], wrong: bool) -> AsyncIterator[bytes]:
        events = [event async for event in told(body, 4 if wrong else None, done=not wrong)]
        yield b"".join([*events, b"data: {\n\n"] if wrong else events)

    engine = Engine(lambda number, body: at_once(body, breaks and not number))
    async with asking(engine) as client:
        answer = await client.post("/v1/completions", json={**BODY, "stream": True})
    *events, done = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line.startswith("data: ")]
    assert done == "[DONE]"
    tokens = [json.loads(event)["choices"][0]["token_ids"] for event in events]
    assert tokens == ([WHOLE[:4], WHOLE[4:]] if breaks else [WHOLE])


async def test_the_last_event_lost_is_no_reason_to_ask_again() -> None:
    engine = Engine(lambda _number, body: _without_end(body))
    async with asking(engine) as client:
        answer = await client.post("/v1/completions", json=BODY)
    (choice,) = answer.json()["choices"]
    assert (choice["token_ids"], choice["finish_reason"], len(engine.asked)) == (WHOLE, "length", 1)


async def _without_end(body: dict[str, Any]) -> AsyncIterator[bytes]:
    for event in model_engine.completions(body, lambda count: [1] * count, 4):
        event["choices"][0]["finish_reason"] = None
        yield b"data: " + json.dumps(event).encode() + b"\n\n"


async def test_legs_without_progress_are_bounded() -> None:
    engine = Engine(lambda _number, body: told(body, 0, done=False))
    async with asking(engine, dry=2) as client:
        answer = await client.post("/v1/completions", json=BODY)
    assert (answer.status_code, answer.json()["reason"], len(engine.asked)) == (502, "no_progress", 3)


async def test_resumes_are_bounded_and_what_there_is_comes_with_the_reason() -> None:
    engine = Engine(lambda _number, body: told(body, 1, done=False))
    async with asking(engine, resumes=2) as client:
        answer = await client.post("/v1/completions", json=BODY)
    problem = answer.json()
    assert (answer.status_code, problem["reason"], len(engine.asked)) == (502, "too_many_resumes", 3)
    assert problem["choices"][0]["token_ids"] == WHOLE[:3]


@pytest.mark.parametrize("wrong", ["overrun", "no json", "no object", "500 in the stream", "500"])
async def test_what_an_engine_should_not_send_is_not_passed_on(wrong: str) -> None:
    def behave(number: int, body: dict[str, Any]) -> AsyncIterator[bytes] | Response:
        if number:
            return told(body)
        if wrong == "500":
            return JSONResponse({"error": {"message": "it failed"}}, 500)
        return _wrong(body, wrong)

    engine = Engine(behave)
    async with asking(engine) as client:
        answer = await client.post("/v1/completions", json=BODY)
    assert answer.json()["choices"][0]["token_ids"] == WHOLE
    assert len(engine.asked) == 2


async def _wrong(body: dict[str, Any], how: str) -> AsyncIterator[bytes]:
    async for event in told(body, 2, done=False):
        yield event
    if how == "overrun":
        tokens = {"choices": [{"index": 0, "text": "", "token_ids": list(range(40))}]}
        yield b"data: " + json.dumps(tokens).encode() + b"\n\n"
    elif how == "500 in the stream":
        yield b'data: {"error": {"message": "it failed", "code": 500}}\n\n'
    else:
        yield b"data: {\n\n" if how == "no json" else b"data: [1]\n\n"


async def test_what_no_engine_would_take_is_refused_once() -> None:
    engine = Engine(lambda _number, _body: JSONResponse({"error": {"message": "max_tokens is too large"}}, 400))
    async with asking(engine) as client:
        answer = await client.post("/v1/completions", json=BODY)
    assert (answer.status_code, answer.json()["reason"], len(engine.asked)) == (400, "engine_refused", 1)
    assert "max_tokens is too large" in answer.json()["detail"]


async def test_a_replica_that_refuses_is_left_and_waiting_ends() -> None:
    closed = Engine(lambda _number, _body: JSONResponse({"detail": "it sleeps", "reason": "asleep"}, 503))
    open_ = Engine(lambda _number, body: told(body))
    async with asking(closed, open_) as client:
        answers = await asyncio.gather(*(client.post("/v1/completions", json=BODY) for _ in range(8)))
    assert [answer.status_code for answer in answers] == [200] * 8
    async with asking(closed, queue_seconds=2.0) as client:
        answer = await client.post("/v1/completions", json=BODY)
    assert (answer.status_code, answer.json()["reason"]) == (503, "no_replica")
    assert "it sleeps" in answer.json()["detail"]


async def test_a_stream_that_waits_gets_comments_and_errors_as_an_event() -> None:
    async def slow(body: dict[str, Any]) -> AsyncIterator[bytes]:
        async for event in told(body, 2, done=False):
            yield event
            await asyncio.sleep(0.3)

    engine = Engine(lambda _number, body: slow(body))
    async with asking(engine, comment=0.1) as client:
        headers = {"x-ckpt-engine-resume": "off"}
        answer = await client.post("/v1/completions", json={**BODY, "stream": True}, headers=headers)
    assert answer.status_code == 200
    assert ": waiting\n\n" in answer.text
    *_, last, done = [line for line in answer.text.split("\n\n") if line.startswith("data: ")]
    assert done == "data: [DONE]"
    error = json.loads(last.removeprefix("data: "))["error"]
    assert (error["reason"], error["choices"][0]["token_ids"]) == ("resume_off", WHOLE[:2])


async def test_one_sample_that_fails_ends_the_others() -> None:
    def behave(number: int, body: dict[str, Any]) -> AsyncIterator[bytes] | Response:
        return JSONResponse({"detail": "no"}, 400) if number == 0 else forever()

    engine = Engine(behave)
    async with asking(engine) as client:
        answer = await client.post("/v1/completions", json={**BODY, "n": 2})
        assert (answer.status_code, answer.json()["reason"]) == (400, "engine_refused")
        await until(lambda: not engine.inside)


@pytest.mark.parametrize(
    ("route", "asked"),
    [
        ("/v1/completions", {"prompt": "Call me"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Call me"}]}),
    ],
)
async def test_text_is_passed_on_and_breaks_with_its_ids(route: str, asked: dict[str, Any]) -> None:
    def behave(_number: int, _body: dict[str, Any]) -> AsyncIterator[bytes]:
        return told({**BODY, "stream": True, "return_token_ids": True}, 2, done=False)

    engine = Engine(behave)
    async with asking(engine) as client:
        answer = await client.post(route, json={**asked, "stream": True})
    *events, last, done = [line for line in answer.text.split("\n\n") if line.startswith("data: ")]
    assert (len(events), done, len(engine.asked)) == (2, "data: [DONE]", 1)
    error = json.loads(last.removeprefix("data: "))["error"]
    assert (error["reason"], error["choices"]) == ("not_resumable", [{"index": 0, "token_ids": WHOLE[:2]}])
    assert engine.asked[0] == {**asked, "stream": True}


async def test_an_engine_that_sends_texts_without_ids_is_refused_by_name() -> None:
    async def texts(_body: dict[str, Any]) -> AsyncIterator[bytes]:
        yield b'data: {"choices": [{"index": 0, "text": "Ishmael", "finish_reason": "stop"}]}\n\n'
        yield b"data: [DONE]\n\n"

    engine = Engine(lambda _number, body: texts(body))
    async with asking(engine) as client:
        answer = await client.post("/v1/completions", json=BODY)
    assert (answer.status_code, answer.json()["reason"], len(engine.asked)) == (502, "engine_refused", 1)
    assert "without token ids" in answer.json()["detail"]


async def test_a_token_is_asked_for_and_goes_no_further(tmp_path: Path) -> None:
    secrets = {role: f"secret-of-the-{role}-for-this-test" for role in ("client", "viewer")}
    tokens = tmp_path / "tokens"
    tokens.write_text("\n".join(f"{role} {digest_of(secret).hex()}" for role, secret in secrets.items()))
    seen: list[dict[str, Any]] = []

    def behave(_number: int, body: dict[str, Any]) -> AsyncIterator[bytes]:
        seen.append(body)
        return told(body)

    engine = Engine(behave)
    async with asking(engine, security=ServerSecurity(tokens=tokens)) as client:

        async def ask(**headers: str) -> int:
            return (await client.post("/v1/completions", json=BODY, headers=headers)).status_code

        assert await ask() == 401
        assert await ask(authorization="Bearer of-nobody-at-all-in-this-test") == 401
        assert await ask(authorization=f"Bearer {secrets['viewer']}") == 403
        assert not seen
        assert await ask(authorization=f"Bearer {secrets['client']}") == 200
        assert "authorization" not in engine.headers[-1]
        assert (await client.get("/metrics")).status_code == 401
        shown = {"authorization": f"Bearer {secrets['viewer']}"}
        assert (await client.get("/metrics", headers=shown)).status_code == 200
        assert (await client.get("/readyz")).status_code == 200
    async with asking(engine) as client:
        shown = {"authorization": "Bearer for-the-engine"}
        assert (await client.post("/v1/completions", json=BODY, headers=shown)).status_code == 200
        assert engine.headers[-1]["authorization"] == "Bearer for-the-engine"


def test_settings_reach_worker_processes_whole(tmp_path: Path) -> None:
    security = ServerSecurity(tmp_path / "c", tmp_path / "k", None, tmp_path / "t", insecure=True)
    settings = GatewaySettings(replicas=("http://a", "http://b"), queue_seconds=2.5, security=security)
    assert GatewaySettings.from_json(settings.to_json()) == settings
    assert GatewaySettings.from_json(GatewaySettings(manager="a:1").to_json()) == GatewaySettings(manager="a:1")


def test_what_cannot_be_started_is_refused_by_name() -> None:
    for settings, why in (
        (GatewaySettings(), "give --manager HOST:PORT, or --replica"),
        (GatewaySettings(manager="a:1", replicas=("http://b",)), "give --manager HOST:PORT, or --replica"),
        (GatewaySettings(replicas=("b:8000",)), "is not a URL"),
        (GatewaySettings(replicas=("http://",)), "is not a URL"),
        (GatewaySettings(replicas=("http://b:port",)), "is not a URL"),
        (GatewaySettings(replicas=("http://b:8000/v1/",)), "write http://b:8000"),
        (GatewaySettings(replicas=("http://b:8000/generate?x=1",)), "write http://b:8000"),
        (GatewaySettings(manager="nowhere"), "the manager's address must be HOST:PORT, not 'nowhere'"),
        (GatewaySettings(manager="http://a:1"), "not the URL 'http://a:1': try 'a:1'"),
        (GatewaySettings(manager="a:1", listen="0.0.0.0:8080"), "--insecure"),
    ):
        with pytest.raises(CkptEngineError, match=re.escape(why)):
            check(settings)
    for url in ("http://b:8000/", "https://[::1]:8000", "http://b/behind/a/proxy"):
        check(GatewaySettings(replicas=(url,)))


def test_a_port_that_is_taken_is_named_with_what_to_do() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        taken.listen()
        at = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(CkptEngineError, match=f"cannot listen on {at}.*--listen"):
            listen_on(at)


VERSION_WISHES = [("x-ckpt-engine-version", "version_changed"), ("x-ckpt-engine-min-version", "rolled_back")]


@pytest.mark.parametrize(("wish", "reason"), VERSION_WISHES)
@pytest.mark.parametrize("stream", [True, False])
async def test_a_gate_ends_an_answer_whose_version_goes(wish: str, reason: str, stream: bool) -> None:
    """No other replica has it. The engine labels nothing, and what came before the end is of the version all the
    same, whatever is told of the replica meanwhile: its gate was asked for that version."""

    async def goes_back(body: dict[str, Any]) -> AsyncIterator[bytes]:
        async for event in told(body, 4, done=False):
            yield event
        await until(lambda: first_tokens(engine) > 1)
        engine.version = 3
        engine.tell()
        yield unmet_event(reason)

    engine = Engine(lambda number, body: named(goes_back(body) if number == 1 else told(body)), kind="")
    async with asking(engine) as client:
        body = {**BODY, "stream": stream}
        before = await client.post("/v1/completions", json=body, headers={wish: "4"})
        assert (before.status_code, len(engine.asked), engine.headers[0][wish]) == (200, 1, "4")
        answer = await client.post("/v1/completions", json=body, headers={wish: "4"})
    assert len(engine.asked) == 2
    *events, problem = contents(answer) if answer.status_code == 200 else [answer.json()]
    assert problem["error"]["code"] == reason
    problem = problem["error"] if stream else problem
    seen = [token for event in events for token in event["choices"][0]["token_ids"]]
    (choice,) = problem["choices"]
    assert choice["token_ids"] == WHOLE[:4]
    assert seen == (WHOLE[:4] if stream else [])
    (span,) = choice["ckpt_engine"]["spans"]
    assert (span["min_version"], span["max_version"], span["exact"]) == (4, 4, False)


@pytest.mark.parametrize("count", [0, 4])
@pytest.mark.parametrize("stream", [True, False])
async def test_what_a_gate_does_not_answer_goes_on_at_another_replica_of_that_version(stream: bool, count: int) -> None:
    """Refused at once, or ended after four tokens: the other replica makes what is missing."""

    async def ends(body: dict[str, Any]) -> AsyncIterator[bytes]:
        async for event in told(body, 4, done=False):
            yield event
        yield unmet_event("version_changed")

    def first(_number: int, body: dict[str, Any]) -> AsyncIterator[bytes] | Response:
        return named(ends(body)) if count else unmet_answer("version_gone")

    one, other = Engine(first, kind=""), Engine(lambda _number, body: named(told(body)), kind="")
    async with asking(one, other, probe=60.0) as client:
        while not one.asked:  # sessions go to either
            headers = {"x-ckpt-engine-version": "4", "x-session-id": str(len(other.asked))}
            answer = await client.post("/v1/completions", json={**BODY, "stream": stream}, headers=headers)
            assert answer.status_code == 200, answer.text
    events = contents(answer) if stream else [answer.json()]
    choices = [event["choices"][0] for event in events]
    assert [token for choice in choices for token in choice["token_ids"]] == WHOLE
    assert other.asked[-1]["max_tokens"] == len(WHOLE) - count
    told_of_it = choices[-1]["ckpt_engine"]
    assert [leg["count"] for leg in told_of_it["legs"]] == [each for each in (count, 12 - count) if each]
    assert told_of_it["min_version"] == told_of_it["max_version"] == 4


async def test_what_a_gate_ends_is_not_asked_for_again_with_resuming_switched_off() -> None:
    """Unless the gate says that the engine has not begun it."""
    reasons = iter(["version_changed", "version_gone"])

    def refuses(_number: int, _body: dict[str, Any]) -> Response:
        return unmet_answer(next(reasons))

    one, other = Engine(refuses, kind=""), Engine(lambda _number, body: named(told(body)), kind="")
    async with asking(one, other, probe=60.0) as client:
        found = []
        for number in range(40):
            headers = {"x-ckpt-engine-version": "4", "x-session-id": str(number), "x-ckpt-engine-resume": "off"}
            before = len(one.asked)
            answer = await client.post("/v1/completions", json=BODY, headers=headers)
            if len(one.asked) > before:
                found.append((answer.status_code, answer.json().get("reason")))
            if len(found) == 2:
                break
    assert found == [(409, "version_changed"), (200, None)]


@pytest.mark.parametrize(("wish", "reason"), VERSION_WISHES)
async def test_an_echo_alone_is_of_the_version_that_was_asked_for(wish: str, reason: str) -> None:
    """As evaluation harnesses ask: no token, log-probabilities of the prompt."""

    def goes_back(_body: dict[str, Any]) -> Response:
        engine.version = 3
        engine.tell()
        return unmet_answer(reason)

    engine = Engine(lambda number, body: goes_back(body) if number else named(told(body)), kind="")
    async with asking(engine, queue_seconds=0.5) as client:
        body = {**BODY, "max_tokens": 0, "echo": True, "logprobs": 1, "return_token_ids": True}
        whole = await client.post("/v1/completions", json=body, headers={wish: "4"})
        refused = await client.post("/v1/completions", json=body, headers={wish: "4"})
    (choice,) = whole.json()["choices"]
    assert (choice["token_ids"], len(choice["logprobs"]["tokens"])) == ([], 3)
    assert (choice["ckpt_engine"]["prompt"]["version"], choice["ckpt_engine"]["spans"]) == (4, [])
    assert (refused.status_code, refused.json()["reason"]) == (503, "version_not_yet")


async def test_what_was_seen_stays_in_an_error_whatever_its_labels_say() -> None:
    """vLLM names versions on its last chunk only: its caller has seen tokens by then that it did not want."""
    asks = {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 12}, "stream": True}

    async def labelled(body: dict[str, Any]) -> AsyncIterator[bytes]:
        first, last = model_engine.inference(body, lambda _count: [8, 4], 4)
        last["choices"][0]["weight_versions"] = [
            {"version": "4", "start": 0, "end": 5},
            {"version": "5", "start": 5, "end": 12},
        ]
        yield b"data: " + json.dumps(first).encode() + b"\n\n"
        await until(lambda: first_tokens(engine) > 0)
        yield b"data: " + json.dumps(last).encode() + b"\n\n"
        yield b"data: [DONE]\n\n"

    engine = Engine(lambda _number, body: named(labelled(body)))
    async with asking(engine) as client:
        answer = await client.post("/inference/v1/generate", json=asks, headers={"x-ckpt-engine-version": "4"})
    event, problem = contents(answer)
    (choice,) = problem["error"]["choices"]
    assert (problem["error"]["reason"], len(choice["token_ids"])) == ("version_changed", 8)
    assert choice["token_ids"] == event["choices"][0]["token_ids"]
    assert [(span["first"], span["count"], span["version"]) for span in choice["ckpt_engine"]["spans"]] == [
        (0, 5, 4),
        (5, 3, 5),
    ]


@pytest.mark.parametrize("stream", [True, False])
async def test_tokens_of_the_wanted_version_are_kept_where_others_come_in_the_same_event(stream: bool) -> None:
    async def labelled(body: dict[str, Any]) -> AsyncIterator[bytes]:
        (event,) = model_engine.inference(body, lambda _count: [12], 4)
        event["choices"][0]["weight_versions"] = [
            {"version": "4", "start": 0, "end": 5},
            {"version": "5", "start": 5, "end": 12},
        ]
        yield b"data: " + json.dumps(event).encode() + b"\n\n"
        yield b"data: [DONE]\n\n"

    asks = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 12}, "stream": stream}
    engine = Engine(lambda _number, body: named(labelled(body)))
    async with asking(engine) as client:
        answer = await client.post("/inference/v1/generate", json=asks, headers={"x-ckpt-engine-version": "4"})
    problem = answer.json()
    (choice,) = problem["choices"]
    assert (answer.status_code, problem["reason"], choice["token_ids"]) == (409, "version_changed", WHOLE[:5])
    assert [(span["first"], span["count"], span["version"]) for span in choice["ckpt_engine"]["spans"]] == [(0, 5, 4)]


async def test_the_last_event_of_a_stream_names_what_its_replica_may_have_held() -> None:
    async def updated(body: dict[str, Any]) -> AsyncIterator[bytes]:
        async for event in told(body, 4, done=False):
            yield event
        engine.version = 5
        engine.tell()
        async for event in told({**body, "prompt": [*body["prompt"], *WHOLE[:4]], "max_tokens": 8}):
            yield event

    engine = Engine(lambda _number, body: named(updated(body)), kind="")
    async with asking(engine) as client:
        *_, last = contents(await client.post("/v1/completions", json={**BODY, "stream": True}))
    said = last["choices"][0]["ckpt_engine"]
    assert (said["min_version"], said["max_version"], said["exact"]) == (4, 5, False)


@pytest.mark.parametrize("value", ["-1", "+7", "7.0", "1_0", "", "seven", "9" * 30, "4, 4"])
async def test_a_version_that_is_none_is_refused(value: str) -> None:
    engine = Engine(lambda _number, body: told(body))
    async with asking(engine) as client:
        for name, _ in VERSION_WISHES:
            answer = await client.post("/v1/completions", json=BODY, headers={name: value})
            assert (answer.status_code, answer.json()["reason"]) == (400, "bad_request")
            assert name in answer.json()["detail"]
    assert not engine.asked


async def test_a_least_version_above_the_exact_one_is_refused() -> None:
    engine = Engine(lambda _number, body: told(body))
    async with asking(engine) as client:
        headers = {"x-ckpt-engine-version": "4", "x-ckpt-engine-min-version": "5"}
        answer = await client.post("/v1/completions", json=BODY, headers=headers)
        assert (answer.status_code, answer.json()["reason"]) == (400, "bad_request")
        assert "no version is both" in answer.json()["detail"]


async def test_an_engine_that_labels_nothing_and_takes_weights_of_another_run_is_no_answer() -> None:
    async def goes_over(body: dict[str, Any]) -> AsyncIterator[bytes]:
        async for event in told(body, 4, done=False):
            yield event
        await until(lambda: first_tokens(engine) > 0)
        engine.tell(identity=GatewayVersion(4, "another", "cd"))
        async for event in told({**body, "prompt": [*body["prompt"], *WHOLE[:4]], "max_tokens": 8}):
            yield event

    admitted = {"x-ckpt-engine-admitted-version": "4", "x-ckpt-engine-admitted-root": "ab"}
    engine = Engine(lambda _number, body: Engine.streaming(goes_over(body), admitted), kind="")
    async with asking(engine, probe=60.0) as client:
        engine.tell(identity=GatewayVersion(4, "run", "ab"))
        answer = await client.post("/v1/completions", json=BODY)
    assert (answer.status_code, answer.json()["reason"]) == (409, "lineage_changed")
    assert "another run (another)" in answer.json()["detail"]


async def test_a_header_that_is_given_twice_is_refused_and_zeros_in_front_are_not() -> None:
    engine = Engine(lambda _number, body: named(told(body)))
    async with asking(engine) as client:
        twice = [("x-ckpt-engine-min-version", "3"), ("X-Ckpt-Engine-Min-Version", "4")]
        answer = await client.post("/v1/completions", json=BODY, headers=twice)
        assert (answer.status_code, answer.json()["reason"]) == (400, "bad_request")
        assert "given twice" in answer.json()["detail"]
        answer = await client.post("/v1/completions", json=BODY, headers=[("x-ckpt-engine-version", "04")])
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("X-Ckpt-Engine-Min-Versoin", "did you mean x-ckpt-engine-min-version?"),
        ("X_Ckpt_Engine_Min_Version", "did you mean x-ckpt-engine-min-version?"),
        ("X-Ckpt-Engine-Foo", "there are x-ckpt-engine-version, "),
    ],
)
async def test_a_header_of_ours_that_does_not_exist_is_refused(name: str, said: str) -> None:
    """What it asks for would not be held, and its caller would not know."""
    engine = Engine(lambda _number, body: named(told(body)))
    async with asking(engine) as client:
        answer = await client.post("/v1/completions", json=BODY, headers={name: "9"})
    assert (answer.status_code, answer.json()["reason"], engine.asked) == (400, "bad_request", [])
    assert answer.json()["detail"].startswith(f"{name.lower()}: there is no such header; {said}")


async def test_a_route_with_a_slash_too_many_is_none() -> None:
    """Clients follow no redirect of what they post, and its answer says nothing."""
    async with asking(Engine(lambda _number, body: named(told(body)))) as client:
        answer = await client.post("/v1/completions/", json=BODY)
    assert (answer.status_code, answer.json()["reason"]) == (404, "no_route")


async def test_a_run_that_nobody_serves_is_told_from_those_that_are_served() -> None:
    engine = Engine(lambda _number, body: named(told(body)))
    async with asking(engine, probe=60.0) as client:
        engine.tell(identity=GatewayVersion(4, "run"))
        headers = {"x-ckpt-engine-lineage": "other", "x-ckpt-engine-queue-seconds": "0"}
        answer = await client.post("/v1/completions", json=BODY, headers=headers)
    assert answer.status_code == 503
    assert "holds version 4 of 'run'" in answer.json()["detail"]


def named(events: AsyncIterator[bytes]) -> Response:
    """With the version that a gate lets it in under."""
    return Engine.streaming(events, {"x-ckpt-engine-admitted-version": "4"})


def first_tokens(engine: Engine) -> float:
    """How many answers have a token."""
    lines = engine.gateway.placing.metrics.exposition().decode().splitlines()
    name = "ckpt_engine_gateway_first_token_seconds_count "
    return next(float(line.removeprefix(name)) for line in lines if line.startswith(name))


def contents(answer: httpx.Response) -> list[Any]:
    """Events of a stream."""
    parts = [part.removeprefix("data: ") for part in answer.text.split("\n\n") if part.startswith("data: ")]
    assert parts[-1] == "[DONE]"
    return [json.loads(part) for part in parts[:-1]]
