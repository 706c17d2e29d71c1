"""Who may have a directory published, over gRPC and HTTP, and what the command says: a manager with TLS and tokens."""

from __future__ import annotations

import asyncio
import json
import os
import ssl
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from manager_keys import Keys, calling
from safetensors.numpy import save_file
from scripted_members import refused

from ckpt_engine.core.problems import code_of
from ckpt_engine.manager.service import ManagerConfig, ManagerServer
from ckpt_engine.security.client import AUTHORITY, CERTIFICATE, KEY, TOKEN_FILE
from ckpt_engine.security.server import ServerSecurity
from ckpt_engine.v1 import manager_pb2

ROUTE = "/v1/updates/from-directory"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    path = tmp_path / "checkpoints" / "step_7"
    path.mkdir(parents=True)
    save_file({"weight": np.arange(12, dtype=np.float32)}, path / "model.safetensors")
    return path


@pytest.fixture
async def asking(config: ManagerConfig, keys: Keys, directory: Path) -> AsyncIterator[ManagerServer]:
    async with ManagerServer(replace(config, security=keys.asking, directories=(directory.parent,))) as server:
        yield server


async def in_parts() -> AsyncIterator[bytes]:
    """A body that is longer than allowed, and does not say how long."""
    for _ in range(9):
        yield b" " * 8192


async def test_it_wants_the_grant_of_its_lineage(asking: ManagerServer, keys: Keys, directory: Path) -> None:
    """Refused before a process is started."""
    ours: dict[str, Any] = {"directory": str(directory), "lineage": "run-1"}
    for role, body in (("viewer", ours), ("operator", ours), ("trainer", {**ours, "lineage": ""})):
        async with calling(asking, keys.with_token(role)) as stub:
            call = stub.UpdateFromDirectory(manager_pb2.UpdateFromDirectoryRequest(**body), timeout=60)
            assert code_of(await refused(call.read())) == "PERMISSION_DENIED", role
        async with keys.browser(asking, role) as client:
            assert (await client.post(ROUTE, json=body)).status_code == 403, role
    async with keys.browser(asking, "trainer") as client:
        text = {"content": json.dumps(ours), "headers": {"content-type": "text/plain"}}
        for given, status in ((text, 400), ({"json": {**ours, "version": -1}}, 400), ({"json": {**ours, "v": 1}}, 400)):
            answer = await client.post(ROUTE, **given)
            kind = answer.headers["content-type"]
            assert (answer.status_code, kind) == (status, "application/problem+json"), answer.text
        assert "has no field 'v'; UpdateFromDirectoryRequest has directory, lineage" in answer.json()["detail"]
        told = {"content-type": "application/json"}
        for many in ({"json": {**ours, "lineage": "p" * 70000}}, {"content": in_parts(), "headers": told}):
            answer = await client.post(ROUTE, **many)  # type: ignore[arg-type]
            assert (answer.status_code, "at most 65536 bytes" in answer.json()["detail"]) == (413, True), answer.text
        client.headers["authorization"] = "Bearer none"
        assert (await client.post(ROUTE, json=ours)).status_code == 401


async def test_a_certificate_alone_grants_nothing_over_http(config: ManagerConfig, keys: Keys, directory: Path) -> None:
    security = ServerSecurity(*keys.issue("server"), authority=keys.authority_file)
    certificate = keys.issue("client", "trainer/run-1")
    async with ManagerServer(replace(config, security=security, directories=(directory,))) as server:
        context = ssl.create_default_context(cafile=str(keys.authority_file))
        context.load_cert_chain(*certificate)
        async with httpx.AsyncClient(base_url=f"https://{server.http_address}", verify=context, trust_env=False) as one:
            assert (await one.get("/v1/replicas")).status_code == 200
            answer = await one.post(ROUTE, json={"directory": str(directory), "lineage": "run-1"})
            assert answer.status_code == 403
            assert "a certificate but no token over HTTP" in answer.json()["detail"]


@pytest.mark.slow
async def test_the_process_that_publishes_needs_no_token_of_its_own(
    asking: ManagerServer, keys: Keys, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does it take what the manager's own environment has for other managers."""
    for variable in (CERTIFICATE, KEY):
        monkeypatch.setenv(variable, "/nowhere")
    asked = {"directory": str(directory), "lineage": "run-1", "version": 7, "options": {"min_replicas": 0}}
    async with keys.browser(asking, "trainer") as client:
        answer = await client.post(ROUTE, json=asked)
        assert answer.status_code == 200, answer.text
        assert (answer.json()["ok"], answer.json()["identity"]["version"]) == (True, "7")
        gone = await client.post(ROUTE, json={**asked, "directory": f"{directory}8"})
        assert gone.status_code == 404
        assert "is not there" in gone.json()["detail"]
    for variable in (CERTIFICATE, KEY):
        monkeypatch.delenv(variable)
    keys.with_token("trainer")
    shown = {AUTHORITY: str(keys.authority_file), TOKEN_FILE: str(keys.path / "trainer.token")}
    command = [sys.executable, "-m", "ckpt_engine", "update", "--manager", asking.address, "--lineage", "run-1"]
    command += ["--from-directory", directory.name, "--min-replicas", "0", "--json"]
    said = await asyncio.create_subprocess_exec(
        *command, env={**os.environ, **shown}, cwd=directory.parent, stdout=asyncio.subprocess.PIPE
    )
    output, _ = await asyncio.wait_for(said.communicate(), 60)
    assert said.returncode in (0, 1)
    assert json.loads(output)["identity"]["version"] == "7", "it is one update, by whichever way it is asked for"
