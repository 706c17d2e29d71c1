"""What members that never brought anything leave of an open manager: no name, and nothing that an update waits for."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from scripted_members import (
    HOST,
    ScriptedReplica,
    ScriptedTrainer,
    Stream,
    manager_process,
    one_update,
    some_weights,
    stub_at,
)

from ckpt_engine.channel import ManagerStub
from ckpt_engine.core.deadlines import Deadlines
from ckpt_engine.core.manifest import DIGEST_FORMAT
from ckpt_engine.machines import events
from ckpt_engine.machines.events import Peer
from ckpt_engine.machines.manager.forgetting import MOST_LOST, ForgetTimer
from ckpt_engine.machines.manager.machine import ManagerMachine
from ckpt_engine.machines.manager.members import ReplicaId
from ckpt_engine.v1 import manager_pb2

STRANGERS = 10_000


@pytest.fixture
async def address(tmp_path: Path) -> AsyncIterator[str]:
    """Of a manager in a process of its own."""
    async with manager_process(tmp_path) as address:
        yield address


class Strangers:
    """Names that say hello once and go away: replicas without a worker, ranks and holders with nothing."""

    def __init__(self, stub: ManagerStub) -> None:
        self.stub = stub
        self.came = 0

    async def come(self) -> None:
        """One after the other, without an end."""
        while True:
            name = str(self.came)
            match self.came % 3:
                case 0:
                    stream = Stream(self.stub.ReplicaSession(), manager_pb2.ReplicaMessage)
                    await stream.send(
                        hello=manager_pb2.ReplicaHello(
                            digest_format=DIGEST_FORMAT, name=name, session_id=name, host=HOST
                        )
                    )
                case 1:
                    stream = Stream(self.stub.TrainerSession(), manager_pb2.TrainerMessage)
                    hello = manager_pb2.TrainerHello(
                        digest_format=DIGEST_FORMAT, lineage=name, world_size=1, session_id=name, host=HOST
                    )
                    await stream.send(hello=hello)
                case _:
                    stream = Stream(self.stub.HolderSession(), manager_pb2.HolderMessage)
                    hello = manager_pb2.HolderHello(
                        digest_format=DIGEST_FORMAT, kind="cache", name=name, session_id=name, host=HOST
                    )
                    await stream.send(hello=hello)
            welcome = await stream.call.read()
            assert welcome.HasField("welcome"), welcome
            stream.call.cancel()
            self.came += 1

    async def until(self, count: int, coming: asyncio.Future[None]) -> None:
        """Waits for so many, for as long as they come."""
        while self.came < count:
            await asyncio.sleep(0.01)
            assert not coming.done(), coming.exception()


async def flood(address: str, count: int) -> None:
    """An update begins while strangers come and go, and ends with the one replica that there is."""
    async with stub_at(address) as stub, stub_at(address) as other:
        trainer, replica, strangers = ScriptedTrainer(stub), ScriptedReplica(stub), Strangers(other)
        await replica.open()
        async with replica.stream.beating(replica.heartbeat):
            await trainer.join(some_weights())
            async with trainer.stream.beating(manager_pb2.Heartbeat):
                coming = asyncio.ensure_future(strangers.come())
                await strangers.until(count // 2, coming)
                report = await one_update([trainer], [replica], prepares=True, min_replicas=1)
                assert report.ok, report
                # One stranger may be connected when the update begins.
                assert len(report.replicas) <= 2, report
                await strangers.until(count, coming)
                assert not coming.done(), coming.exception()
                coming.cancel()
                await asyncio.gather(coming, return_exceptions=True)
                while True:
                    status = await stub.GetStatus(manager_pb2.GetStatusRequest(), timeout=60)
                    if len(status.replicas) == len(status.trainers) == 1 and not status.holders:
                        break
                    await asyncio.sleep(0.05)


async def test_an_update_among_strangers(address: str) -> None:
    await flood(address, 600)


@pytest.mark.slow
async def test_an_update_among_ten_thousand_strangers(address: str) -> None:
    await flood(address, STRANGERS)


@pytest.mark.parametrize("named", [True, False])
async def test_what_strangers_that_stay_do_to_an_update(address: str, named: bool) -> None:
    """Each has a worker and answers nothing. An update for all waits for them for half of its time, and needs
    `min_replicas` to be ok; one that names its replicas neither counts nor asks them."""
    async with stub_at(address) as stub, stub_at(address) as other, contextlib.AsyncExitStack() as stack:
        trainer, replica = ScriptedTrainer(stub), ScriptedReplica(stub)
        strangers = [ScriptedReplica(other, f"stranger {number}") for number in range(20)]
        asked: list[set[type]] = [set() for _ in strangers]
        for member in (replica, *strangers):
            await member.open()
            await stack.enter_async_context(member.stream.beating(member.heartbeat))
        for stranger, kinds in zip(strangers, asked, strict=True):
            stack.callback(asyncio.ensure_future(hear(stranger, kinds)).cancel)
        await trainer.join(some_weights())
        await stack.enter_async_context(trainer.stream.beating(manager_pb2.Heartbeat))
        wish: dict[str, Any] = {"replicas": ["replica"]} if named else {"min_replicas": 1, "timeout_seconds": 20.0}
        report = await one_update([trainer], [replica], prepares=True, **wish)
        assert report.ok, report
        found = {each.replica: each.outcome for each in report.replicas}
        assert found["replica"] == manager_pb2.OUTCOME_NEW_SERVING
        assert len(found) == (1 if named else 21)
        assert [manager_pb2.Prepare in kinds for kinds in asked] == [not named] * len(strangers)


async def hear(stranger: ScriptedReplica, kinds: set[type]) -> None:
    """Notes what it is told, and does nothing of it."""
    while True:
        kinds.add(type(await stranger.stream.next()))


class Crowd:
    """A manager's machine, and replicas with workers that say hello and go away."""

    def __init__(self) -> None:
        self.deadlines = Deadlines()
        self.machine = ManagerMachine("cluster", 0, self.deadlines)
        self.timers: dict[events.Key, float] = {}

    def feed(self, event: events.ManagerEvent, now: float) -> None:
        for command in self.machine.handle(event, now):
            match command:
                case events.SetTimer(key, seconds):
                    self.timers[key] = now + seconds
                case events.CancelTimer(key):
                    self.timers.pop(key, None)

    def visit(self, number: int, now: float, **fields: Any) -> None:
        """One that has a worker, once."""
        worker = manager_pb2.WorkerStatus(rank=0, boot_id=b"%d" % number)
        hello = manager_pb2.ReplicaHello(
            digest_format=DIGEST_FORMAT,
            name=f"stranger {number}",
            session_id=f"{number}",
            host=HOST,
            workers=[worker],
            **fields,
        )
        self.feed(events.Message(Peer(f"replica-{number}"), hello), now)
        self.feed(events.PeerLost(Peer(f"replica-{number}"), "gone"), now)

    def names(self) -> set[str]:
        return set(self.machine.replicas())


