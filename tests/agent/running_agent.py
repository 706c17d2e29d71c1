"""A whole agent on a test's own loop, and the messages that a test sends it as its manager."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from ckpt_engine.agent.launched import LaunchedEngine
from ckpt_engine.agent.session import AgentSettings, ReplicaAgent
from ckpt_engine.v1 import manager_pb2, weights_pb2
from tests.agent.plain_manager import CLUSTER, PlainManager
from tests.agent.small_engine import SmallAdapter

SECONDS = 60.0
DEADLINE = 240.0
"""Of an install: of a part of it, a second and more, an engine is to take a label."""
QUICK = "engine_restart_first=0.1 engine_watch=0.1"
MANIFEST = weights_pb2.Manifest(tensors=[weights_pb2.TensorSpec(name="w", dtype="float32", shape=[1])])
IDENTITY = weights_pb2.Identity(lineage="run", version=3, root=bytes(range(32)))


class RunningAgent:
    """An agent on the test's own loop."""

    def __init__(self, settings: AgentSettings) -> None:
        self.lines: list[str] = []
        self._said = asyncio.Event()
        self.agent = ReplicaAgent(settings, self._say)
        self.stop = asyncio.Event()
        self.run = asyncio.ensure_future(self.agent.run(self.stop))

    @property
    def engine_pid(self) -> int:
        assert isinstance(self.agent.host, LaunchedEngine)
        assert self.agent.host.pid is not None
        return self.agent.host.pid

    def _say(self, line: str) -> None:
        self.lines.append(line)
        self._said.set()

    async def until_said(self, words: str) -> None:
        """Until one of its lines has these words."""
        async with asyncio.timeout(SECONDS):
            while not any(words in line for line in self.lines):
                self._said.clear()
                await self._said.wait()

    async def end(self) -> None:
        self.stop.set()
        await asyncio.wait_for(asyncio.gather(self.run, return_exceptions=True), SECONDS)


Start = Callable[..., RunningAgent]
Beside = Callable[..., Awaitable[tuple[str, asyncio.subprocess.Process]]]


async def ready(manager: PlainManager) -> manager_pb2.ReplicaHeartbeat:
    """Until the manager knows the engine's worker."""
    await manager.until(lambda: any(beat.workers for beat in manager.all(manager_pb2.ReplicaHeartbeat)))
    return manager.all(manager_pb2.ReplicaHeartbeat)[-1]


def fence(epoch: int) -> weights_pb2.Fence:
    return weights_pb2.Fence(cluster=CLUSTER, epoch=epoch)


async def prepare(manager: PlainManager, epoch: int) -> manager_pb2.Prepared:
    ref = manager.put(MANIFEST.SerializeToString(deterministic=True))
    manager.send(manager_pb2.Prepare(fence=fence(epoch), manifest=ref, deadline_seconds=SECONDS))
    return await manager.next(manager_pb2.Prepared)


def install(manager: PlainManager, epoch: int) -> manager_pb2.Install:
    plan, expected = manager.put(b"plan"), manager.put(b"")
    worker = manager_pb2.WorkerInstall(rank=0, plan=plan, expected=expected)
    return manager_pb2.Install(fence=fence(epoch), identity=IDENTITY, workers=[worker], deadline_seconds=DEADLINE)


async def updated(manager: PlainManager, epoch: int) -> manager_pb2.ReplicaOutcome:
    """An update from its preparation to its outcome."""
    await prepare(manager, epoch)
    manager.send(install(manager, epoch))
    return await manager.next(manager_pb2.ReplicaOutcome)


async def calls(agent: RunningAgent) -> list[str]:
    """What its engine was asked to do so far."""
    driver = agent.agent.host.adapter
    assert isinstance(driver, SmallAdapter)
    return await driver.calls()
