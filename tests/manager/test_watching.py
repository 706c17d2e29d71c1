"""Those who watch replicas: a snapshot, then what changes, over a real channel."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import pytest
from scripted_members import (
    WAIT,
    ScriptedReplica,
    one_update,
    pair,
    refused,
    stub_at,
)

from ckpt_engine.channel import ManagerStub
from ckpt_engine.core.enums import enum_word
from ckpt_engine.manager import watchers
from ckpt_engine.manager.service import ManagerConfig, ManagerServer
from ckpt_engine.v1 import manager_pb2, weights_pb2

Told = manager_pb2.WatchReplicasResponse


class Watch:
    """One stream. seen: each replica as it was told last."""

    def __init__(self, stub: ManagerStub) -> None:
        self._call: Any = stub.WatchReplicas(manager_pb2.WatchReplicasRequest(watcher="a test"))
        self.seen: dict[str, manager_pb2.WatchedReplica] = {}
        self.sequences: list[int] = []
        self.states: list[tuple[str, str]] = []

    async def read(self) -> Told:
        message: Any = await asyncio.wait_for(self._call.read(), WAIT)
        if message is grpc.aio.EOF:
            raise EOFError(await self._call.code())
        assert message.snapshot == (not self.sequences)
        self.sequences.append(message.sequence)
        for told in message.replicas:
            self.seen[told.name] = told
            self.states.append((told.name, enum_word(manager_pb2.ReplicaState, told.state)))
        for name in message.gone:
            del self.seen[name]
        return message

    async def until(self, name: str, state: int) -> manager_pb2.WatchedReplica:
        while name not in self.seen or self.seen[name].state != state:
            await self.read()
        return self.seen[name]


async def test_a_watcher_sees_replicas_come_get_a_version_and_go(stub: ManagerStub) -> None:
    watch = Watch(stub)
    first = await watch.read()
    assert (list(first.replicas), first.settling, bool(first.run)) == ([], False, True)
    trainer, replica = await pair(stub, "one")
    seen = await watch.until("one", manager_pb2.REPLICA_STATE_SERVING)
    assert (seen.url, seen.engine, seen.HasField("identity")) == ("http://127.0.0.1:1", "scripted", False)

    call = trainer.update(pause_mode=manager_pb2.PAUSE_MODE_KEEP)
    await replica.prepare()
    await trainer.seal()
    draining = await watch.until("one", manager_pb2.REPLICA_STATE_DRAINING)
    assert (draining.next.lineage, draining.next.version) == ("run", 0)
    assert draining.pause_mode == manager_pb2.PAUSE_MODE_KEEP
    assert "update" in draining.reason
    await replica.install()
    # By the outcome: no heartbeat tells of the new version yet.
    served = await watch.until("one", manager_pb2.REPLICA_STATE_SERVING)
    assert (served.identity, served.HasField("next")) == (draining.next, False)
    assert (await call)[-1].report.ok

    replica.stream.call.cancel()
    away = await watch.until("one", manager_pb2.REPLICA_STATE_AWAY)
    assert away.url == "http://127.0.0.1:1"
    assert watch.sequences == sorted(set(watch.sequences))


async def test_sleep_closure_and_goodbye_are_told_with_their_reasons(stub: ManagerStub) -> None:
    replica = ScriptedReplica(stub, "one")
    await replica.open()
    watch = Watch(stub)
    await watch.until("one", manager_pb2.REPLICA_STATE_SERVING)
    beat = manager_pb2.ReplicaHeartbeat(sequence=2, workers=replica.workers, closed_reason="weights are discarded")
    asleep = manager_pb2.ReplicaHeartbeat(asleep=True)
    asleep.MergeFrom(beat)
    await replica.stream.send(heartbeat=asleep)
    assert (await watch.until("one", manager_pb2.REPLICA_STATE_ASLEEP)).reason == "weights are discarded"
    await replica.stream.send(heartbeat=beat)
    assert (await watch.until("one", manager_pb2.REPLICA_STATE_CLOSED)).reason == "weights are discarded"
    await replica.stream.send(goodbye=manager_pb2.Goodbye(reason="done"))
    while watch.seen:
        await watch.read()


async def test_nothing_new_is_told_as_that_the_manager_lives(config: ManagerConfig) -> None:
    quick = replace(config, deadlines=replace(config.deadlines, lease=0.4, heartbeat=0.1))
    async with ManagerServer(quick) as server, stub_at(server.address) as stub:
        watch = Watch(stub)
        await watch.read()
        beat = await watch.read()
        assert (list(beat.replicas), list(beat.gone), beat.sequence) == ([], [], 0)


async def test_a_manager_that_restarted_says_that_more_may_come(config: ManagerConfig) -> None:
    async with ManagerServer(config) as server, stub_at(server.address) as stub:
        trainer, replica = await pair(stub, "one")
        assert (await one_update([trainer], [replica], prepares=True)).ok
        watch = Watch(stub)
        before = await watch.read()
        stopping = asyncio.ensure_future(server.stop())
        with pytest.raises(grpc.aio.AioRpcError, match="is stopping"):
            await watch.until("nobody", manager_pb2.REPLICA_STATE_SERVING)
        await stopping
    async with ManagerServer(config) as server, stub_at(server.address) as stub:
        after = await Watch(stub).read()
    assert (list(after.replicas), after.settling) == ([], True)
    assert after.run != before.run
    assert after.fence.cluster == before.fence.cluster
    assert [latest.version for latest in after.latest] == [0]


async def test_watchers_are_bounded(stub: ManagerStub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchers, "WATCHERS", 1)
    one = Watch(stub)
    await one.read()
    other: Any = stub.WatchReplicas(manager_pb2.WatchReplicasRequest())
    problem = await refused(other.read())
    assert problem.code == weights_pb2.Problem.CODE_UNAVAILABLE
    assert "carries no more" in problem.message
