"""SGLang's gate around a small application in the place of SGLang's; real servers run behind it in tests/engines."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from ckpt_engine.engine.adapter import AdapterSettings, EngineInfo
from ckpt_engine.gate.directory import TOKEN_HEADER, EngineDirectory
from ckpt_engine.v1 import manager_pb2
from ckpt_engine_adapters.sglang import driver
from ckpt_engine_adapters.sglang.command import LOADER
from ckpt_engine_adapters.sglang.gate import RELEASE_ROUTE, RESUME_ROUTE, STATE_ROUTE, SglangGate
from tests.gate.server import serve


def application(asked: list[Any], status: int = 200) -> FastAPI:
    """Notes what reaches it, and answers `status`."""
    app = FastAPI()

    @app.post("/{path:path}")
    async def note(path: str, request: Request) -> JSONResponse:
        asked.append((path, await request.body(), request.headers.get("authorization")))
        return JSONResponse(None, status)

    app.add_middleware(SglangGate)
    return app


async def ask(app: FastAPI, token: str, route: str, method: str = "POST", **body: Any) -> httpx.Response:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://engine") as client:
        return await client.request(method, route, json=body, headers={TOKEN_HEADER: token})


async def test_only_memory_that_is_there_is_given_up(directory: EngineDirectory) -> None:
    asked: list[Any] = []
    app = application(asked)
    for tags in (["kv_cache"], ["kv_cache", "weights"], ["weights"]):
        assert (await ask(app, directory.token(), RELEASE_ROUTE, tags=tags)).status_code == 200
    assert [body for _, body, _ in asked] == [b'{"tags": ["kv_cache"]}', b'{"tags": ["weights"]}']
    asked.clear()
    assert (await ask(app, directory.token(), RESUME_ROUTE)).status_code == 200
    assert (await ask(app, directory.token(), RESUME_ROUTE)).status_code == 200
    assert [body for _, body, _ in asked] == [b'{"tags": ["kv_cache", "weights"]}']


async def test_what_sglang_refuses_has_not_happened(directory: EngineDirectory) -> None:
    app = application([], status=400)
    for route in (RELEASE_ROUTE, "/pause_generation"):
        assert (await ask(app, directory.token(), route)).status_code == 400
    state = (await ask(app, directory.token(), STATE_ROUTE, "GET")).json()
    assert (state["paused"], state["released"]) == (False, [])


async def test_it_knows_of_the_pause(directory: EngineDirectory) -> None:
    app = application([])
    for route, paused in (("/pause_generation", True), ("/continue_generation", False)):
        await ask(app, directory.token(), route)
        assert (await ask(app, directory.token(), STATE_ROUTE, "GET")).json()["paused"] is paused


async def test_the_agent_needs_no_key_of_the_server(directory: EngineDirectory) -> None:
    """The token stands for it; who has none is refused before."""
    asked: list[Any] = []
    app: Any = application(asked)

    @app.get("/server_info")
    async def users(request: Request) -> None:
        asked.append(("", b"", request.headers.get("authorization")))

    async def admins(request: Request) -> None:
        asked.append(("", b"", request.headers.get("authorization")))

    admins._auth_level = "admin_optional"  # type: ignore[attr-defined]
    app.add_api_route("/flush_cache", admins, methods=["PUT"])
    app.server_args = SimpleNamespace(api_key="for users", admin_api_key="for admins")
    assert (await ask(app, directory.token(), "/server_info", "GET")).status_code == 200
    assert (await ask(app, directory.token(), "/flush_cache", "PUT")).status_code == 200
    app.server_args = SimpleNamespace(api_key="for users", admin_api_key=None)
    assert (await ask(app, directory.token(), "/flush_cache", "PUT")).status_code == 200
    assert [key for _, _, key in asked] == ["Bearer for users", "Bearer for admins", "Bearer for users"]
    for route in (STATE_ROUTE, RELEASE_ROUTE, "/update_weights_from_disk", "/hicache/storage-backend/clear"):
        assert (await ask(app, "guessed", route)).status_code == 403
    assert len(asked) == 3


async def test_it_generates_nothing_without_weights(directory: EngineDirectory) -> None:
    asked: list[Any] = []
    for route in ("/generate", "/v1/chat/completions", "/health_generate", "/ready", "/model_info"):
        assert (await ask(application(asked), "guessed", route)).status_code == 503
    assert asked == []
    await ask(application(asked), directory.token(), "/generate")
    assert len(asked) == 1, "its agent may ask, for the check before the first update"


@pytest.mark.parametrize("path", ["/health", "/root/health"])
async def test_the_health_route_reaches_sglang_under_its_plain_path(directory: EngineDirectory, path: str) -> None:
    """Under another one SGLang computes a token for the answer, and fails while it is paused."""
    app = FastAPI(root_path="/root")

    @app.get("/health")
    async def health(request: Request) -> str:
        return request.url.path

    app.add_middleware(SglangGate)
    answer = await ask(app, "nobody", path, "GET")
    assert (answer.status_code, answer.json()) == (200, "/health")


@pytest.mark.parametrize("reason", ["", "it caches under no key"])
def test_the_driver_learns_whether_the_server_can_be_updated_in_place(directory: EngineDirectory, reason: str) -> None:
    app = FastAPI()
    info = {"version": "0.5.23", "custom_weight_loader": [LOADER], "tp_size": 1, "pp_size": 1}
    for route in driver._NEEDED:
        app.add_api_route(route, lambda: info)
    app.add_middleware(SglangGate, in_place=reason)

    async def probe(url: str) -> EngineInfo:
        adapter = driver.create_adapter(AdapterSettings(url, directory.path, directory.token()))
        try:
            return await adapter.probe(60)
        finally:
            await adapter.close()

    with serve(app) as url:
        found = asyncio.run(probe(url))
    assert found.supported, found.reason
    assert found.refused_modes == ({manager_pb2.PAUSE_MODE_IN_PLACE: reason} if reason else {})
