"""What becomes of requests at engines that misbehave: an HTTP server that breaks off, overruns, stammers or refuses.

A fake, since no honest engine does these things when asked to. It decodes as tests/gateway/model_engine.py does.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import re
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.gateway.app import Gateway
from ckpt_engine.gateway.server import check, running_gateway
from ckpt_engine.gateway.settings import Settings
from ckpt_engine.security.grants import digest_of
from ckpt_engine.security.server import ServerSecurity
from tests.gateway import model_engine

PROMPT = [1, 2, 3]
BODY = {"prompt": PROMPT, "max_tokens": 12, "return_token_ids": True}
WHOLE = model_engine.decode(PROMPT, 12, 0, frozenset()).tokens

Behaviour = Callable[[int, dict[str, Any]], "AsyncIterator[bytes] | Response"]
"""Of the request with this number: its body to a stream of bytes, or a whole answer."""


class Engine:
    """One misbehaving engine. asked: bodies of its requests. inside: how many are open. looked: called when somebody
    asks whether it is ready."""

    def __init__(self, behave: Behaviour) -> None:
        self._behave = behave
        self.looked: Callable[[], None] = lambda: None
        self.server: uvicorn.Server
        self.stack: contextlib.AsyncExitStack
        self.gateway: Gateway
        self.port = 0
        self.asked: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.inside = 0

    async def _complete(self, request: Request) -> Response:
        body = await request.json()
        self.asked.append(body)
        self.headers.append(dict(request.headers))
        answer = self._behave(len(self.asked) - 1, body)
        if isinstance(answer, Response):
            return answer
        return StreamingResponse(self._counted(answer), media_type="text/event-stream")

    async def _counted(self, events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        self.inside += 1
        try:
            async for event in events:
                yield event
        finally:
            self.inside -= 1

    def listen(self, stack: contextlib.AsyncExitStack) -> str:
        """Where; on the port of last time if there was one."""
        bound = socket.create_server(("127.0.0.1", self.port))
        config = uvicorn.Config(self.app(), log_level="critical", lifespan="off", timeout_graceful_shutdown=1)
        self.server, self.stack = uvicorn.Server(config), stack
        self.server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign, assignment]
        stack.push_async_callback(_end, self.server, asyncio.ensure_future(self.server.serve(sockets=[bound])))
        self.port = bound.getsockname()[1]
        return f"http://127.0.0.1:{self.port}"

    def die(self) -> None:
        """Soon nobody listens there."""
        self.server.should_exit = True

    async def is_seen_dead_and_comes_back(self) -> None:
        """As far as the gateway knows."""
        member = self.gateway.placing.fleet.members[f"http://127.0.0.1:{self.port}"]
        self.die()
        await _until(lambda: member.down)
        self.listen(self.stack)
        await _until(lambda: not member.down)

    def app(self) -> Starlette:
        async def info(_request: Request) -> Response:
            return JSONResponse({"engine": "reference", "running": self.inside, "waiting": 0})

        async def ready(_request: Request) -> Response:
            self.looked()
            return JSONResponse({"ready": True}, headers={"x-ckpt-engine-admitted-version": "4"})

        return Starlette(
            routes=[
                Route("/v1/completions", self._complete, methods=["POST"]),
                Route("/info", info),
                Route("/ckpt_engine/ready", ready),
            ]
        )


async def told(body: dict[str, Any], events: int | None = None, done: bool = True) -> AsyncIterator[bytes]:
    """What a sound engine streams; only so many events of it."""
    for place, event in enumerate(model_engine.completions(body, lambda count: [1] * count, 4)):
        if place == events:
            return
        yield b"data: " + json.dumps(event).encode() + b"\n\n"
    if done:
        yield b"data: [DONE]\n\n"


@contextlib.asynccontextmanager
async def asking(*engines: Engine, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a gateway before these engines, in this process."""
    async with contextlib.AsyncExitStack() as stack:
        urls = [engine.listen(stack) for engine in engines]
        made = Settings(replicas=tuple(urls), jitter=0.0, **{"queue_seconds": 1.0, "probe": 0.2, **settings})
        gateway = await stack.enter_async_context(running_gateway(made))
        for engine in engines:
            engine.gateway = gateway
        transport = httpx.ASGITransport(app=gateway.application())
        client = await stack.enter_async_context(
            httpx.AsyncClient(transport=transport, base_url="http://gateway", timeout=30)
        )
        await _until(lambda: not gateway.why_not_ready())
        yield client


async def _until(look: Callable[[], bool]) -> None:
    """As soon as it is so; TimeoutError after ten seconds."""
    async with asyncio.timeout(10):
        for pause in itertools.repeat(0.02):
            if look():
                return
            await asyncio.sleep(pause)


async def _end(server: uvicorn.Server, serving: asyncio.Future[None]) -> None:
    server.should_exit = True
    await serving


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
    async with asking(engine, dry=2, queue_seconds=20.0) as client:
        answer = await client.post("/v1/completions", json=BODY)
    assert (answer.status_code, answer.json()["reason"], len(engine.asked)) == (502, "no_progress", 3)