def test_replicas_that_no_update_reached_are_bounded_and_forgotten() -> None:
    crowd = Crowd()
    for number in range(MOST_LOST + 100):
        crowd.visit(number, 0.0)
    assert crowd.names() == {f"stranger {number}" for number in range(100, MOST_LOST + 100)}
    assert len(crowd.timers) < MOST_LOST + 10, "timers of those that were forgotten go with them"
    for key in [key for key in crowd.timers if isinstance(key, ForgetTimer)]:
        crowd.feed(events.TimerFired(key), crowd.deadlines.forget)
    assert not crowd.names()


def test_a_replica_that_may_hold_a_version_is_kept() -> None:
    """It may go on serving it: updates report it until it is evicted."""
    crowd = Crowd()
    crowd.visit(0, 0.0, prepared=[manager_pb2.PreparedWorker(rank=0)])
    crowd.visit(1, 0.0, last_outcome=manager_pb2.ReplicaOutcome(replica="stranger 1"))
    for number in range(2, MOST_LOST + 100):
        crowd.visit(number, 0.0)
    assert {"stranger 0", "stranger 1"} < crowd.names()
    assert not {ForgetTimer(ReplicaId(f"stranger {number}")) for number in range(2)} & crowd.timers.keys()


def test_one_that_comes_back_is_not_forgotten() -> None:
    crowd = Crowd()
    crowd.visit(0, 0.0)
    worker = manager_pb2.WorkerStatus(rank=0, boot_id=b"0")
    hello = manager_pb2.ReplicaHello(
        digest_format=DIGEST_FORMAT, name="stranger 0", session_id="0", agent_epoch=1, host=HOST, workers=[worker]
    )
    crowd.feed(events.Message(Peer("back"), hello), 1.0)
    for number in range(1, MOST_LOST + 100):
        crowd.visit(number, 2.0)
    assert "stranger 0" in crowd.names()
    assert ForgetTimer(ReplicaId("stranger 0")) not in crowd.timers
