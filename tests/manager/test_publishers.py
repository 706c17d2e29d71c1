"""Which publishing processes there are, and how they end. No directory is published: that takes torch."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import grpc.aio
import httpx
import pytest

from ckpt_engine.channel import ManagerStub
from ckpt_engine.core.deadlines import Deadlines
from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.manager import publishers
from ckpt_engine.manager.publishers import Publishers
from ckpt_engine.manager.service import ManagerConfig, ManagerServer
from ckpt_engine.v1 import manager_pb2


async def refused(found: Publishers, lineage: str) -> str:
    """What an update from a directory that is not there is refused with."""
    request = manager_pb2.UpdateFromDirectoryRequest(directory=f"{found._roots[0]}/none", lineage=lineage)
    with pytest.raises(CkptEngineError) as caught:
        await anext(found.update(request))
    return str(caught.value)


async def test_one_that_gives_way_is_waited_for_and_one_in_use_does_not_give_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publishers, "MOST_KEPT", 1)
    found = Publishers((tmp_path,), Deadlines())
    try:
        first, second = await asyncio.gather(refused(found, "a"), refused(found, "b"))
        assert "is not there" in first
        assert "try again later" in second, "the process of a is about to be used"
        process = found._publishers["a"]._process
        assert process is not None
        assert "is not there" in await refused(found, "b")
    finally:
        await found.stop()
    assert process.returncode is not None
    assert "the manager is stopping" in await refused(found, "a")


async def test_a_manager_that_stops_takes_no_more_updates(
    config: ManagerConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither from directories nor from processes of its own, while an update that runs may still end."""
    heard: list[str] = []

    async def ask(seconds: float) -> bool:
        async with httpx.AsyncClient(base_url=f"http://{server.http_address}", trust_env=False) as client:
            answer = await client.post("/v1/updates/from-directory", json={"directory": str(tmp_path / "none")})
            heard.append(answer.json()["detail"])
        async with grpc.aio.insecure_channel(server.publishers.address) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await ManagerStub(channel).UpdateWeights(manager_pb2.UpdateWeightsRequest(lineage="run")).read()
            heard.append(str(caught.value.details()))
        return True

    async with ManagerServer(replace(config, directories=(tmp_path,))) as server:
        monkeypatch.setattr(server._shell, "quiet", ask)
    assert len(heard) == 2
    assert all("the manager is stopping" in each for each in heard), heard
