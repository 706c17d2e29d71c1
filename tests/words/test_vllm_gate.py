"""vLLM's gate pauses and installs by itself. Its engine client is a fake here, which notes what it is asked for, in
order; real servers are updated this way in tests/engines and tests/gpu."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from ckpt_engine.words.directory import ENVIRONMENT, TOKEN_HEADER, EngineDirectory
from ckpt_engine.words.state import EnginePage
from ckpt_engine_adapters.vllm.command import check_options, options_of
from ckpt_engine_adapters.vllm.gate import ABILITIES_ROUTE, INSTALL_ROUTE, PAUSE_ROUTE, VllmGate


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EngineDirectory:
    directory = EngineDirectory.create(tmp_path)
    monkeypatch.setenv(ENVIRONMENT, str(directory.path))
    EnginePage(directory.page).close()
    return directory


def application(asked: list[Any], refused: Sequence[str] = ()) -> FastAPI:
    """refused: workers' methods that fail."""

    async def clear() -> None:
        asked.append("clear")

    async def stop(**options: Any) -> None:
        asked.append(options)

    async def call(method: str, **options: Any) -> None:
        asked.append((method, options.get("kwargs")))
        if method in refused:
            raise RuntimeError(f"no {method} today")

    app = FastAPI()
    app.state.engine_client = SimpleNamespace(
        renderer=SimpleNamespace(clear_mm_cache_async=clear),
        engine_core=SimpleNamespace(pause_scheduler_async=stop),
        collective_rpc=call,
    )
    app.add_middleware(VllmGate)
    return app


async def ask(app: FastAPI, token: str, route: str = PAUSE_ROUTE, **params: str) -> httpx.Response:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://engine") as client:
        return await client.post(route, params=params, headers={TOKEN_HEADER: token})


async def test_the_scheduler_is_paused_as_vllm_pauses_it(directory: EngineDirectory) -> None:
    asked: list[Any] = []
    app = application(asked)
    assert (await ask(app, directory.token(), mode="abort")).status_code == 200
    assert asked == ["clear", {"mode": "abort", "clear_cache": True}]
    asked.clear()
    assert (await ask(app, directory.token(), mode="keep", clear_cache="false")).status_code == 200
    assert asked == [{"mode": "keep", "clear_cache": False}]


BEGIN, END = ("start_weight_update", None), ("finish_weight_update", None)
UPDATE = ("update_weights", {"update_info": {"epoch": 7}})


@pytest.mark.parametrize(
    ("refused", "status", "says"),
    [
        ([], 200, ""),
        (["start_weight_update"], 200, ""),  # left open by an agent that died
        (["update_weights"], 500, "RuntimeError: no update_weights today"),
        (["update_weights", "finish_weight_update"], 500, "RuntimeError: no update_weights today"),
        (["update_weights", "start_weight_update"], 500, "RuntimeError: no update_.*; RuntimeError: no start_.* today"),
        (["finish_weight_update"], 200, ""),  # nothing was open any more
    ],
)
async def test_an_update_is_three_calls_in_their_order_sent_at_once(
    directory: EngineDirectory, refused: list[str], status: int, says: str
) -> None:
    asked: list[Any] = []
    answer = await ask(application(asked, refused), directory.token(), INSTALL_ROUTE, epoch="7")
    assert (answer.status_code, asked) == (status, [BEGIN, UPDATE, END])
    assert status == 200 or re.fullmatch(says, answer.json()["detail"])


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


@pytest.mark.parametrize("route", [PAUSE_ROUTE, INSTALL_ROUTE])
async def test_only_for_the_agent(directory: EngineDirectory, route: str) -> None:
    asked: list[Any] = []
    assert (await ask(application(asked), "guessed", route, mode="keep", epoch="7")).status_code == 403
    assert not asked


@pytest.mark.parametrize("route", [PAUSE_ROUTE, INSTALL_ROUTE])
async def test_a_vllm_that_keeps_its_scheduler_elsewhere_is_told_of(directory: EngineDirectory, route: str) -> None:
    """The driver then takes vLLM's own routes."""
    app = application([])
    app.state.engine_client = SimpleNamespace()
    assert (await ask(app, directory.token(), route, mode="keep", epoch="7")).status_code == 404


@pytest.mark.parametrize(
    ("enabled", "device", "sleeps"), [(True, "cuda", True), (False, "cuda", False), (False, "cpu", True)]
)
async def test_a_server_without_sleep_mode_says_so(
    directory: EngineDirectory, enabled: bool, device: str, sleeps: bool
) -> None:
    """Its own `/sleep` would answer 200 and give nothing up."""
    app = application([])
    assert (await ask(app, directory.token(), ABILITIES_ROUTE)).json() == {"sleeps": None}
    app.state.engine_client.vllm_config = SimpleNamespace(
        model_config=SimpleNamespace(enable_sleep_mode=enabled), device_config=SimpleNamespace(device_type=device)
    )
    assert (await ask(app, directory.token(), ABILITIES_ROUTE)).json() == {"sleeps": sleeps}
    assert (await ask(app, "guessed", ABILITIES_ROUTE)).status_code == 403
