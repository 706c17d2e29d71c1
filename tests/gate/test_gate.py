"""The gate in a real server: closed unless the state words say otherwise, control routes for the agent only."""

import contextlib
import subprocess
import sys
import time

import httpx
import pytest
from fastapi import FastAPI, WebSocket
from fastapi.responses import JSONResponse

from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.core.sleeping import Sleeping
from ckpt_engine.gate.counts import total_counts
from ckpt_engine.gate.gate import Gate
from ckpt_engine.gate.page import EngineMark, EnginePage
from ckpt_engine.gate.reader import StateReader
from ckpt_engine.v1 import weights_pb2
from tests.gate.server import serve
from tests.waiting import PATIENCE, eventually


class SmallGate(Gate):
    open_routes = frozenset({"/health"})
    generation_routes = frozenset({"/generate", "/stream", "/failing", "/wrong"})
    control_routes = frozenset({"/pause"})


IDENTITY = weights_pb2.Identity(lineage="run", version=12, root=b"\x05" * 32)


def application() -> FastAPI:
    app = FastAPI()

    @app.post("/generate")
    async def generate() -> dict[str, str]:
        return {"text": "tokens"}

    @app.post("/failing")
    async def failing(breaks: bool = False) -> JSONResponse:
        if breaks:
            raise RuntimeError("the engine broke off")
        return JSONResponse({}, 503)

    @app.post("/wrong")
    async def wrong() -> JSONResponse:
        return JSONResponse({}, 422)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {}

    @app.post("/pause")
    async def pause() -> dict[str, str]:
        return {"paused": "yes"}

    @app.websocket("/stream")
    async def stream(websocket: WebSocket) -> None:
        await websocket.accept()
        await websocket.close()

    app.add_middleware(SmallGate)
    return app


@pytest.fixture
def engine(directory):
    with serve(application()) as url, httpx.Client(base_url=url) as client:
        yield client, directory


def test_requests_follow_the_state_words(engine):
    client, directory = engine
    refused = client.post("/generate")
    assert refused.status_code == 503
    assert refused.headers["content-type"] == "application/problem+json"
    assert "retry-after" not in refused.headers, "nobody knows when there will be weights"
    assert refused.json()["detail"] == "this replica does not serve now: no worker has started"
    assert refused.json()["reason"] == "no_weights"

    slot = EnginePage(directory.page).claim(0, 1)
    assert client.post("/generate").status_code == 503
    slot.dirty(1)
    assert client.post("/generate").status_code == 503
    slot.clean(1, IDENTITY)
    served = client.post("/generate")
    assert served.status_code == 200
    assert served.headers["x-ckpt-engine-admitted-version"] == "12"
    assert served.headers["x-ckpt-engine-admitted-root"] == "05" * 32
    slot.dirty(2)
    torn = client.post("/generate")
    assert torn.status_code == 503, "no update goes on, so it was left so"
    assert "worker 0 was left half updated by epoch 2" in torn.json()["detail"]
    assert torn.json()["reason"] == "quarantined"


def test_what_the_engine_answers_is_counted_and_what_fails(engine):
    client, directory = engine
    client.post("/failing")  # the gate is closed: it is refused, and no answer of the engine
    EnginePage(directory.page).claim(0, 1).clean(1, IDENTITY)
    bounds = {"x-ckpt-engine-min-version": "1"}
    for route in ("/generate", "/wrong", "/failing", "/failing?breaks=true"):
        for headers in ({}, bounds):
            with contextlib.suppress(httpx.ReadError, httpx.RemoteProtocolError):  # the server may close its connection
                client.post(route, headers={**headers, "connection": "close"})
    # A client may have its answer a moment before it is counted.
    eventually("all are counted", PATIENCE, lambda: total_counts(directory.path).answered == 8)
    assert total_counts(directory.path).failed == 4


def test_control_routes_need_the_token_in_any_state(engine):
    client, directory = engine
    slot = EnginePage(directory.page).claim(0, 1)
    for step in (lambda: None, lambda: slot.dirty(1), lambda: slot.clean(1, IDENTITY)):
        step()
        for path in ("/pause", "/pause/", "/ckpt_engine/install"):
            assert client.post(path).status_code == 403
            for wrong in ("wrong", "", directory.token()[:-1], directory.token()[:1], directory.token() + "0"):
                assert client.post(path, headers={"x-ckpt-engine-token": wrong}).status_code == 403, wrong
        given = client.post("/pause", headers={"x-ckpt-engine-token": directory.token()})
        assert given.json() == {"paused": "yes"}


@pytest.mark.parametrize("token", ["", "\n", "short", "0" * 31])
def test_a_server_whose_token_is_none_does_not_start(directory, token):
    """An empty one would open every control route to a header without a value."""
    (directory.path / "token").write_text(token)
    with pytest.raises(CkptEngineError, match=f"a token of {len(token.strip())} characters, and 32 are needed"):
        Gate(application())


