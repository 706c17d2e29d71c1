"""prime-rl's admin address: requests as its orchestrator sends them (prime-rl 0.8, `prime_rl/utils/client.py`).

Its package is not on the index that we install from, so its own function is not called here.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import torch
from plain_replica import PlainReplica
from safetensors.torch import save_file
from trainer_world import manager_config

from ckpt_engine.integrations.prime_rl import Facade, PrimeRlSettings, Steps, step_of
from ckpt_engine.manager.service import running_manager
from ckpt_engine.security.grants import Tokens, digest_of
from ckpt_engine.v1 import manager_pb2
from tests.cluster import eventually
from tests.ports import free_address

SERVERS = 3


@pytest.fixture
def manager(root: Path, tmp_path: Path) -> Iterator[str]:
    config = replace(manager_config(tmp_path / "ledger.sqlite3"), directories=(root,))
    with running_manager(config) as address:
        yield address


@pytest.fixture
def served(manager: str) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Its URL, and the process."""
    address = free_address()
    command = [sys.executable, "-m", "ckpt_engine", "prime-rl", "--manager", manager, "--listen", address]
    process = subprocess.Popen([*command, "--lineage", "run", "--model", "tiny"])
    try:
        yield f"http://{address}/v1", process
        process.terminate()
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait(60)


@pytest.fixture
def facade(served: tuple[str, subprocess.Popen[bytes]]) -> str:
    return served[0]


def health(facade: str) -> int:
    """0: it does not listen yet."""
    try:
        return httpx.get(f"{facade.removesuffix('/v1')}/health", trust_env=False).status_code
    except httpx.TransportError:
        return 0


def broadcast(root: Path, step: int) -> Path:
    """What its trainer writes, and the mark that its orchestrator leaves in it."""
    path = root / f"step_{step}"
    path.mkdir(exist_ok=True)
    save_file({"weight": torch.full((4, 3), float(step))}, path / "model.safetensors")
    (path / "STABLE").touch()
    return path


async def update(servers: list[httpx.AsyncClient], weight_dir: Path) -> list[httpx.Response]:
    """One weight update of the orchestrator: each step at all servers at once."""
    pause = {"mode": "keep", "clear_cache": "false"}
    for answer in await asyncio.gather(*(server.post("/pause", params=pause) for server in servers)):
        answer.raise_for_status()
    (weight_dir / "NCCL_READY").touch()
    body = {"weight_dir": weight_dir.as_posix()}
    answers = await asyncio.gather(*(server.post("/update_weights", json=body) for server in servers))
    for answer in await asyncio.gather(*(server.post("/resume") for server in servers)):
        answer.raise_for_status()
    return answers


def admin_client(base_url: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=base_url.rstrip("/").removesuffix("/v1"), timeout=120, trust_env=False)


@pytest.mark.slow
async def test_an_update_of_all_servers_is_one_update(
    facade: str, root: Path, replica: Callable[..., PlainReplica]
) -> None:
    servers = [admin_client(facade) for _ in range(SERVERS)]

    await asyncio.to_thread(eventually, "the facade listens", 60, lambda: health(facade) == 503)
    one = replica("one")
    await asyncio.to_thread(eventually, "a replica is there", 60, lambda: health(facade) == 200)
    models = (await servers[0].get("/v1/models")).json()["data"]
    assert [model["id"] for model in models] == ["tiny"]

    for answer in await update(servers, broadcast(root, 1)):
        assert (answer.status_code, answer.json()["version"]) == (200, 1), answer.text
    assert len(one.installs) == 1, "each server was posted to"
    assert one.installs[0].pause_mode == manager_pb2.PAUSE_MODE_IN_PLACE
    await update(servers, broadcast(root, 2))
    assert one.weights["weight"].tolist() == [[2.0] * 3] * 4
    assert one.identity is not None
    assert (one.identity.lineage, one.identity.version) == ("run", 2)

    gone = await update(servers, root)
    assert {answer.status_code for answer in gone} == {404}, "prime-rl does not repeat what cannot help"
    assert "holds no safetensors files" in gone[0].json()["error"]["message"]
    again = broadcast(root, 1)  # the run died, and started again from its checkpoint of step 0
    assert {answer.status_code for answer in await update(servers, again)} == {200}
    assert (one.identity.lineage, one.identity.version) == ("run-2", 1)
    for server in servers:
        await server.aclose()


