"""One stream to a manager over a real server: opened, used, lost, closed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc.aio
import pytest
from google.protobuf.message import Message

from ckpt_engine.channel import ManagerStub, open_channel
from ckpt_engine.shell import stream as stream_module
from ckpt_engine.shell.stream import MemberStream
from ckpt_engine.v1 import manager_pb2, weights_pb2
from tests.agent.plain_manager import SECONDS, PlainManager
from tests.ports import free_port


class Ears:
    """What a stream told."""

    def __init__(self) -> None:
        self.messages: asyncio.Queue[Message] = asyncio.Queue()
        self.lost: asyncio.Queue[weights_pb2.Problem] = asyncio.Queue()

    def stream(self, channel: grpc.aio.Channel, goodbye_seconds: float = 2.0) -> MemberStream:
        return MemberStream(
            ManagerStub(channel).ReplicaSession,
            manager_pb2.ReplicaMessage,
            self.messages.put_nowait,
            self.lost.put_nowait,
            goodbye_seconds,
        )

    async def message(self) -> Message:
        return await asyncio.wait_for(self.messages.get(), SECONDS)

    async def reason(self) -> str:
        return (await asyncio.wait_for(self.lost.get(), SECONDS)).message


@pytest.fixture
async def channel(manager: PlainManager) -> AsyncIterator[grpc.aio.Channel]:
    channel = open_channel(manager.address)
    yield channel
    await channel.close()


@pytest.fixture
def ears() -> Ears:
    return Ears()


async def test_messages_go_both_ways(manager: PlainManager, channel: grpc.aio.Channel, ears: Ears) -> None:
    stream = ears.stream(channel)
    stream.send(manager_pb2.ReplicaHello(name="one"))
    assert isinstance(await ears.message(), manager_pb2.Welcome)
    assert manager.all(manager_pb2.ReplicaHello)[0].name == "one"
    await stream.close()
    assert ears.lost.empty(), "who closes a stream knows that it is gone"


async def test_close_lets_what_was_queued_leave(manager: PlainManager, channel: grpc.aio.Channel, ears: Ears) -> None:
    stream = ears.stream(channel)
    stream.send(manager_pb2.ReplicaHello())
    for number in range(50):
        stream.send(manager_pb2.ReplicaHeartbeat(sequence=number))
    stream.send(manager_pb2.Goodbye(reason="stopping"))
    await stream.close()
    assert len(manager.all(manager_pb2.ReplicaHeartbeat)) == 50
    assert manager.all(manager_pb2.Goodbye)[0].reason == "stopping"
    stream.send(manager_pb2.Goodbye())


async def test_a_manager_that_is_not_there(ears: Ears) -> None:
    channel = open_channel(f"127.0.0.1:{free_port()}")
    stream = ears.stream(channel)
    stream.send(manager_pb2.ReplicaHello())
    assert "nothing listens there: start the manager" in await ears.reason()
    await stream.close()
    await channel.close()


async def test_a_manager_that_dies(manager: PlainManager, channel: grpc.aio.Channel, ears: Ears) -> None:
    stream = ears.stream(channel)
    stream.send(manager_pb2.ReplicaHello())
    await ears.message()
    await manager.stop()
    assert await ears.reason()
    assert ears.lost.empty()


async def test_a_manager_that_ends_the_session(manager: PlainManager, channel: grpc.aio.Channel, ears: Ears) -> None:
    stream = ears.stream(channel)
    stream.send(manager_pb2.ReplicaHello())
    await ears.message()
    manager.end_session()
    assert await ears.reason() == "the manager ended the session"
    stream.send(manager_pb2.ReplicaHeartbeat())
    await stream.close()


async def test_a_manager_that_does_not_read_is_given_up(
    channel: grpc.aio.Channel, ears: Ears, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_module, "QUEUE_LIMIT", 10)
    stream = ears.stream(channel)
    for number in range(11):  # the loop has had no time to write any of them
        stream.send(manager_pb2.ReplicaHeartbeat(sequence=number))
    assert "10 messages wait" in await ears.reason()


async def test_closing_has_a_deadline(channel: grpc.aio.Channel, ears: Ears, manager: PlainManager) -> None:
    silent = await PlainManager(welcome=False).start()
    deaf_channel = open_channel(silent.address)
    stream = ears.stream(deaf_channel, goodbye_seconds=0.1)
    stream.send(manager_pb2.ReplicaHello())
    await silent.until(lambda: silent.sessions == 1 and bool(silent.received))
    async with asyncio.timeout(SECONDS):
        await stream.close()
    await deaf_channel.close()
    await silent.stop()