def test_a_dead_worker_is_noticed_within_a_tenth_of_a_second(tmp_path):
    """By a clock of ours, which stands still until the worker is dead."""
    now = [100.0]
    page = EnginePage(tmp_path / "page")
    worker = subprocess.Popen([sys.executable, "-c", CLEAN_WORKER, str(page.path)], stdout=subprocess.PIPE)
    try:
        assert worker.stdout.readline() == b"clean\n"
        reader = StateReader(page, lambda: now[0])
        assert reader.verdict().open
    finally:
        worker.kill()
        worker.wait(60)
    now[0] += 0.1
    assert "is dead" in reader.verdict().reason


CLEAN_WORKER = """
import sys, time
from pathlib import Path
from ckpt_engine.gate.page import EnginePage
from ckpt_engine.v1 import weights_pb2
from tests.gate.server import serve
EnginePage(Path(sys.argv[1])).claim(0, 1).clean(1, weights_pb2.Identity(lineage="run", version=1, root=bytes(32)))
print("clean", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("own_weights", [False, True])
def test_an_agent_that_promised_to_be_there_and_is_not_closes_the_gate(engine, own_weights):
    client, directory = engine
    page = EnginePage(directory.page)
    page.claim(0, 1).clean(3, IDENTITY)
    page.mark(EngineMark(own_weights=own_weights))
    page.lease(time.monotonic() + 60)
    assert client.post("/generate").status_code == 200
    page.lease(time.monotonic() - 0.001)
    refused = client.post("/generate")
    assert refused.status_code == 503
    assert "lease has expired" in refused.json()["detail"]
    assert not client.get("/ckpt_engine/info").json()["open"]
    page.lease(0)
    assert client.post("/generate").status_code == 200, "an agent that promises nothing may be away"


def test_a_lease_ends_although_nothing_in_the_page_changes(tmp_path):
    now = [100.0]
    page = EnginePage(tmp_path / "page")
    page.claim(0, 1).clean(3, IDENTITY)
    page.lease(108.0)
    reader = StateReader(page, lambda: now[0])
    assert reader.verdict().open
    now[0] = 107.9
    assert reader.verdict().open
    now[0] = 108.1
    assert not reader.verdict().open


def test_health_passes_and_information_tells_the_agent_where_to_go(engine):
    client, directory = engine
    assert client.get("/health").status_code == 200
    EnginePage(directory.page).claim(0, 1).clean(3, IDENTITY)
    assert client.get("/ckpt_engine/info").json() == {
        "directory": str(directory.path),
        "world_size": 1,
        "open": True,
        "held": 0,
        "own_weights": False,
        "asleep": [],
        "reason": "",
        "version": 12,
        "lineage": "run",
        "root": "05" * 32,
    }


def test_probes_learn_whether_it_serves(engine):
    client, directory = engine
    closed = client.get("/ckpt_engine/ready")
    assert closed.status_code == 503
    assert closed.json()["detail"] == "this replica does not serve now: no worker has started"
    slot = EnginePage(directory.page).claim(0, 1)
    slot.clean(3, IDENTITY)
    served = client.get("/ckpt_engine/ready")
    assert (served.status_code, served.json()) == (200, {"ready": True, "open": True, "version": 12, "lineage": "run"})
    assert served.headers["x-ckpt-engine-admitted-version"] == "12"
    slot.dirty(4)
    assert client.get("/ckpt_engine/ready").status_code == 503
    assert client.get("/ckpt_engine/ready/x").status_code == 403, "what lies below it is the agent's"


@pytest.mark.parametrize(
    ("query", "reason", "said"),
    [
        ("at_least=12", "", ""),
        ("at_least=0", "", ""),
        ("at_least=12&lineage=run&strict=1", "", ""),
        ("lineage=run", "", ""),
        (
            "at_least=13",
            "older_version",
            "version 13 or a later one is asked for, and it has version 12 of lineage 'run'",
        ),
        (
            "at_least=13&lineage=run",
            "older_version",
            "version 13 or a later one of lineage 'run' is asked for, and it has",
        ),
        (
            "at_least=3&lineage=other%20run",
            "other_lineage",
            "version 3 or a later one of lineage 'other run' is asked for",
        ),
        (
            "lineage=other",
            "other_lineage",
            "a version of lineage 'other' is asked for, and it has version 12 of lineage",
        ),
    ],
)
def test_probes_learn_whether_it_serves_a_version_or_a_later_one(engine, query, reason, said):
    client, directory = engine
    EnginePage(directory.page).claim(0, 1).clean(3, IDENTITY)
    answer = client.get(f"/ckpt_engine/ready?{query}")
    body = answer.json()
    assert (body["version"], body["lineage"]) == (12, "run"), "what it has, either way"
    if not reason:
        assert (answer.status_code, body["ready"]) == (200, True)
        return
    assert (answer.status_code, body["reason"]) == (503, reason)
    assert answer.headers["content-type"] == "application/problem+json"
    assert said in body["detail"]


def test_an_engine_that_is_closed_has_no_version_for_a_probe(engine):
    client, directory = engine
    slot = EnginePage(directory.page).claim(0, 1)
    slot.clean(3, IDENTITY)
    assert client.get("/ckpt_engine/ready?at_least=12").status_code == 200
    slot.dirty(4)
    torn = client.get("/ckpt_engine/ready?at_least=12")
    assert (torn.status_code, torn.json()["reason"], torn.json()["version"]) == (503, "quarantined", None)


def test_weights_of_its_own_are_no_version_for_a_probe(engine):
    client, directory = engine
    EnginePage(directory.page).mark(EngineMark(own_weights=True))
    assert client.get("/ckpt_engine/ready").json() == {"ready": True, "open": True, "version": None, "lineage": None}
    asked = client.get("/ckpt_engine/ready?at_least=0")
    assert (asked.status_code, asked.json()["reason"]) == (503, "no_version")
    assert "it serves no version" in asked.json()["detail"]


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("atleast=3", "there is no parameter 'atleast'; known are strict, at_least, lineage"),
        ("version=3", "there is no parameter 'version'"),
        ("at_least=", "at_least must be the number of a version, such as 12, not ''"),
        ("at_least=-1", "not '-1'"),
        ("at_least=%D9%A3", "not"),
        (f"at_least={2**63}", "not '9223372036854775808'"),
        ("at_least=3&at_least=5", "at_least is given twice"),
        ("lineage=", "lineage has no value"),
        ("strict", "strict must be 1 or 0, not ''"),
        ("strict=yes", "strict must be 1 or 0, not 'yes'"),
    ],
)
def test_a_probe_that_asks_wrongly_is_told_so(engine, query, said):
    client, directory = engine
    EnginePage(directory.page).claim(0, 1).clean(3, IDENTITY)
    answer = client.get(f"/ckpt_engine/ready?{query}")
    assert (answer.status_code, answer.json()["reason"]) == (400, "bad_question")
    assert said in answer.json()["detail"]


def test_nobody_is_let_in_while_memory_is_given_up(engine):
    client, directory = engine
    page = EnginePage(directory.page)
    page.claim(0, 1).clean(3, IDENTITY)
    for sleeping, said in (
        (Sleeping(1, frozenset({"weights", "kv_cache"})), "kept on the host"),
        (Sleeping(2, frozenset({"weights", "kv_cache"})), "discarded"),
        (Sleeping(2, frozenset({"kv_cache"}), rousing=True), "not woken yet"),
    ):
        page.mark(EngineMark(sleeping=sleeping))
        assert page.marked() == EngineMark(sleeping=sleeping)
        assert page.read()[0].identity == IDENTITY
        refused = client.post("/generate")
        assert refused.status_code == 503
        assert said in refused.json()["detail"]
        assert refused.json()["reason"] == "asleep"
    page.mark(EngineMark())
    assert client.post("/generate").headers["x-ckpt-engine-admitted-version"] == "12"


def test_an_engine_with_weights_of_its_own_is_open_while_it_is_awake_and_whole(engine):
    client, directory = engine
    page = EnginePage(directory.page)
    assert client.post("/generate").status_code == 503
    page.mark(EngineMark(own_weights=True))
    answer = client.post("/generate")
    assert answer.status_code == 200
    assert "x-ckpt-engine-admitted-version" not in answer.headers
    slot = page.claim(0, 1)
    assert page.marked().own_weights
    assert client.post("/generate").status_code == 200
    slot.dirty(1)
    assert client.post("/generate").status_code == 503
    slot.none()
    page.mark(EngineMark(own_weights=True, sleeping=Sleeping(1, frozenset({"weights", "kv_cache"}))))
    assert client.post("/generate").status_code == 503


def test_paths_that_only_look_like_open_ones_are_gated(engine):
    client, _ = engine
    for path in ("/healthy", "/health/generate", "//generate", "/Health"):
        assert client.post(path).status_code == 403


async def test_a_closed_gate_refuses_websockets(directory):
    sent = []

    async def inner(scope, receive, send):
        raise AssertionError("the request went through a closed gate")

    async def send(message):
        sent.append(message)

    async def receive():
        return {"type": "websocket.connect"}

    scope = {"type": "websocket", "path": "/stream", "headers": []}
    await SmallGate(inner)(scope, receive, send)
    assert sent[0]["type"] == "websocket.close"
