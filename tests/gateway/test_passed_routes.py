"""Routes that are passed on: responses, embeddings, tokens of a text, one model.

The engines are stand-ins that answer as vLLM and SGLang do; real ones are in tests/engines.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ckpt_engine.gateway.fleet import FleetState
from ckpt_engine.gateway.versions import GatewayVersion
from tests.gateway.misbehaving import Engine, asking

HEADERS = {"x-ckpt-engine-admitted-version": "4", "x-ckpt-engine-admitted-root": "abcd"}
AT_ONCE = {"x-ckpt-engine-queue-seconds": "0"}
ROUTES = ("/v1/responses", "/v1/embeddings", "/tokenize", "/detokenize")


class Server(Engine):
    """lacks: routes that its server does not have."""

    def __init__(self, behave: Callable[[int, dict[str, Any]], Any], lacks: tuple[str, ...] = ()) -> None:
        super().__init__(behave, kind="")
        self._lacks = lacks

    def app(self) -> Starlette:
        async def models(_request: Request) -> Response:
            return JSONResponse({"object": "list", "data": [{"id": "org/tiny", "object": "model"}]})

        app = super().app()
        app.router.routes[:] = [each for each in app.router.routes if getattr(each, "path", "") != "/v1/models"]
        app.router.routes.append(Route("/v1/models", models))
        for route in ROUTES:
            if route not in self._lacks:
                app.router.routes.append(Route(route, self._complete, methods=["POST"]))
        return app


def knows(server: Server, kind: str = "vllm") -> None:
    """Lets the gateway know of what kind it is."""
    server.tell(engine=kind)


def response(status: str = "completed") -> dict[str, Any]:
    return {"id": "resp_1", "object": "response", "status": status, "output": []}


async def named_events(*, last: bool = True) -> AsyncIterator[bytes]:
    contents: list[dict[str, Any]] = [
        {"type": "response.created", "response": response("in_progress")},
        {"type": "response.output_text.delta", "delta": "Ish"},
        {"type": "response.output_text.delta", "delta": "mael"},
    ]
    if last:
        contents.append({"type": "response.completed", "response": response()})
    for content in contents:
        yield f"event: {content['type']}\ndata: {json.dumps(content)}\n\n".encode()


def streaming(*, last: bool = True) -> Response:
    return Engine.streaming(named_events(last=last), HEADERS)


def events_of(answer: httpx.Response) -> list[tuple[str, Any]]:
    """Name and content of each event; the name of the last one is empty if it is an error of the gateway's."""
    found = []
    for part in filter(None, answer.text.split("\n\n")):
        lines = dict(line.split(": ", 1) for line in part.splitlines())
        if lines["data"] != "[DONE]":
            found.append((lines.get("event", ""), json.loads(lines["data"])))
    return found


async def test_they_are_passed_on_as_they_came() -> None:
    server = Server(lambda _number, body: JSONResponse({"got": body}, headers=HEADERS))
    body = {"model": "org/tiny", "input": "Call me", "a_field_of_tomorrow": [1]}
    async with asking(server, probe=60.0) as client:
        knows(server)
        for route in ROUTES:
            answer = await client.post(route, json={**body, "weight_version": {"exact_version": 4}})
            assert answer.status_code == 200, answer.text
            assert answer.json()["got"] == body
            assert {name: answer.headers[name] for name in HEADERS} == HEADERS
            later = await client.post(route, json=body, headers={"x-ckpt-engine-version": "3", **AT_ONCE})
            assert later.status_code == 503, later.text
    assert len(server.asked) == len(ROUTES)


@pytest.mark.parametrize("missing", ["its server lacks it", "its gate does not know it"])
async def test_another_replica_is_asked_where_one_lacks_the_route(missing: str) -> None:
    def refuse(_number: int, _body: dict[str, Any]) -> Response:
        return JSONResponse({"detail": "this replica's gate does not know it", "reason": "unknown_route"}, 403)

    lacking = Server(refuse, ("/v1/embeddings",) if "server" in missing else ())
    having = Server(lambda *_: JSONResponse({"data": []}, headers=HEADERS))
    async with asking(lacking, having, probe=60.0) as client:
        knows(lacking)
        knows(having)
        for number in range(6):
            headers = {"x-session-id": str(number)}
            answer = await client.post("/v1/embeddings", json={"input": "x"}, headers=headers)
            assert answer.status_code == 200, answer.text
        having.tell(state=FleetState.CLOSED, reason="in maintenance", engine="reference")
        alone = await client.post("/v1/embeddings", json={"input": "x"})
    assert (alone.status_code, alone.json()["reason"]) == (501, "no_dialect")
    assert "no replica's server has /v1/embeddings" in alone.json()["detail"]