async def test_what_it_does_not_do_is_refused_by_name() -> None:
    grants = Tokens.parse(f"trainer/run {digest_of('t' * 24).hex()}\nviewer {digest_of('v' * 24).hex()}\n")
    application = Facade(PrimeRlSettings(manager="127.0.0.1:1", tokens=grants)).application()
    transport = httpx.ASGITransport(application)
    async with httpx.AsyncClient(transport=transport, base_url="http://facade") as client:
        client.headers["authorization"] = f"Bearer {'t' * 24}"
        for path, body, words in (
            ("/load_lora_adapter", {"lora_name": "a", "lora_path": "/a"}, "adapters are not loaded here"),
            ("/v1/unload_lora_adapter", {"lora_name": "a"}, "adapters are not loaded here"),
            ("/init_broadcaster", {"host": "h"}, "by way of a directory"),
            ("/update_weights", {"weight_dir": None}, "over NCCL"),
            ("/update_weights", ["weight_dir"], "the body must be"),
            ("/pause?mode=drain", None, "modes are keep, abort and wait"),
        ):
            answer = await client.post(path, json=body)
            assert (answer.status_code, words in answer.text) == (400, True), answer.text
        for path in ("/health", "/liveness"):
            assert (await client.get(path, headers={"authorization": ""})).status_code == 503, "probes have no token"
        for shown, status in ((None, 401), ("x" * 24, 401), ("v" * 24, 403)):
            client.headers["authorization"] = f"Bearer {shown}" if shown else ""
            assert (await client.post("/pause", params={"mode": "keep"})).status_code == status


async def test_a_page_in_a_browser_gets_nothing() -> None:
    application = Facade(PrimeRlSettings(manager="127.0.0.1:1", loopback=True)).application()
    transport = httpx.ASGITransport(application)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost:8100") as client:
        for path, asked, status, words in (
            ("/pause", {}, 200, "paused"),
            ("/pause", {"headers": {"origin": "http://page.example"}}, 403, "no page may ask"),
            ("/resume", {"headers": {"origin": "null"}}, 403, "no page may ask"),
            ("/resume", {"headers": {"host": "page.example:8100"}}, 403, "this is not 'page.example:8100'"),
            ("/update_weights", {"content": '{"weight_dir": "/c"}'}, 400, "application/json"),
            ("/update_weights", {"data": {"weight_dir": "/c"}}, 400, "application/json"),
            ("/update_weights", {"json": {"weight_dir": "/c"}}, 503, "127.0.0.1:1"),
        ):
            answer = await client.post(path, **asked)  # type: ignore[arg-type]
            assert (answer.status_code, words in answer.text) == (status, True), (path, asked, answer.text)


@pytest.mark.slow
async def test_it_ends_when_it_is_told_to_although_an_update_goes_on(
    served: tuple[str, subprocess.Popen[bytes]], root: Path, replica: Callable[..., PlainReplica]
) -> None:
    """The replica holds the update up until the process has ended."""
    facade, process = served
    one = replica("one")
    held, ended = threading.Event(), threading.Event()

    def hold() -> None:
        held.set()
        ended.wait(120)

    one.before_preparing = hold
    async with admin_client(facade) as server:
        await asyncio.to_thread(eventually, "it listens", 60, lambda: health(facade) == 200)
        asking = asyncio.ensure_future(server.post("/update_weights", json={"weight_dir": str(broadcast(root, 1))}))
        assert await asyncio.to_thread(held.wait, 60)
        try:
            process.terminate()
            assert await asyncio.to_thread(process.wait, 30) == 0
        finally:
            ended.set()
        with pytest.raises(httpx.HTTPError):
            (await asking).raise_for_status()


def test_a_step_that_does_not_rise_is_of_another_run() -> None:
    assert [step_of(path) for path in ("/out/broadcasts/step_12", "/c/step_3/weight", "/base/my_step_9", "/x")] == [
        12,
        3,
        None,
        None,
    ]
    steps = Steps("run")
    assert steps.of("/b/step_1") == ("run", 1)
    assert steps.of("/b/step_7") == ("run", 7)
    assert steps.of("/b/step_7") == ("run", 7)
    assert steps.of("/c/step_5/weight") == ("run-2", 5)
    assert steps.of("/b/step_6") == ("run-2", 6)
    assert steps.of("/base") == ("run-2", None)
