"""A real server whose gate keeps requests while the page says that an update goes on."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request

from ckpt_engine.core.sleeping import Sleeping
from ckpt_engine.gate import waiting
from ckpt_engine.gate.directory import EngineDirectory
from ckpt_engine.gate.gate import Gate
from ckpt_engine.gate.page import EngineMark, EnginePage, HoldLimits, RequestHold, WorkerSlot
from ckpt_engine.v1 import weights_pb2
from tests.gate.server import serve
from tests.waiting import PATIENCE, eventually, until

LIMITS = HoldLimits(100.0, 50, 200_000)


def identity(version: int) -> weights_pb2.Identity:
    return weights_pb2.Identity(lineage="run", version=version, root=bytes([version]) * 32)


class SmallGate(Gate):
    generation_routes = frozenset({"/generate", "/stream"})


class Engine:
    """An application behind the gate, and its page. reached: numbers of the requests that came through, in order."""

    def __init__(self, directory: EngineDirectory) -> None:
        self.reached: list[int] = []
        self.page = EnginePage(directory.page)
        self.slot: WorkerSlot = self.page.claim(0, 1)
        self.slot.clean(1, identity(1))
        self.app = FastAPI()
        self.app.add_middleware(SmallGate)
        self.url = ""
        self.client = httpx.Client(timeout=60, limits=httpx.Limits(max_connections=None))

        @self.app.post("/generate")
        async def generate(request: Request, number: int = 0) -> dict[str, Any]:
            self.reached.append(number)
            return {"length": len(await request.body())}

    def update(self, seconds: float = 120.0, epoch: int = 2, limits: HoldLimits = LIMITS) -> None:
        """What an agent and a worker write when an install begins."""
        self.page.hold(RequestHold(epoch, time.monotonic() + seconds), limits)
        self.slot.dirty(epoch)

    def end(self, version: int = 2, epoch: int = 2) -> None:
        self.slot.clean(epoch, identity(version))
        self.page.hold(RequestHold(), LIMITS)

    def held(self) -> int:
        found: int = self.client.get(f"{self.url}/ckpt_engine/info").json()["held"]
        return found

    def wait_until_held(self, count: int) -> None:
        eventually(f"{count} requests wait", PATIENCE, lambda: self.held() == count)


@pytest.fixture
def engine(directory: EngineDirectory) -> Iterator[Engine]:
    engine = Engine(directory)
    with serve(engine.app) as url, engine.client:
        engine.url = url
        yield engine


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(max_workers=60) as pool:
        yield pool


def ask(engine: Engine, number: int = 0, body: bytes = b"{}") -> httpx.Response:
    return engine.client.post(f"{engine.url}/generate", params={"number": number}, content=body)


def test_requests_that_come_during_an_update_are_answered_after_it(engine: Engine, threads: ThreadPoolExecutor) -> None:
    """In the order in which they came, with the new version, and with their bodies whole."""
    engine.update()
    answers = []
    for number in range(20):
        answers.append(threads.submit(ask, engine, number, b"x" * 100 * number))
        engine.wait_until_held(number + 1)
    assert engine.reached == []
    engine.end()
    responses = [answer.result(60) for answer in answers]
    assert [response.status_code for response in responses] == [200] * 20
    assert {response.headers["x-ckpt-engine-admitted-root"] for response in responses} == {identity(2).root.hex()}
    assert [response.json()["length"] for response in responses] == [100 * number for number in range(20)]
    assert engine.reached == list(range(20))
    assert engine.held() == 0


def test_they_are_kept_from_before_the_pause_and_let_in_when_old_weights_stand(
    engine: Engine, threads: ThreadPoolExecutor
) -> None:
    """While the words still say that the old version is whole, and when they say so again."""
    engine.page.hold(RequestHold(2, time.monotonic() + 120), LIMITS)
    answer = threads.submit(ask, engine)
    engine.wait_until_held(1)
    engine.page.hold(RequestHold(), LIMITS)
    assert answer.result(60).headers["x-ckpt-engine-admitted-root"] == identity(1).root.hex()


@pytest.mark.parametrize("how", ["asleep", "quarantined", "closed", "dead agent"])
def test_when_there_is_nothing_to_wait_for_all_are_told_at_once(
    engine: Engine, threads: ThreadPoolExecutor, how: str
) -> None:
    engine.update(0.3 if how == "dead agent" else 600.0)
    answers = [threads.submit(ask, engine) for _ in range(40)]
    if how != "dead agent":  # it writes nothing any more, and the hold ends by itself
        engine.wait_until_held(40)
        if how != "quarantined":
            engine.slot.clean(2, identity(2))
        if how == "asleep":
            engine.page.mark(EngineMark(sleeping=Sleeping(1, frozenset({"weights", "kv_cache"}))))
        engine.page.hold(RequestHold(2, 0.0, how == "closed"), LIMITS)
    responses = [answer.result(60) for answer in answers]
    assert {response.status_code for response in responses} == {503}
    assert {response.json()["reason"] for response in responses} == {"asleep" if how == "asleep" else "quarantined"}
    assert all("retry-after" not in response.headers for response in responses)


def test_a_request_waits_no_longer_than_it_may(engine: Engine) -> None:
    engine.update(600.0, limits=HoldLimits(0.1, 50, 1000))
    refused = ask(engine)
    assert (refused.status_code, refused.json()["reason"]) == (503, "updating")
    assert 500 < int(refused.headers["retry-after"]) <= 600, "the update may take that long"
    assert "has waited 0.1 s" in refused.json()["detail"]
    engine.update(600.0, limits=HoldLimits(0.0, 50, 1000))
    assert "has waited" not in ask(engine).json()["detail"]


def test_too_many_and_too_large_ones_are_refused_at_once(engine: Engine, threads: ThreadPoolExecutor) -> None:
    engine.update()
    waiting = [threads.submit(ask, engine) for _ in range(LIMITS.requests)]
    engine.wait_until_held(LIMITS.requests)
    refused = ask(engine)
    assert (refused.status_code, refused.json()["reason"]) == (503, "hold_full")
    assert 0 < int(refused.headers["retry-after"]) <= 120
    ready = httpx.get(f"{engine.url}/ckpt_engine/ready")
    assert (ready.status_code, ready.json()["reason"]) == (503, "updating"), "another one would be refused"
    engine.end()
    assert {answer.result(60).status_code for answer in waiting} == {200}
    engine.update()
    assert ask(engine, body=b"x" * (LIMITS.bytes + 1)).json()["reason"] == "hold_full"
    engine.end()


def test_bytes_are_counted_as_they_come_if_nobody_has_announced_them(engine: Engine) -> None:
    engine.update()
    with socket.create_connection(("127.0.0.1", int(engine.url.rsplit(":", 1)[1])), timeout=60) as client:
        client.sendall(b"POST /generate HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        engine.wait_until_held(1)
        with contextlib.suppress(ConnectionError):  # it need not take the rest of what it has refused
            for _ in range(LIMITS.bytes // 50_000 + 1):
                client.sendall(b"c350\r\n" + b"x" * 50_000 + b"\r\n")
        assert b" 503 " in client.makefile("rb").readline()
    assert engine.held() == 0


def test_a_client_that_leaves_frees_its_place(engine: Engine) -> None:
    """Also one that has sent half of its body, and one that waits for a word before it sends any."""
    engine.update()
    clients = []
    for count, rest in enumerate((b"\r\n" + b"x" * 10, b"\r\n" + b"x" * 3, b"Expect: 100-continue\r\n\r\n"), 1):
        client = socket.create_connection(("127.0.0.1", int(engine.url.rsplit(":", 1)[1])), timeout=60)
        client.sendall(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n" + rest)
        clients.append(client)
        engine.wait_until_held(count)
    assert b"100 Continue" in clients[2].recv(100)
    for client in clients:
        client.close()
    engine.wait_until_held(0)
    engine.end()
    assert engine.reached == []


def test_a_slow_body_is_taken_along(engine: Engine, threads: ThreadPoolExecutor) -> None:
    """It is let in with the part that came while it waited, and the engine reads the rest."""
    engine.update()
    with socket.create_connection(("127.0.0.1", int(engine.url.rsplit(":", 1)[1])), timeout=60) as client:
        client.sendall(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\nConnection: close\r\n\r\nabc")
        engine.wait_until_held(1)
        engine.end()
        engine.wait_until_held(0)
        client.sendall(b"defghij")
        answer = client.makefile("rb").read()
    assert b" 200 " in answer.splitlines()[0]
    assert answer.endswith(b'{"length":10}')


def test_ready_stays_while_requests_are_kept(engine: Engine) -> None:
    ready = f"{engine.url}/ckpt_engine/ready"
    assert httpx.get(ready).json() == {"ready": True, "open": True, "version": 1, "lineage": "run"}
    assert httpx.get(ready, params={"strict": "1"}).status_code == 200
    engine.update()
    kept = httpx.get(ready)
    assert (kept.status_code, kept.json()) == (200, {"ready": True, "open": False, "version": None, "lineage": None})
    strict = httpx.get(ready, params={"strict": "1"})
    assert (strict.status_code, strict.json()["reason"]) == (503, "updating")
    assert httpx.get(ready, params={"strict": "0"}).status_code == 200
    engine.page.hold(RequestHold(2, 0.0), LIMITS)
    refused = httpx.get(ready)
    assert (refused.status_code, refused.json()["reason"]) == (503, "quarantined")
    engine.update(limits=HoldLimits(0.0, 50, 1000))
    assert httpx.get(ready).status_code == 503, "nobody is kept"


async def test_websockets_are_refused_and_not_kept(directory: EngineDirectory) -> None:
    engine, sent = Engine(directory), []
    engine.update()

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError("it is not even looked at")

    scope = {"type": "websocket", "path": "/stream", "headers": []}
    await SmallGate(engine.app)(scope, receive, send)
    assert [(message["type"], message["code"]) for message in sent] == [("websocket.close", 1013)]


@pytest.mark.parametrize("count", [1000, pytest.param(10_000, marks=pytest.mark.slow)])
async def test_many_that_come_at_once(directory: EngineDirectory, count: int) -> None:
    """Those within the bound are served in their order, the others refused at once, and memory stays flat.

    Without a socket each: what is asked is the gate's part. Each has a body of 1 KB.
    """
    bound = count // 4
    engine, limits = Engine(directory), HoldLimits(600.0, bound, 2**30)
    reached: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        reached.append(scope["number"])
        assert len((await receive())["body"]) == 1000
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    gate, statuses = SmallGate(app), {}

    async def one(number: int) -> None:
        body = [{"type": "http.request", "body": bytes(1000), "more_body": False}]
        never = asyncio.get_running_loop().create_future()

        async def receive() -> Any:
            return body.pop() if body else await never

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                statuses[number] = message["status"]

        headers = [(b"content-length", b"1000")]
        await gate({"type": "http", "path": "/generate", "headers": headers, "number": number}, receive, send)

    peaks = []
    for epoch in (2, 3, 4):
        statuses.clear()
        reached.clear()
        engine.update(600.0, epoch, limits)
        requests = [asyncio.create_task(one(number)) for number in range(count)]
        await until(lambda: len(statuses) == count - bound)
        assert set(statuses.values()) == {503}
        assert reached == [], "it is closed, and those who wait do so"
        engine.end(epoch, epoch)
        await asyncio.gather(*requests)
        assert reached == list(range(bound)), "in the order of their arrival"
        assert [statuses[number] for number in range(count)] == [200] * bound + [503] * (count - bound)
        peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    assert peaks[2] - peaks[0] < 0.1 * peaks[0], "what one round took, the next one takes again"


async def test_a_page_that_cannot_be_read_any_more_leaves_nobody_waiting(directory: EngineDirectory) -> None:
    engine = Engine(directory)
    engine.update(60.0)

    async def receive() -> Any:
        return await asyncio.get_running_loop().create_future()

    gate = SmallGate(engine.app)
    scope = {"type": "http", "path": "/generate", "headers": []}
    request = asyncio.create_task(gate(scope, receive, None))  # type: ignore[arg-type]
    await asyncio.sleep(0.02)
    directory.page.write_bytes(b"overwrit" + directory.page.read_bytes()[8:])
    with pytest.raises(ValueError, match="not a page of state words"):
        await asyncio.wait_for(request, 60)


@pytest.mark.parametrize("turns", range(8))
async def test_one_that_comes_when_the_gate_opens_overtakes_nobody(
    directory: EngineDirectory, monkeypatch: pytest.MonkeyPatch, turns: int
) -> None:
    """turns: of the event loop between its arrival and the end of the update; the page is looked at in each."""
    monkeypatch.setattr(waiting, "POLL_SECONDS", 0)
    engine = Engine(directory)
    reached: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        reached.append(scope["number"])

    async def receive() -> Any:
        return await asyncio.get_running_loop().create_future()

    gate = SmallGate(app)

    def request(number: int) -> asyncio.Task[None]:
        scope = {"type": "http", "path": "/generate", "headers": [], "number": number}
        return asyncio.create_task(gate(scope, receive, None))  # type: ignore[arg-type]

    engine.update(60.0)
    requests = [request(number) for number in range(3)]
    await asyncio.sleep(0.05)
    requests.append(request(3))
    for _ in range(turns):
        await asyncio.sleep(0)
    engine.end()
    await asyncio.wait_for(asyncio.gather(*requests), 60)
    assert reached == [0, 1, 2, 3]


def test_an_update_takes_nothing_from_what_a_probe_asks_for(engine: Engine) -> None:
    """While requests are kept the version before the update counts, also once its bytes are written over."""
    ready, asked = f"{engine.url}/ckpt_engine/ready", {"at_least": "1", "lineage": "run"}
    assert httpx.get(ready, params=asked).status_code == 200
    engine.update()
    assert httpx.get(ready, params=asked).status_code == 200
    assert httpx.get(ready, params={**asked, "strict": "1"}).json()["reason"] == "updating"
    newer = httpx.get(ready, params={"at_least": "2"})
    assert (newer.status_code, newer.json()["reason"], newer.json()["version"]) == (503, "older_version", 1)
    engine.end(2)
    assert httpx.get(ready, params={"at_least": "2"}).status_code == 200


def test_a_probe_for_a_version_fails_during_the_first_update(engine: Engine) -> None:
    """A gate that has seen no version yet cannot say that it was one."""
    engine.update()
    assert httpx.get(f"{engine.url}/ckpt_engine/ready").status_code == 200
    first = httpx.get(f"{engine.url}/ckpt_engine/ready", params={"at_least": "0"})
    assert (first.status_code, first.json()["reason"]) == (503, "no_version")