@pytest.mark.parametrize("slowly", [False, True])
async def test_a_prompt_that_kills_engines_is_given_up_however_long_they_take_to_die(slowly: bool) -> None:
    """The first one dies long after it broke off, and is back when the second one breaks off; that one may still answer
    then, and dies a moment later."""
    asked: list[Engine] = []

    def behave(engine: Engine) -> Behaviour:
        return lambda _number, body: killed(engine, body)

    async def killed(engine: Engine, body: dict[str, Any]) -> AsyncIterator[bytes]:
        asked.append(engine)
        if len(asked) == 2:
            await asked[0].is_seen_dead_and_comes_back()
            engine.looked = engine.die
        async for event in told(body, 1, done=False):
            yield event
        if not slowly and len(asked) > 1:
            engine.die()

    engines = [Engine(lambda *_: told(BODY)) for _ in range(3)]
    for engine in engines:
        engine._behave = behave(engine)
    async with asking(*engines, dying=20.0, queue_seconds=20.0) as client:
        answer = await client.post("/v1/completions", json=BODY)
    problem = answer.json()
    assert (answer.status_code, problem["reason"]) == (502, "poisoned")
    assert "2 engines died" in problem["detail"]
    assert sorted(len(engine.asked) for engine in engines) == [0, 1, 1]
    assert problem["choices"][0]["token_ids"] == WHOLE[:2]


async def test_engines_that_live_on_are_no_deaths() -> None:
    engines = [Engine(lambda _number, body: told(body, 2, done=False)) for _ in range(2)]
    async with asking(*engines, dying=0.1, queue_seconds=20.0) as client:
        answer = await client.post("/v1/completions", json=BODY)
    assert answer.json()["choices"][0]["token_ids"] == WHOLE
    assert sum(len(engine.asked) for engine in engines) == 6


async def test_a_prompt_after_which_engines_fall_silent_is_given_up() -> None:
    async def silent(body: dict[str, Any]) -> AsyncIterator[bytes]:
        async for event in told(body, 2, done=False):
            yield event
        await asyncio.sleep(3600)

    engines = [Engine(lambda _number, body: silent(body)) for _ in range(3)]
    async with asking(*engines, idle=0.3, queue_seconds=20.0) as client:
        answer = await client.post("/v1/completions", json=BODY)
    assert (answer.status_code, answer.json()["reason"]) == (502, "poisoned")
    assert sum(len(engine.asked) for engine in engines) == 2


async def test_a_stream_may_last_longer_than_every_idle_limit() -> None:
    """An engine brings a token in less than the limit; all of them take several times as long as it."""

    async def slow(body: dict[str, Any]) -> AsyncIterator[bytes]:
        async for event in told(body):
            await asyncio.sleep(0.25)
            yield event

    engine = Engine(lambda _number, body: slow(body))
    async with asking(engine, idle=1.5, queue_seconds=1.0, comment=0.1, connect=1.0, drain=1.0) as client:
        answer = await client.post("/v1/completions", json={**BODY, "stream": True})
    events = [json.loads(line[6:]) for line in answer.text.split("\n\n") if line.startswith("data: {")]
    assert [token for event in events for token in event["choices"][0]["token_ids"]] == WHOLE
    assert len(engine.asked) == 1


async def test_resumes_are_bounded_and_what_there_is_comes_with_the_reason() -> None:
    engine = Engine(lambda _number, body: told(body, 1, done=False))
    async with asking(engine, resumes=2, queue_seconds=20.0) as client:
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
    async with asking(engine, queue_seconds=10.0) as client:
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
    async with asking(closed, queue_seconds=0.3) as client:
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
        return JSONResponse({"detail": "no"}, 400) if number == 0 else _forever()

    engine = Engine(behave)
    async with asking(engine) as client:
        answer = await client.post("/v1/completions", json={**BODY, "n": 2})
        assert (answer.status_code, answer.json()["reason"]) == (400, "engine_refused")
        await _until(lambda: not engine.inside)


async def _forever() -> AsyncIterator[bytes]:
    while True:
        yield b": nothing\n\n"
        await asyncio.sleep(0.02)


async def test_text_is_passed_on_and_breaks_with_its_ids() -> None:
    def behave(_number: int, _body: dict[str, Any]) -> AsyncIterator[bytes]:
        return told({**BODY, "stream": True, "return_token_ids": True}, 2, done=False)

    engine = Engine(behave)
    async with asking(engine) as client:
        answer = await client.post("/v1/completions", json={"prompt": "Call me", "stream": True})
    *events, last, done = [line for line in answer.text.split("\n\n") if line.startswith("data: ")]
    assert (len(events), done, len(engine.asked)) == (2, "data: [DONE]", 1)
    error = json.loads(last.removeprefix("data: "))["error"]
    assert (error["reason"], error["choices"]) == ("not_resumable", [{"index": 0, "token_ids": WHOLE[:2]}])
    assert engine.asked[0]["prompt"] == "Call me"


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
    settings = Settings(replicas=("http://a", "http://b"), queue_seconds=2.5, security=security)
    assert Settings.from_json(settings.to_json()) == settings
    assert Settings.from_json(Settings(manager="a:1").to_json()) == Settings(manager="a:1")


def test_what_cannot_be_started_is_refused_by_name() -> None:
    for settings, why in (
        (Settings(), "give --manager HOST:PORT, or --replica"),
        (Settings(manager="a:1", replicas=("http://b",)), "give --manager HOST:PORT, or --replica"),
        (Settings(replicas=("b:8000",)), "is no URL"),
        (Settings(manager="nowhere"), "is not an address"),
        (Settings(manager="a:1", listen="0.0.0.0:8080"), "--insecure"),
    ):
        with pytest.raises(CkptEngineError, match=re.escape(why)):
            check(settings)
