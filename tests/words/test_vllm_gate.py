"""vLLM's gate pauses by itself. Its engine client is a fake here, which notes what it is asked to do in which order;
real servers are paused this way in tests/engines and tests/gpu."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from ckpt_engine.words.directory import ENVIRONMENT, TOKEN_HEADER, EngineDirectory
from ckpt_engine.words.state import EnginePage
from ckpt_engine_adapters.vllm.command import check_options, options_of
from ckpt_engine_adapters.vllm.gate import PAUSE_ROUTE, VllmGate


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EngineDirectory:
    directory = EngineDirectory.create(tmp_path)
    monkeypatch.setenv(ENVIRONMENT, str(directory.path))
    EnginePage(directory.page).close()
    return directory


def application(asked: list[Any]) -> FastAPI:
    async def clear() -> None:
        asked.append("clear")

    async def stop(**options: Any) -> None:
        asked.append(options)

    app = FastAPI()
    app.state.engine_client = SimpleNamespace(
        renderer=SimpleNamespace(clear_mm_cache_async=clear),
        engine_core=SimpleNamespace(pause_scheduler_async=stop),
    )
    app.add_middleware(VllmGate)
    return app


async def ask(app: FastAPI, token: str, **params: str) -> httpx.Response:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://engine") as client:
        return await client.post(PAUSE_ROUTE, params=params, headers={TOKEN_HEADER: token})


async def test_the_scheduler_is_paused_as_vllm_pauses_it(directory: EngineDirectory) -> None:
    asked: list[Any] = []
    app = application(asked)
    assert (await ask(app, directory.token(), mode="abort")).status_code == 200
    assert asked == ["clear", {"mode": "abort", "clear_cache": True}]
    asked.clear()
    assert (await ask(app, directory.token(), mode="keep", clear_cache="false")).status_code == 200
    assert asked == [{"mode": "keep", "clear_cache": False}]


@pytest.mark.parametrize(
    ("command", "environment", "named"),
    [
        (["serve", "--grpc"], {}, "--grpc "),
        (["serve", "--grpc-port=50051"], {}, "--grpc-port"),
        (["serve"], {"VLLM_USE_RUST_FRONTEND": "1"}, "VLLM_USE_RUST_FRONTEND=1"),
    ],
)
def test_a_server_that_would_answer_beside_the_gate_is_refused(
    command: list[str], environment: dict[str, str], named: str
) -> None:
    with pytest.raises(ValueError, match=f"{named}.*the gate does not see"):
        check_options(options_of(command), environment)
    check_options(options_of(["serve", "--port", "1"]), {"VLLM_USE_RUST_FRONTEND": "0"})


async def test_only_for_the_agent(directory: EngineDirectory) -> None:
    asked: list[Any] = []
    assert (await ask(application(asked), "guessed", mode="keep")).status_code == 403
    assert not asked


async def test_a_vllm_that_keeps_its_scheduler_elsewhere_is_told_of(directory: EngineDirectory) -> None:
    """The driver then takes vLLM's own route."""
    app = application([])
    app.state.engine_client = SimpleNamespace()
    assert (await ask(app, directory.token(), mode="keep")).status_code == 404
