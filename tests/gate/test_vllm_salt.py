"""vLLM's requests are salted where its API server sends them to the core. The client of the core is a fake that notes
them; real servers do it in tests/engines/test_salted_prefixes.py."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from ckpt_engine.engine.adapter import OLD_GATE, AdapterSettings, EngineInfo
from ckpt_engine.gate.directory import EngineDirectory
from ckpt_engine.gate.page import EnginePage
from ckpt_engine.gate.salt import CacheSalt
from ckpt_engine.v1 import manager_pb2
from ckpt_engine_adapters.vllm.connectors import connectors, in_place_refusal
from ckpt_engine_adapters.vllm.core_requests import ELSEWHERE
from ckpt_engine_adapters.vllm.driver import VllmAdapter
from ckpt_engine_adapters.vllm.gate import VllmGate
from tests.gate.server import serve

IN_PLACE, KEEP = manager_pb2.PAUSE_MODE_IN_PLACE, manager_pb2.PAUSE_MODE_KEEP


@dataclass
class Feature:
    """A picture, as vLLM's MultiModalFeatureSpec."""

    identifier: str
    mm_hash: str | None = None


@dataclass
class Request:
    """vLLM's EngineCoreRequest, as far as it matters."""

    cache_salt: str | None = None
    mm_features: list[Feature] = field(default_factory=list)


def application(sent: list[Request], **engine: Any) -> FastAPI:
    """Its `/v1/completions` sends a request of three samples to the core."""

    async def send(request: Request) -> None:
        sent.append(request)

    core = SimpleNamespace(add_request_async=send)
    app = FastAPI()
    app.state.engine_client = SimpleNamespace(**{"engine_core": core, **engine})

    @app.get("/health")
    async def health() -> None:
        pictures = [Feature("lora:cat", "cat"), Feature("dog")]
        for _ in range(3):
            await core.add_request_async(Request("mine", pictures))

    app.add_middleware(VllmGate)
    return app


async def visit(app: FastAPI) -> None:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://engine") as client:
        assert (await client.get("/health")).status_code == 200


async def test_every_request_to_the_core_is_salted_once(directory: EngineDirectory) -> None:
    """From the first one on, however many visits there were: a salted salt would separate requests that share."""
    sent: list[Request] = []
    app, page = application(sent), EnginePage(directory.page)
    await visit(app)
    assert {each.cache_salt for each in sent} == {"mine"}
    page.keep_caches()
    salt = CacheSalt(page).of("mine")
    for _ in range(2):
        sent.clear()
        await visit(app)
        assert [each.cache_salt for each in sent] == [salt] * 3
        for each in sent:
            assert [(one.identifier, one.mm_hash) for one in each.mm_features] == [
                (f"{salt}:lora:cat", "cat"),
                ("dog", None),
            ]


def settings(connector: str, module: str | None = None, **extra: Any) -> SimpleNamespace:
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            kv_connector=connector, kv_connector_module_path=module, kv_connector_extra_config=extra
        )
    )


def part(name: str, module: str | None = None) -> dict[str, str | None]:
    return {"kv_connector": name, "kv_connector_module_path": module}


KNOWN, UNKNOWN = part("OffloadingConnector"), part("NixlConnector")
MINE = part("OffloadingConnector", "my.module")


@pytest.mark.parametrize(
    ("config", "refused"),
    [
        (SimpleNamespace(), ""),
        (SimpleNamespace(kv_transfer_config=None), ""),
        (settings("OffloadingConnector"), ""),
        (settings("LMCacheMPConnector"), ""),
        (settings("MooncakeStoreConnector"), ""),
        (settings("SimpleCPUOffloadConnector"), ""),
        (settings("LMCacheConnectorV1"), "LMCacheConnectorV1"),
        (settings("NixlConnector"), "NixlConnector"),
        (settings("OffloadingConnector", "my.module"), "my.module.OffloadingConnector"),
        (settings("MultiConnector", connectors=[KNOWN, KNOWN]), ""),
        (settings("MultiConnector", connectors=[KNOWN, UNKNOWN, MINE]), "NixlConnector, my.module.OffloadingConnector"),
        (settings("MultiConnector"), "MultiConnector"),
    ],
)
def test_connectors_that_may_find_blocks_without_the_salt_are_named(config: SimpleNamespace, refused: str) -> None:
    reason = in_place_refusal(connectors(config))
    assert bool(reason) == bool(refused)
    assert not refused or reason.startswith(f"its --kv-transfer-config has {refused}, which is not known")
    assert not refused or reason.endswith("OffloadingConnector or SimpleCPUOffloadConnector")


@pytest.mark.parametrize(
    ("engine", "refused", "stores"),
    [
        ({}, "", False),
        ({"vllm_config": settings("OffloadingConnector")}, "", True),
        ({"vllm_config": settings("NixlConnector")}, "its --kv-transfer-config has NixlConnector", True),
        ({"engine_core": SimpleNamespace()}, ELSEWHERE, False),
        ({"engine_core": None}, ELSEWHERE, False),
    ],
)
def test_the_driver_learns_what_the_gate_says(
    directory: EngineDirectory, engine: dict[str, Any], refused: str, stores: bool
) -> None:
    """With a store beside the engine's caches every update begins another salt: not all of them are emptied."""
    app = application([], **engine)
    answering(app)
    info, adapter = probed(app, directory)
    assert info.supported, info.reason
    assert bool(info.refused_modes) == bool(refused)
    assert info.refused_modes.get(IN_PLACE, "").startswith(refused)
    assert (adapter.keeps_caches(IN_PLACE), adapter.keeps_caches(KEEP)) == (True, stores)


def test_a_server_whose_gate_says_nothing_of_it_is_not_updated_in_place(directory: EngineDirectory) -> None:
    app = FastAPI()
    answering(app)
    info, _ = probed(app, directory)
    assert info.supported, info.reason
    assert info.refused_modes == {IN_PLACE: OLD_GATE}


def answering(app: FastAPI) -> None:
    """With the routes by which a driver judges a vLLM server."""
    routes = ["/pause", "/resume", "/init_weight_transfer_engine", "/start_weight_update", "/update_weights"]
    answers: dict[str, Any] = dict.fromkeys([*routes, "/finish_weight_update"])
    answers |= {"/version": {"version": "0.32.0"}, "/get_world_size": {"world_size": 1}}
    answers["/is_paused"] = {"is_paused": False}
    for route, body in answers.items():
        app.add_api_route(route, answer(body))


def answer(body: Any) -> Callable[[], Any]:
    return lambda: body


def probed(app: FastAPI, directory: EngineDirectory) -> tuple[EngineInfo, VllmAdapter]:
    """What a driver learns of its server."""

    async def probe(url: str) -> tuple[EngineInfo, VllmAdapter]:
        adapter = VllmAdapter(AdapterSettings(url, directory.path, directory.token()))
        info = await adapter.probe(60)
        await adapter.close()
        return info, adapter

    with serve(app) as url:
        return asyncio.run(probe(url))
