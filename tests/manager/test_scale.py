"""A model of 50,000 tensors: registered, planned and sealed, and everybody else is answered meanwhile."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch
from scripted_members import ScriptedReplica, ScriptedTrainer, manager_process, stub_at

from ckpt_engine.channel import ManagerStub
from ckpt_engine.v1 import manager_pb2

TENSORS = 50_000


@pytest.fixture
async def address(tmp_path: Path) -> AsyncIterator[str]:
    """Of a manager in a process of its own."""
    async with manager_process(tmp_path) as address:
        yield address


class Answers:
    """What the manager answers somebody else who asks again and again, by what it was doing."""

    def __init__(self) -> None:
        self.given: dict[str, int] = {}

    @contextlib.asynccontextmanager
    async def counted(self, stub: ManagerStub, what: str) -> AsyncIterator[None]:
        """Asks while the body runs."""
        self.given[what] = 0

        async def ask() -> None:
            while True:
                await stub.GetStatus(manager_pb2.GetStatusRequest(), timeout=120)
                self.given[what] += 1

        asking = asyncio.ensure_future(ask())
        try:
            yield
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)


@pytest.mark.slow
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
        await trainer.publish()
        async with answers.counted(other, "merge"):
            await trainer.stream.until(manager_pb2.PublicationAccepted)

        call = trainer.update()
        await replica.prepare()
        async with answers.counted(other, "compile"):
            await trainer.stream.wait_for(manager_pb2.Seal)
        await trainer.seal()
        await replica.stream.wait_for(manager_pb2.Install)
        await replica.install()
        report = (await call)[-1].report
        assert report.ok
        assert report.tensors == TENSORS

        call = trainer.update()
        await trainer.seal()
        await replica.install()
        assert (await call)[-1].report.ok
        first, again = ([worker.plan for worker in order.workers] for order in replica.installed)
        assert again == first, "an update that changes nothing has the plans of the one before"
    # Whoever works on the loop answers once in that time: who asked before, when it is done.
    assert min(answers.given.values()) > 2, answers.given
