"""vLLM's gate pauses, installs and resumes by itself. Its engine client is a fake here, which notes what it is asked
for, in order; real servers are updated this way in tests/engines and tests/gpu."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from ckpt_engine.core.labels import version_label
from ckpt_engine.core.sleeping import KV_CACHE, Sleeping
from ckpt_engine.engine.adapter import AdapterSettings
from ckpt_engine.gate.asgi import Receive, Scope, Send
from ckpt_engine.gate.directory import TOKEN_HEADER, EngineDirectory
from ckpt_engine.gate.page import EngineMark, EnginePage, WorkerSlot
from ckpt_engine.v1 import manager_pb2, weights_pb2
from ckpt_engine_adapters.vllm.command import check_options, options_of
from ckpt_engine_adapters.vllm.driver import VllmAdapter, launch_plan
from ckpt_engine_adapters.vllm.gate import ABILITIES_ROUTE, INSTALL_ROUTE, PAUSE_ROUTE, VllmGate
from tests.gate.server import serve

IDENTITY = weights_pb2.Identity(lineage="run", version=7, root=bytes(32))
LABEL = version_label(IDENTITY)


@pytest.fixture
def page(directory: EngineDirectory) -> Iterator[EnginePage]:
    page = EnginePage(directory.page)
    yield page
    page.close()


def application(
    asked: list[Any], refused: Sequence[str] = (), install: Callable[[], None] | None = None, labels: bool = True
) -> FastAPI:
    """refused: what fails, of workers' methods, "label" and "resume". install: what the workers do."""

    async def clear() -> None:
        asked.append("clear")

    async def stop(**options: Any) -> None:
        asked.append(options)

    async def call(method: str, **options: Any) -> None:
        asked.append((method, options.get("kwargs")))
        if method in refused:
            raise RuntimeError(f"no {method} today")
        if method == "update_weights" and install is not None:
            install()

    async def label(version: str) -> None:
        asked.append(version)
        if "label" in refused:
            raise RuntimeError("no label today")

    async def resume() -> None:
        asked.append("resume")
        if "resume" in refused:
            raise RuntimeError("no resuming today")

    app = FastAPI()
    app.state.engine_client = SimpleNamespace(
        renderer=SimpleNamespace(clear_mm_cache_async=clear),
        engine_core=SimpleNamespace(pause_scheduler_async=stop),
        collective_rpc=call,
        resume_generation=resume,
        **({"update_weight_version": label} if labels else {}),
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


@pytest.mark.parametrize("then", ["label", "resume"])
@pytest.mark.parametrize("labels", [True, False])
async def test_vllm_is_resumed_once_its_weights_are_whole_and_after_its_label(
    directory: EngineDirectory, page: EnginePage, then: str, labels: bool
) -> None:
    slot = page.claim(0, 1)
    asked: list[Any] = []
    app = application(asked, install=lambda: slot.clean(7, IDENTITY), labels=labels)
    answer = await ask(app, directory.token(), INSTALL_ROUTE, epoch="7", then=then)
    expected = {"resume": ["resume"], "label": [LABEL, "resume"] if labels else []}[then]
    assert answer.json() == {"status": "installed", "resumed_as": LABEL if expected else None}
    assert asked == [BEGIN, UPDATE, END, *expected]


def _asleep(page: EnginePage) -> None:
    page.mark(EngineMark(sleeping=Sleeping(1, frozenset({KV_CACHE}))))


@pytest.mark.parametrize(
    ("world_size", "before", "install"),
    [
        (1, lambda page, slot: None, lambda slot: slot.dirty(7)),
        (1, lambda page, slot: None, lambda slot: None),
        (1, lambda page, slot: slot.clean(6, IDENTITY), lambda slot: None),  # nothing was installed
        (2, lambda page, slot: None, lambda slot: slot.clean(7, IDENTITY)),  # the other worker has not started
        (1, lambda page, slot: _asleep(page), lambda slot: slot.clean(7, IDENTITY)),
    ],
    ids=["torn", "never installed", "of an earlier epoch", "one of two workers", "caches asleep"],
)
async def test_vllm_stays_paused_unless_all_words_are_whole_by_this_epoch_and_it_is_awake(
    directory: EngineDirectory,
    page: EnginePage,
    world_size: int,
    before: Callable[[EnginePage, WorkerSlot], None],
    install: Callable[[WorkerSlot], None],
) -> None:
    slot = page.claim(0, world_size)
    before(page, slot)
    asked: list[Any] = []
    app = application(asked, install=lambda: install(slot))
    answer = await ask(app, directory.token(), INSTALL_ROUTE, epoch="7", then="label")
    assert answer.json() == {"status": "installed", "resumed_as": None}
    assert asked == [BEGIN, UPDATE, END]


@pytest.mark.parametrize(("refused", "asked_for"), [("label", [LABEL]), ("resume", [LABEL, "resume"])])
async def test_a_label_that_vllm_does_not_take_leaves_resuming_to_the_agent(
    directory: EngineDirectory, page: EnginePage, refused: str, asked_for: list[str]
) -> None:
    slot = page.claim(0, 1)
    asked: list[Any] = []
    app = application(asked, [refused], lambda: slot.clean(7, IDENTITY))
    answer = await ask(app, directory.token(), INSTALL_ROUTE, epoch="7", then="label")
    assert (answer.status_code, answer.json()["resumed_as"]) == (200, None)
    assert asked == [BEGIN, UPDATE, END, *asked_for]


async def test_a_failed_update_resumes_nothing(directory: EngineDirectory, page: EnginePage) -> None:
    page.claim(0, 1).clean(7, IDENTITY)
    asked: list[Any] = []
    app = application(asked, ["update_weights"])
    assert (await ask(app, directory.token(), INSTALL_ROUTE, epoch="7", then="label")).status_code == 500
    assert asked == [BEGIN, UPDATE, END]


OWN_ROUTES = ("/pause", "/start_weight_update", "/update_weights", "/finish_weight_update")
LAST_ROUTES = ("/update_weight_version", "/resume")


@pytest.mark.parametrize("gate", ["this one", "this one, torn", "an older one"])
async def test_an_update_asks_the_engine_twice_if_all_goes_well(
    directory: EngineDirectory, page: EnginePage, gate: str
) -> None:
    """Pause and install: tokens wait for each call. What the gate has not done the agent asks for."""
    slot, routes = page.claim(0, 1), list[str]()
    app = application([], install=lambda: slot.dirty(7) if "torn" in gate else slot.clean(7, IDENTITY))
    if gate == "an older one":
        app.state.engine_client = SimpleNamespace()

    async def own(body: dict[str, Any] | None = None) -> None:
        """vLLM's own route."""

    for route in (*OWN_ROUTES, *LAST_ROUTES):
        app.post(route)(own)

    async def counted(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            routes.append(scope["path"])
        await app(scope, receive, send)

    async def update(adapter: VllmAdapter) -> list[str]:
        routes.clear()
        await adapter.pause(manager_pb2.PAUSE_MODE_KEEP, 60)
        await adapter.install(7, 60)
        await adapter.stamp(IDENTITY, 60)
        await adapter.resume(60)
        return list(routes)

    with serve(counted) as url:
        adapter = VllmAdapter(AdapterSettings(url, directory.path, directory.token()))
        adapter._routes = frozenset((*OWN_ROUTES, *LAST_ROUTES))
        expected = {
            "this one": [PAUSE_ROUTE, INSTALL_ROUTE],
            "this one, torn": [PAUSE_ROUTE, INSTALL_ROUTE, *LAST_ROUTES],
            "an older one": [PAUSE_ROUTE, OWN_ROUTES[0], INSTALL_ROUTE, *OWN_ROUTES[1:], *LAST_ROUTES],
        }[gate]
        for _ in range(2):
            assert await update(adapter) == expected
        routes.clear()
        await adapter.stamp(IDENTITY, 60)
        await adapter.resume(60)
        await adapter.close()
    assert routes == list(LAST_ROUTES), "asked again, later, both are calls"


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
    with pytest.raises(ValueError, match=f"{named}.*the gate does not see; (leave it out|unset it)"):
        check_options(options_of(command), environment)
    check_options(options_of(["serve", "--port", "1"]), {"VLLM_USE_RUST_FRONTEND": "0"})


def test_a_store_of_what_encoders_made_is_refused() -> None:
    command = ["serve", "--ec-transfer-config", '{"ec_connector": "ECExampleConnector", "ec_role": "ec_both"}']
    with pytest.raises(ValueError, match=r"--ec-transfer-config [^;]*an older version made of them; leave it out"):
        check_options(options_of(command), {})


def test_a_variable_in_front_of_the_command_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    serves = ("vllm", "serve", "model")
    with pytest.raises(ValueError, match="VLLM_USE_RUST_FRONTEND=1 cannot be used"):
        launch_plan(["env", "A=1", "VLLM_USE_RUST_FRONTEND=1", *serves], 1, "")
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "1")
    with pytest.raises(ValueError, match=r"VLLM_USE_RUST_FRONTEND=1 cannot be used .*; unset it"):
        launch_plan(serves, 1, "")
    launch_plan(["env", "VLLM_USE_RUST_FRONTEND=0", *serves], 1, "")


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
    assert (await ask(app, directory.token(), ABILITIES_ROUTE)).json()["sleeps"] is None
    app.state.engine_client.vllm_config = SimpleNamespace(
        model_config=SimpleNamespace(enable_sleep_mode=enabled), device_config=SimpleNamespace(device_type=device)
    )
    assert (await ask(app, directory.token(), ABILITIES_ROUTE)).json()["sleeps"] is sleeps
    assert (await ask(app, "guessed", ABILITIES_ROUTE)).status_code == 403
