"""A follower obeys the leader that began its part, and that part's generation only; the leader is played by the test.

A fake leader over a real link, since no honest one answers a question of a generation that has ended.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from ckpt_engine.agent import following
from ckpt_engine.agent.following import FollowingAgent
from ckpt_engine.agent.link import LeaderLink
from ckpt_engine.agent.nodes import NodeSettings
from ckpt_engine.agent.process import EngineProcess
from ckpt_engine.core.deadlines import Deadlines
from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.engine.adapter import LaunchPlan
from ckpt_engine.engine.node_plan import NodePart
from ckpt_engine.gate.directory import EngineDirectory
from ckpt_engine.install.channel import WorkerChannel
from ckpt_engine.v1 import worker_pb2
from tests.ports import free_port

SECONDS = 60.0
BOOT = b"b" * 16


class Leader:
    """Commands what the test says; keeps what it is told."""

    def __init__(self, settings: NodeSettings) -> None:
        self.session = os.urandom(16)
        self.told: list[worker_pb2.NodeMessage] = []
        self._peer = b""
        self._heard = asyncio.Event()
        self.link = LeaderLink(settings.listening_endpoints(), settings.keys(), self._take)
        self.link.open()

    def _take(self, peer: bytes, message: worker_pb2.NodeMessage) -> None:
        self._peer = peer
        self.told.append(message)
        self._heard.set()

    def command(self, **fields: object) -> None:
        usual = {"session_id": self.session, "generation": 1, "run": True}
        self.link.send(self._peer, worker_pb2.NodeCommand(**(usual | fields)))

    async def until(self, field: str, value: object = None) -> worker_pb2.NodeMessage:
        """The next message in which `field` is set (and has that value)."""
        async with asyncio.timeout(SECONDS):
            while True:
                while self.told:
                    message = self.told.pop(0)
                    found = getattr(message, field)
                    if message.HasField(field) if value is None else found == value:
                        return message
                self._heard.clear()
                await self._heard.wait()


@dataclass
class Pair:
    """A leader, and a follower whose part of the engine runs, in generation 1."""

    leader: Leader
    stop: asyncio.Event
    running: asyncio.Task[None]


async def begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pair:
    def plan(arguments: object, port: int, model: str, part: NodePart) -> LaunchPlan:
        return LaunchPlan(("sleep", "60"), "", 1)

    monkeypatch.setattr(following, "node_plan_of", lambda kind: plan)
    settings = NodeSettings(2, 1, f"127.0.0.1:{free_port()}")
    deadlines = Deadlines().changed("heartbeat=0.1 engine_grace=0.2 worker_reply=10 worker_attempt=0.1")
    agent = FollowingAgent(settings, "small", (), "model", (), deadlines, print, root=tmp_path)
    stop = asyncio.Event()
    leader = Leader(settings)
    running = asyncio.create_task(agent.run(stop))
    await leader.until("running", False)
    leader.command()
    await leader.until("running", True)
    return Pair(leader, stop, running)


@pytest.fixture
async def leader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Leader]:
    """Of a follower whose part of the engine runs, in generation 1."""
    pair = await begun(tmp_path, monkeypatch)
    yield pair.leader
    pair.stop.set()
    await pair.running
    pair.leader.link.close()


def directories(root: Path) -> list[Path]:
    """Those of agents."""
    return [each for each in root.iterdir() if (each / "token").exists()]


def channel_below(root: Path) -> WorkerChannel:
    """A worker's, to the one agent whose directory lies there."""
    (path,) = directories(root)
    return WorkerChannel(EngineDirectory(path).endpoint, 1, BOOT)


@pytest.mark.parametrize(
    "other", [{"generation": 2}, {"session_id": os.urandom(16)}, {"run": False}], ids=lambda each: next(iter(each))
)
async def test_what_is_said_of_another_part_than_the_one_that_runs_is_not_obeyed(
    leader: Leader, tmp_path: Path, other: dict[str, object]
) -> None:
    """A worker would install what is over, and the leader take words of this part for those of the next one."""
    channel = channel_below(tmp_path)
    want = worker_pb2.WorkerRequest(want_install=worker_pb2.WantOrder())
    asked = asyncio.create_task(asyncio.to_thread(channel.ask, want, 1.0))
    question = (await leader.until("request")).request
    order = worker_pb2.AgentReply(sequence=question.sequence, install=worker_pb2.InstallOrder())
    leader.command(rank=1, boot_id=BOOT, reply=order, look=7, **other)
    assert (await leader.until("running", False)).looked == 0
    with pytest.raises(CkptEngineError, match="no answer from its agent"):
        await asked
    channel.close()


async def test_what_is_said_of_the_part_that_runs_is_obeyed(leader: Leader, tmp_path: Path) -> None:
    channel = channel_below(tmp_path)
    want = worker_pb2.WorkerRequest(want_install=worker_pb2.WantOrder())
    asked = asyncio.create_task(asyncio.to_thread(channel.ask, want, SECONDS))
    question = (await leader.until("request")).request
    order = worker_pb2.AgentReply(sequence=question.sequence, install=worker_pb2.InstallOrder())
    leader.command(rank=1, boot_id=BOOT, reply=order, look=7)
    await leader.until("looked", 7)
    assert (await asked).HasField("install")
    channel.close()


async def test_a_part_that_cannot_be_stopped_ends_the_agent_which_closes_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault is faked: a process of our own may always be signalled."""
    pair = await begun(tmp_path, monkeypatch)
    real, processes = EngineProcess.stop, set[EngineProcess]()

    async def refuses(process: EngineProcess) -> None:
        processes.add(process)
        raise PermissionError(1, "not ours")

    monkeypatch.setattr(EngineProcess, "stop", refuses)
    try:
        pair.leader.command(run=False)
        with pytest.raises(PermissionError, match="not ours"):
            await asyncio.wait_for(pair.running, SECONDS)
        assert not directories(tmp_path), "the directory is closed all the same"
    finally:
        pair.stop.set()
        for process in processes:
            await real(process)
        pair.leader.link.close()
