"""A model of 50,000 tensors: registered, planned and sealed in seconds, and everybody else is answered meanwhile."""

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch
from scripted_members import ScriptedReplica, ScriptedTrainer, stub_at

from ckpt_engine.v1 import manager_pb2
from ckpt_engine.v1.manager_pb2_grpc import CheckpointEngineManagerStub

TENSORS = 50_000


@pytest.fixture
async def address(tmp_path: Path) -> AsyncIterator[str]:
    """A manager in a process of its own: here it would share this test's interpreter lock."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "ckpt_engine", "serve", "--listen", "127.0.0.1:0", "--http", ""),
        *("--ledger", str(tmp_path / "ledger.sqlite3")),
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr is not None
    line = (await asyncio.wait_for(process.stderr.readline(), 60)).decode()
    yield dict(word.split("=", 1) for word in line.split() if "=" in word)["grpc"]
    process.terminate()
    await asyncio.wait_for(process.communicate(), 30)


class Answers:
    """How long the manager takes to answer somebody else, asked every 20 ms."""

    def __init__(self) -> None:
        self.slowest = 0.0

    @contextlib.asynccontextmanager
    async def timed(self, stub: CheckpointEngineManagerStub, what: str) -> AsyncIterator[None]:
        """Asks while the body runs."""

        async def ask() -> None:
            while True:
                begun = time.perf_counter()
                try:
                    await stub.GetStatus(manager_pb2.GetStatusRequest(), timeout=30)
                finally:  # also when it is cancelled while it waits
                    self.slowest = max(self.slowest, time.perf_counter() - begun)
                await asyncio.sleep(0.02)

        begun = time.perf_counter()
        asking = asyncio.ensure_future(ask())
        try:
            yield
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            print(f"{what}: {time.perf_counter() - begun:.2f} s; slowest answer so far {self.slowest * 1000:.0f} ms")


async def test_fifty_thousand_tensors(address: str) -> None:
    weights = {
        f"model.layers.{index // 512}.mlp.experts.{index % 512}.up_proj.weight": torch.full((2, 2), float(index))
        for index in range(TENSORS)
    }
    answers = Answers()
    async with stub_at(address) as stub, stub_at(address) as other, contextlib.AsyncExitStack() as beats:
        trainer, replica = ScriptedTrainer(stub), ScriptedReplica(stub, workers=2)
        trainer.hold(weights)
        await trainer.open()
        await replica.open()
        await beats.enter_async_context(trainer.stream.beating(manager_pb2.Heartbeat))
        await beats.enter_async_context(replica.stream.beating(replica.heartbeat))
        begun = time.perf_counter()
        await trainer.publish()
        async with answers.timed(other, "merge"):
            await trainer.stream.until(manager_pb2.PublicationAccepted)
        accepted = time.perf_counter() - begun

        call = trainer.update()
        await replica.prepare()
        begun = time.perf_counter()
        async with answers.timed(other, "compile"):
            await trainer.stream.wait_for(manager_pb2.Seal)
        planned = time.perf_counter() - begun
        await trainer.seal()
        async with answers.timed(other, "combine"):
            await replica.stream.wait_for(manager_pb2.Install)
        await replica.install()
        report = (await call)[-1].report
        assert report.ok
        assert report.tensors == TENSORS

        begun = time.perf_counter()
        call = trainer.update()
        async with answers.timed(other, "steady-state plan"):
            await trainer.stream.wait_for(manager_pb2.Seal)
        again = time.perf_counter() - begun
        await trainer.seal()
        await replica.install()
        assert (await call)[-1].report.ok
        assert again < 0.5, "an update that changes nothing compiles nothing"
    assert accepted < 15
    assert planned < 20
    assert answers.slowest < 1