async def test_a_route_that_no_engine_has_is_said_to_be_none() -> None:
    server = Server(lambda *_: JSONResponse({}))
    async with asking(server, probe=60.0) as client:
        knows(server, "reference")
        answer = await client.post("/tokenize", json={"prompt": "x"})
        stored = await client.get("/v1/responses/resp_1")
    assert (answer.status_code, answer.json()["reason"]) == (501, "no_dialect")
    assert "engines of reference" in answer.json()["detail"]
    assert (stored.status_code, stored.json()["reason"]) == (404, "no_route")


async def test_a_model_that_a_server_does_not_have_is_its_own_refusal() -> None:
    def behave(_number: int, _body: dict[str, Any]) -> Response:
        return JSONResponse({"error": {"message": "The model `x` does not exist.", "code": 404}}, 404)

    server = Server(behave)
    async with asking(server, probe=60.0) as client:
        knows(server)
        answer = await client.post("/v1/embeddings", json={"model": "x", "input": "y"})
    assert (answer.status_code, answer.json()["reason"]) == (404, "engine_refused")
    assert "The model `x` does not exist" in answer.json()["detail"]


async def test_one_model_is_told_from_the_list() -> None:
    async with asking(Server(lambda *_: JSONResponse({}))) as client:
        found = await client.get("/v1/models/org/tiny")
        missing = await client.get("/v1/models/tiny")
    assert (found.status_code, found.json()) == (200, {"id": "org/tiny", "object": "model"})
    assert (missing.status_code, missing.json()["reason"]) == (404, "no_model")
    assert missing.json()["detail"] == "there is no model 'tiny'; there are org/tiny"


async def test_a_response_names_its_version() -> None:
    server = Server(lambda *_: JSONResponse(response(), headers=HEADERS))
    async with asking(server, probe=60.0) as client:
        knows(server)
        answer = await client.post("/v1/responses", json={"input": "Call me", "weight_version": {}})
    content = answer.json()
    assert {name: content[name] for name in response()} == response()
    assert (content["ckpt_engine"]["min_version"], content["ckpt_engine"]["max_version"]) == (4, 4)
    assert (content["weight_version_start"], content["weight_version_end"]) == (4, 4)


async def test_a_stream_of_a_response_keeps_its_names() -> None:
    server = Server(lambda *_: streaming())
    async with asking(server, probe=60.0) as client:
        knows(server)
        answer = await client.post("/v1/responses", json={"input": "Call me", "stream": True})
    events = events_of(answer)
    assert "[DONE]" not in answer.text
    assert [name for name, _ in events] == [content["type"] for _, content in events]
    assert "".join(content.get("delta", "") for _, content in events) == "Ishmael"
    assert events[-1][1]["response"]["ckpt_engine"]["max_version"] == 4


async def test_a_stream_of_a_response_that_breaks_ends_with_the_reason() -> None:
    server = Server(lambda *_: streaming(last=False))
    async with asking(server, probe=60.0) as client:
        knows(server)
        answer = await client.post("/v1/responses", json={"input": "Call me", "stream": True})
    *first, (name, error) = events_of(answer)
    assert "".join(content.get("delta", "") for _, content in first) == "Ishmael"
    assert (name, error["error"]["reason"]) == ("", "not_resumable")


async def test_a_response_that_waited_for_an_update_is_whole() -> None:
    """The gate kept it until the version was there that the update brought."""
    server = Server(lambda *_: JSONResponse(response(), headers=HEADERS))
    async with asking(server, probe=60.0) as client:
        server.tell(engine="vllm", mode="abort", next=GatewayVersion(4), state=FleetState.DRAINING)
        answer = await client.post("/v1/responses", json={"input": "Call me"})
    assert (answer.status_code, len(server.asked)) == (200, 1)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_response_during_an_update_that_ends_requests_is_not_taken_for_whole(stream: bool) -> None:
    """Its engine calls it completed all the same."""

    def behave(number: int, _body: dict[str, Any]) -> Response:
        if number == 0:
            server.tell(engine="vllm", mode="abort", next=GatewayVersion(5), state=FleetState.DRAINING)
            server.tell(engine="vllm", mode="", next=None, state=FleetState.SERVING)
        return streaming() if stream else JSONResponse(response(), headers=HEADERS)

    server = Server(behave)
    async with asking(server, probe=60.0) as client:
        knows(server)
        answer = await client.post("/v1/responses", json={"input": "Call me", "stream": stream})
    if stream and len(server.asked) == 1:  # its first events came before the last
        events = events_of(answer)
        assert "response.completed" not in dict(events)
        assert events[-1][1]["error"]["reason"] == "not_resumable"
    else:
        assert (answer.status_code, len(server.asked)) == (200, 2)
        assert (events_of(answer)[-1][1]["response"] if stream else answer.json())["status"] == "completed"
