"""A gate in a real server, and requests that ask for versions: in headers, and in the field `weight_version`."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request, WebSocket
from fastapi.responses import JSONResponse, Response, StreamingResponse

from ckpt_engine.gate.counts import total_counts
from ckpt_engine.gate.directory import EngineDirectory
from ckpt_engine.gate.gate import Gate
from ckpt_engine.gate.page import EngineMark, EnginePage, HoldLimits, RequestHold, WorkerSlot
from ckpt_engine.v1 import weights_pb2
from tests.gate.server import serve
from tests.waiting import PATIENCE, eventually

LIMITS = HoldLimits(100.0, 50, 200_000)
VERSION, LEAST, LINEAGE = "x-ckpt-engine-version", "x-ckpt-engine-min-version", "x-ckpt-engine-lineage"


class SmallGate(Gate):
    generation_routes = frozenset({"/generate", "/stream", "/echo", "/socket", "/refuse"})


class Engine:
    """An application behind the gate that answers when a test says so, and its page.

    running: requests that are inside and not answered. gone: requests whose client disconnected.
    """

    def __init__(self, directory: EngineDirectory) -> None:
        self.directory = directory
        self.page = EnginePage(directory.page)
        self.slots: list[WorkerSlot] = [self.page.claim(rank, 2) for rank in range(2)]
        self.epoch = 0
        self.running = self.gone = 0
        self.got = b""  # the last body of /echo
        self.steps = 0  # how many words the running requests may say
        self.url = ""
        self.client = httpx.Client(timeout=60)
        self.app = FastAPI()
        self.app.add_middleware(SmallGate)
        self.app.post("/generate", response_model=None)(self._generate)
        self.app.post("/stream", response_model=None)(self._stream)
        self.app.post("/echo", response_model=None)(self._echo)
        self.app.post("/refuse", response_model=None)(self._refuse)
        self.app.websocket("/socket")(self._socket)
        self.install(5)

    def install(self, version: int, lineage: str = "run") -> None:
        """What workers and agent write in an update."""
        self.begin()
        self.end(version, lineage)

    def begin(self) -> None:
        self.epoch += 1
        self.page.hold(RequestHold(self.epoch, time.monotonic() + 120), LIMITS)
        for slot in self.slots:
            slot.dirty(self.epoch)

    def end(self, version: int, lineage: str = "run") -> None:
        identity = weights_pb2.Identity(lineage=lineage, version=version, root=bytes([version]) * 32)
        for slot in self.slots:
            slot.clean(self.epoch, identity)
        self.page.hold(RequestHold(), LIMITS)

    async def _said(self, request: Request, count: int) -> bool:
        """Waits until word number `count` may be said. False: the client has gone."""
        self.running += 1
        try:
            while self.steps < count:
                if await request.is_disconnected():
                    self.gone += 1
                    return False
                await asyncio.sleep(0.002)
        except asyncio.CancelledError:  # Starlette heard of it first, and ends the stream
            self.gone += 1
            raise
        finally:
            self.running -= 1
        return True

    async def _generate(self, request: Request) -> Response:
        content = await request.json()
        if not await self._said(request, 1):
            return Response(status_code=499)
        if content.get("sglang"):
            meta = {"weight_version": "5:05050505:run", "finish_reason": {"type": "stop"}}
            return JSONResponse({"text": "word", "meta_info": meta})
        return JSONResponse({"choices": [{"text": "word", "finish_reason": "stop"}]})

    async def _stream(self, request: Request) -> Response:
        await request.body()

        async def events() -> Any:
            for number in (1, 2, 3):
                if not await self._said(request, number):
                    return
                choice = {"text": f"word {number}", "finish_reason": "stop" if number == 3 else None}
                yield f"data: {json.dumps({'choices': [choice]})}\n\n"
            yield "data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    async def _echo(self, request: Request) -> Response:
        self.got = await request.body()
        assert int(request.headers["content-length"]) == len(self.got)
        return Response(b"done")

    async def _refuse(self, request: Request) -> Response:
        return JSONResponse({"error": "too long"}, 400)

    async def _socket(self, websocket: WebSocket) -> None:
        await websocket.accept()
        await websocket.close()

    def ask(self, route: str = "/generate", field: Any = None, **headers: str) -> httpx.Response:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        body = {"prompt": [1]} if field is None else {"prompt": [1], "weight_version": field}
        return self.client.post(f"{self.url}{route}", json=body, headers=named)


@pytest.fixture
def engine(directory: EngineDirectory) -> Iterator[Engine]:
    engine = Engine(directory)
    with serve(engine.app) as url, engine.client:
        engine.url = url
        yield engine
        engine.steps = 100


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(max_workers=20) as pool:
        yield pool


ENTRIES: list[tuple[dict[str, str], Any, str]] = [
    ({}, None, ""),
    ({VERSION: "5"}, None, ""),
    ({LEAST: "5"}, None, ""),
    ({LEAST: "2", LINEAGE: "run"}, None, ""),
    ({LINEAGE: "run"}, {"exact_version": 5, "min_version": None}, ""),
    ({VERSION: "5"}, {"exact_version": 5, "min_required_version": 4}, ""),
    ({}, {"min_required_version": 5}, ""),
    ({}, {"min_version": 5, "lineage": "run"}, ""),
    ({}, {}, ""),
    ({VERSION: "4"}, None, "version_gone"),
    ({}, {"exact_version": 4}, "version_gone"),
    ({VERSION: "6"}, None, "version_not_yet"),
    ({LEAST: "6"}, None, "version_not_yet"),
    ({}, {"min_version": 6}, "version_not_yet"),
    ({}, {"min_required_version": 6}, "version_not_yet"),
    ({LINEAGE: "other"}, None, "version_not_yet"),
    ({VERSION: "5"}, {"lineage": "other"}, "version_not_yet"),
]


def test_a_request_is_let_in_under_a_version_that_it_accepts(engine: Engine) -> None:
    engine.steps = 1
    for headers, field, reason in ENTRIES:
        before = total_counts(engine.directory.path).refusals.get(reason, 0)
        answer = engine.ask(field=field, **headers)
        if not reason:
            assert answer.status_code == 200, answer.text
            assert answer.headers["x-ckpt-engine-admitted-version"] == "5"
            assert answer.headers["x-ckpt-engine-admitted-root"] == "05" * 32
            assert answer.headers["x-ckpt-engine-end-version"] == "5"
            assert answer.headers["x-ckpt-engine-end-root"] == "05" * 32
            assert ("weight_version_start" in answer.json()) == (field is not None)
            continue
        assert (answer.status_code, answer.json()["reason"]) == (409, reason), (headers, field)
        assert answer.headers["content-type"] == "application/problem+json"
        assert answer.headers.get("retry-after") == ("1" if reason == "version_not_yet" else None)
        assert "it serves version 5 of lineage 'run'" in answer.json()["detail"]
        assert (answer.json()["error"]["code"], answer.json()["error"]["type"]) == (reason, "conflict_error")
        assert total_counts(engine.directory.path).refusals[reason] == before + 1


def test_a_version_that_was_taken_back_is_told_from_one_that_has_not_come(engine: Engine) -> None:
    engine.steps = 1
    assert engine.ask().status_code == 200
    engine.install(3)
    assert engine.ask(x_ckpt_engine_min_version="5").json()["reason"] == "rolled_back"
    assert engine.ask(x_ckpt_engine_min_version="6").json()["reason"] == "version_not_yet"
    engine.install(3, "other")
    assert engine.ask(x_ckpt_engine_min_version="5").json()["reason"] == "version_not_yet", "of this run it may come"


def test_weights_of_its_own_are_no_version(engine: Engine) -> None:
    engine.steps = 1
    for rank in range(2):
        engine.slots[rank].none()
    engine.page.mark(EngineMark(own_weights=True))
    assert engine.ask(x_ckpt_engine_version="5").json()["reason"] == "version_not_yet"
    answer = engine.ask(field={})
    assert answer.status_code == 200
    assert (answer.json()["weight_version_start"], answer.json()["weight_version_end"]) == (None, None)
    assert "x-ckpt-engine-end-version" not in answer.headers


MISTAKES: list[tuple[list[tuple[str, str]], Any, str]] = [
    ([(VERSION, "new")], None, "x-ckpt-engine-version: 'new' must be an integer of 0 or more"),
    ([(VERSION, "5"), (VERSION, "5")], None, "it is given twice"),
    ([("x-ckpt-engine-versoin", "5")], None, "at a replica's gate; did you mean x-ckpt-engine-version?"),
    ([("x_ckpt_engine_version", "5")], None, "at a replica's gate; did you mean x-ckpt-engine-version?"),
    ([("x-ckpt-engine-max-lag", "1")], None, "there is no such header at a replica's gate; "),
    ([(VERSION, "4"), (LEAST, "5")], None, "no version is both"),
    ([(VERSION, "4")], {"exact_version": 5}, "weight_version.exact_version: 5, and 4 is asked for beside it"),
    ([], {"max_lag": 1}, "a replica does not know the last version"),
    ([], "5", "weight_version: '5' must be an object such as {\"exact_version\": 3}"),
    ([], {"exact": 5}, "weight_version.exact: there is no such member; there are exact_version, min_version"),
    ([], {"exact_version": "5"}, "weight_version.exact_version: '5' must be an integer"),
    ([], {"exact_version": True}, "weight_version.exact_version: 'True' must be an integer"),
    ([], {"min_version": -1}, "weight_version.min_version: '-1' must be an integer"),
]


def test_what_would_not_be_held_is_refused_in_words(engine: Engine) -> None:
    for headers, field, words in MISTAKES:
        body = {"prompt": [1]} if field is None else {"weight_version": field}
        answer = engine.client.post(f"{engine.url}/generate", json=body, headers=headers)
        assert (answer.status_code, answer.json()["reason"]) == (400, "bad_request")
        assert words in answer.json()["detail"]


def test_the_engine_gets_bodies_without_the_field_and_all_others_as_they_came(engine: Engine) -> None:
    def sent(content: bytes, **headers: str) -> bytes:
        answer = engine.client.post(f"{engine.url}/echo", content=content, headers=headers)
        assert answer.status_code == 200, answer.text
        return engine.got

    asked = b'{ "weight_version": {"exact_version": 5}, "prompt": "caf\\u00e9", "temperature": 0.1}'
    assert json.loads(sent(asked)) == {"prompt": "caf\u00e9", "temperature": 0.1}
    for name in (rb"\u0077eight_version", rb"weight\u005Fversio\u006e", rb"weight\u005fversion"):
        assert json.loads(sent(b'{"%s": {"exact_version": 5}, "prompt": "x"}' % name)) == {"prompt": "x"}
    for other in (
        b"",
        b"{}",
        b'{"prompt": "say \\"weight_version\\": 4"}',
        b'{"metadata": {"weight_version": {"exact_version": 4}}}',
        b'["weight_version"]',
        b'{"prompt": "caf\\u00e9 \\\\u0077eight_version"}',
        b'{"weight_version": {"exact_version": 4',
    ):
        assert sent(other) == other
    upload = b'--x\r\nContent-Disposition: form-data; name="weight_version"\r\n\r\n4\r\n--x--\r\n'
    assert sent(upload, **{"content-type": "multipart/form-data; boundary=x"}) == upload
    large = json.dumps({"prompt": list(range(100_000)), "weight_version": {"min_version": 5}}).encode()
    assert json.loads(sent(large)) == {"prompt": list(range(100_000))}


def test_a_field_that_comes_in_pieces_is_found(engine: Engine) -> None:
    """And the versions are those of the moment when all of it is there."""
    body = b'{"prompt": [1], "weight_version": {"exact_version": 6}}'
    engine.steps = 1
    with socket.create_connection(("127.0.0.1", int(engine.url.rsplit(":", 1)[1])), timeout=60) as client:
        head = b"POST /generate HTTP/1.1\r\nHost: x\r\nConnection: close\r\nExpect: 100-continue\r\n"
        client.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body))
        assert b"100 Continue" in client.recv(100), "the gate reads it"
        client.sendall(body[:25])
        engine.install(6)
        client.sendall(body[25:])
        answer = client.makefile("rb").read()
    assert b" 200 " in answer.splitlines()[0]
    assert b"x-ckpt-engine-admitted-version: 6" in answer


def test_what_waits_for_an_update_is_judged_when_it_is_let_in(engine: Engine, threads: ThreadPoolExecutor) -> None:
    engine.steps = 1
    engine.begin()
    old = threads.submit(engine.ask, x_ckpt_engine_version="5")
    new = threads.submit(engine.ask, field={"exact_version": 6})
    later = threads.submit(engine.ask, x_ckpt_engine_min_version="7")
    held = f"{engine.url}/ckpt_engine/info"
    eventually("all wait", PATIENCE, lambda: engine.client.get(held).json()["held"] == 3)
    engine.end(6)
    assert old.result(60).json()["reason"] == "version_gone"
    assert (new.result(60).status_code, new.result().json()["weight_version_start"]) == (200, 6)
    assert later.result(60).json()["reason"] == "version_not_yet"


def test_an_exact_answer_is_given_up_when_an_install_begins(engine: Engine, threads: ThreadPoolExecutor) -> None:
    """At once, and the engine stops: it is told that the client has gone."""
    answer = threads.submit(engine.ask, x_ckpt_engine_version="5")
    eventually("it runs", PATIENCE, lambda: engine.running == 1)
    engine.begin()
    refused = answer.result(60)
    assert (refused.status_code, refused.json()["reason"]) == (409, "version_changed")
    assert "went over to another version, and version 5 was asked for" in refused.json()["detail"]
    eventually("the engine has stopped", PATIENCE, lambda: engine.gone == 1)
    assert total_counts(engine.directory.path).refusals["version_changed"] == 1


def test_a_version_that_comes_back_is_not_the_same_answer(engine: Engine, threads: ThreadPoolExecutor) -> None:
    answer = threads.submit(engine.ask, x_ckpt_engine_version="5")
    eventually("it runs", PATIENCE, lambda: engine.running == 1)
    engine.install(6)
    engine.install(5)
    engine.steps = 1
    assert answer.result(60).json()["reason"] == "version_changed"


OVER_INSTALLS: list[tuple[dict[str, str], int, str, str]] = [
    ({LEAST: "4"}, 6, "run", ""),
    ({LEAST: "4"}, 4, "run", ""),
    ({LINEAGE: "run"}, 1, "run", ""),
    ({LEAST: "4"}, 3, "run", "rolled_back"),
    ({LEAST: "4"}, 6, "other", "lineage_changed"),
    ({LINEAGE: "run"}, 6, "other", "lineage_changed"),
]


def test_other_bounds_hold_over_installs(engine: Engine, threads: ThreadPoolExecutor) -> None:
    for headers, version, lineage, reason in OVER_INSTALLS:
        engine.steps = 0
        engine.install(5)
        answer = threads.submit(partial(engine.ask, field={}, **headers))
        eventually("it runs", PATIENCE, lambda: engine.running == 1)
        engine.install(version, lineage)
        if reason:
            assert (answer.result(60).status_code, answer.result().json()["reason"]) == (409, reason)
            eventually("the engine has stopped", PATIENCE, lambda: engine.running == 0)
            continue
        engine.steps = 1
        found = answer.result(60)
        assert found.status_code == 200, found.text
        assert found.headers["x-ckpt-engine-admitted-version"] == "5"
        assert found.headers["x-ckpt-engine-end-version"] == str(version)
        assert (found.json()["weight_version_start"], found.json()["weight_version_end"]) == (5, version)


def test_a_version_that_comes_and_goes_in_the_middle_is_noticed(engine: Engine, threads: ThreadPoolExecutor) -> None:
    answer = threads.submit(engine.ask, x_ckpt_engine_min_version="4")
    eventually("it runs", PATIENCE, lambda: engine.running == 1)
    engine.install(3)
    refused = answer.result(60)
    engine.install(6)
    assert refused.json()["reason"] == "rolled_back"


def lines_of(answer: httpx.Response) -> Iterator[str]:
    return (line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: "))


def test_an_exact_stream_ends_with_an_error_after_the_tokens_of_its_version(engine: Engine) -> None:
    engine.steps = 1
    with engine.client.stream("POST", f"{engine.url}/stream", json={}, headers={VERSION: "5"}) as answer:
        lines = lines_of(answer)
        assert json.loads(next(lines))["choices"][0]["text"] == "word 1"
        assert answer.headers["x-ckpt-engine-admitted-version"] == "5"
        assert "x-ckpt-engine-end-version" not in answer.headers
        engine.install(6)
        engine.steps = 2
        error, done = lines
    assert done == "[DONE]"
    assert json.loads(error)["error"]["reason"] == "version_changed"
    assert json.loads(error)["error"]["status"] == 409
    eventually("the engine has stopped", PATIENCE, lambda: engine.gone == 1)


def test_an_exact_stream_without_a_token_is_refused(engine: Engine, threads: ThreadPoolExecutor) -> None:
    answer = threads.submit(engine.ask, "/stream", x_ckpt_engine_version="5")
    eventually("it runs", PATIENCE, lambda: engine.running == 1)
    engine.begin()
    assert (answer.result(60).status_code, answer.result().json()["reason"]) == (409, "version_changed")


def test_a_stream_says_on_its_last_event_under_which_versions_it_was_made(engine: Engine) -> None:
    engine.steps = 1
    with engine.client.stream("POST", f"{engine.url}/stream", json={"weight_version": {"min_version": 5}}) as answer:
        lines = lines_of(answer)
        first = json.loads(next(lines))
        engine.install(6)
        engine.steps = 3
        *_, last, done = lines
    assert done == "[DONE]"
    assert "weight_version_start" not in first
    assert (json.loads(last)["weight_version_start"], json.loads(last)["weight_version_end"]) == (5, 6)


def test_sglangs_form_has_them_where_slime_reads_them(engine: Engine) -> None:
    engine.steps = 1
    body = {"sglang": True, "weight_version": {"exact_version": 5, "min_version": None}}
    meta = engine.client.post(f"{engine.url}/generate", json=body).json()["meta_info"]
    assert (meta["weight_version"], meta["weight_version_start"], meta["weight_version_end"]) == ("5", 5, 5)


def test_an_answer_names_the_version_under_which_it_ended(engine: Engine, threads: ThreadPoolExecutor) -> None:
    """Without any bound. While an install writes there is none."""
    for write in (engine.install, lambda version: engine.begin()):
        engine.steps = 0
        answer = threads.submit(engine.ask)
        eventually("it runs", PATIENCE, lambda: engine.running == 1)
        write(6)
        engine.steps = 1
        found = answer.result(60)
        assert found.json() == {"choices": [{"text": "word", "finish_reason": "stop"}]}
        assert found.headers.get("x-ckpt-engine-end-version") == ("6" if write == engine.install else None)


def test_an_engines_own_refusal_is_the_answer(engine: Engine) -> None:
    answer = engine.ask("/refuse", x_ckpt_engine_version="5")
    assert (answer.status_code, answer.json()) == (400, {"error": "too long"})


async def test_a_websocket_cannot_ask_for_versions(engine: Engine) -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    scope = {"type": "websocket", "path": "/socket", "headers": [(VERSION.encode(), b"5")], "app": engine.app}
    await SmallGate(engine.app)(scope, receive, send)
    (close,) = sent
    assert (close["type"], close["code"]) == ("websocket.close", 1008)
    assert "a WebSocket cannot ask for versions" in close["reason"]
