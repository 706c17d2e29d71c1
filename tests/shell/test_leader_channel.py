"""Which of several managers a call goes to: the one that says it serves, also after that has changed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from ckpt_engine.channel import ManagerStub, error_of, open_blocking_channel, open_channel
from ckpt_engine.core.problems import CkptEngineError, ErrorCode
from ckpt_engine.leader import SERVICE, reached
from ckpt_engine.v1 import manager_pb2, manager_pb2_grpc
from tests.ports import free_address

State = health_pb2.HealthCheckResponse


class Listed(manager_pb2_grpc.CheckpointEngineManagerServicer):
    """Answers with its own name, and watches until it is told to end."""

    def __init__(self, name: str) -> None:
        self.name, self.leading = name, health.aio.HealthServicer()  # type: ignore[attr-defined]

    async def GetStatus(self, request: object, context: object) -> manager_pb2.GetStatusResponse:  # noqa: N802
        return manager_pb2.GetStatusResponse(phase=self.name)

    async def lead(self, leads: bool) -> None:
        await self.leading.set(SERVICE, State.SERVING if leads else State.NOT_SERVING)


@pytest.fixture
async def pair() -> AsyncIterator[tuple[Listed, Listed, str]]:
    """Two servers of which none leads yet, and the address that names both."""
    async with AsyncExitStack() as undo:
        made, addresses = [], []
        for name in ("a", "b"):
            server, manager = grpc.aio.server(), Listed(name)
            manager_pb2_grpc.add_CheckpointEngineManagerServicer_to_server(manager, server)  # type: ignore[no-untyped-call]
            health_pb2_grpc.add_HealthServicer_to_server(manager.leading, server)
            await manager.lead(False)
            addresses.append(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
            await server.start()
            undo.push_async_callback(server.stop, None)
            made.append(manager)
        yield made[0], made[1], ",".join(addresses)


async def ask(stub: Any) -> str:
    """The name of the manager that answers; the refusal's message if none does."""
    try:
        return str((await stub.GetStatus(manager_pb2.GetStatusRequest(), timeout=30)).phase)
    except grpc.RpcError as error:
        refusal = error_of(error)
        assert refusal.code == ErrorCode.UNAVAILABLE
        return refusal.problem.message


async def answers(stub: Any, name: str) -> None:
    found = []

    async def look() -> None:
        found.append(await ask(stub))

    await look()
    while name not in found[-1]:
        await asyncio.sleep(0.02)
        await look()


async def test_calls_follow_the_leader(pair: tuple[Listed, Listed, str]) -> None:
    first, second, address = pair
    await second.lead(True)
    async with open_channel(address) as channel:
        stub = ManagerStub(await reached(channel))
        assert await ask(stub) == "b", "the first call already"
        await second.lead(False)
        async with asyncio.timeout(60):
            await answers(stub, "none of the managers that are named leads")
            await first.lead(True)
            await answers(stub, "a")


async def test_calls_that_block_follow_the_leader(pair: tuple[Listed, Listed, str]) -> None:
    first, second, address = pair
    await second.lead(True)
    with open_blocking_channel(address) as channel:
        stub = ManagerStub(channel)

        def look() -> str:
            try:
                return str(stub.GetStatus(manager_pb2.GetStatusRequest(), timeout=30).phase)
            except grpc.RpcError as error:
                return error_of(error).problem.message

        assert await asyncio.to_thread(look) == "b"
        await second.lead(False)
        await first.lead(True)
        found: list[str] = []
        async with asyncio.timeout(60):
            while "a" not in found:
                found.append(await asyncio.to_thread(look))


async def test_a_manager_that_is_not_there_is_passed_over(pair: tuple[Listed, Listed, str]) -> None:
    first, _, address = pair
    await first.lead(True)
    async with open_channel(f"{free_address()},{address}") as channel:
        assert await ask(ManagerStub(await reached(channel))) == "a"


async def test_a_name_of_several_addresses_is_dialled_at_each(pair: tuple[Listed, Listed, str]) -> None:
    first, _, address = pair
    await first.lead(True)
    port = address.partition(",")[0].rpartition(":")[2]
    async with open_channel(f"dns:///localhost:{port}") as channel:
        assert await ask(ManagerStub(await reached(channel))) == "a"


async def test_a_list_in_grpcs_own_form_follows_the_leader(pair: tuple[Listed, Listed, str]) -> None:
    first, second, address = pair
    await second.lead(True)
    await first.lead(False)
    async with open_channel(f"ipv4:{address}") as channel:
        assert await ask(ManagerStub(await reached(channel))) == "b"


@pytest.mark.parametrize("address", ["127.0.0.1:1,", "127.0.0.1:1,b", ",", "127.0.0.1:1;127.0.0.1:2"])
async def test_each_address_is_checked(address: str) -> None:
    with pytest.raises(CkptEngineError, match="must be HOST:PORT"):
        open_channel(address)
