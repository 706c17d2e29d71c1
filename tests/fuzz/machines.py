"""The state machines as readers: functions of bytes that a peer sent."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from ckpt_engine.core.deadlines import Deadlines
from ckpt_engine.machines import events
from ckpt_engine.machines.agent.machine import AgentMachine
from ckpt_engine.machines.manager.machine import ManagerMachine
from ckpt_engine.machines.relay.member import RelayMachine
from ckpt_engine.machines.relay.tasks import CountSlot, FillSlot, SlotFilled
from ckpt_engine.machines.trainer.machine import TrainerMachine
from ckpt_engine.machines.wire import unpack
from ckpt_engine.v1 import manager_pb2, worker_pb2
from tests.fuzz.seeds import COMMANDS, HOST, SAID


@contextlib.contextmanager
def manager(envelope: type[Any]) -> Iterator[Callable[[bytes], None]]:
    """A manager with a trainer, a holder and a replica; the input is one more message of one of them, or a call."""
    machine, now = ManagerMachine("cluster", 0, Deadlines()), 0.0
    peers = {
        manager_pb2.TrainerMessage: events.Peer("trainer-1"),
        manager_pb2.ReplicaMessage: events.Peer("replica-2"),
        manager_pb2.HolderMessage: events.Peer("holder-3"),
    }

    def feed(event: events.ManagerEvent) -> None:
        nonlocal now
        now += 0.01
        for command in machine.handle(event, now):
            if isinstance(command, events.Run) and isinstance(command.task, events.SpendEpoch):
                feed(events.Done(command.key))

    for kind, messages in SAID.items():
        for message in messages[:2]:
            body = unpack(message)
            assert body is not None
            feed(events.Message(peers[kind], body))
    call = events.Call("update-1")
    feed(events.UpdateCall(call, manager_pb2.UpdateWeightsRequest(lineage="run", session_id="s")))

    def take(data: bytes) -> None:
        asked = {manager_pb2.RollbackRequest: events.RollbackCall, manager_pb2.WaitForUpdateRequest: events.WaitCall}
        if envelope in asked:
            feed(asked[envelope](events.Call(f"call at {now}"), envelope.FromString(data)))
            machine.status().SerializeToString()
            return
        body = unpack(envelope.FromString(data))
        if body is not None:
            feed(events.Message(peers[envelope], body))
            machine.status().SerializeToString()
            machine.blobs_in_use()

    yield take


@contextlib.contextmanager
def agent() -> Iterator[Callable[[bytes], None]]:
    """An agent with an engine, welcomed by its manager; the input is a command of that manager."""
    machine, now, peer = AgentMachine("one", "s", 1, manager_pb2.MODE_STANDALONE, HOST, ("shared_memory",)), 0.0, []

    def feed(event: events.AgentEvent) -> None:
        nonlocal now
        now += 0.01
        peer.extend(command.peer for command in machine.handle(event, now) if isinstance(command, events.OpenStream))

    feed(events.Start())
    feed(events.EngineReady(manager_pb2.Engine(kind="reference", version="1"), 1, False, False))

    def take(data: bytes) -> None:
        body = unpack(manager_pb2.ReplicaCommand.FromString(data))
        if body is not None and peer:
            feed(events.Message(peer[-1], body))

    take(COMMANDS[0].SerializeToString())
    yield take


@contextlib.contextmanager
def worker_requests() -> Iterator[Callable[[bytes], None]]:
    """The same agent, asked by something that says it is a worker."""
    machine, now = AgentMachine("one", "s", 1, manager_pb2.MODE_STANDALONE, HOST, ("shared_memory",)), 0.0
    machine.handle(events.Start(), now)
    machine.handle(events.EngineReady(manager_pb2.Engine(kind="reference", version="1"), 1, False, False), now)

    def take(data: bytes) -> None:
        nonlocal now
        now += 0.01
        machine.handle(events.WorkerAsked(1, worker_pb2.WorkerRequest.FromString(data)), now)

    yield take


@contextlib.contextmanager
def trainer() -> Iterator[Callable[[bytes], None]]:
    """A trainer's session; the input is a command of its manager."""
    machine, now, peer = TrainerMachine("run", 0, 1, "s", HOST), 0.0, []

    def take(data: bytes) -> None:
        nonlocal now
        now += 0.01
        body = unpack(manager_pb2.TrainerCommand.FromString(data))
        if body is not None:
            machine.handle(events.Message(peer[-1], body), now)

    peer += [command.peer for command in machine.handle(events.Start(), now) if isinstance(command, events.OpenStream)]
    take(manager_pb2.TrainerCommand(welcome=COMMANDS[0].welcome).SerializeToString())
    yield take


@contextlib.contextmanager
def relay() -> Iterator[Callable[[bytes], None]]:
    """A relay's session, whose tasks end at once and well; the input is a command of its manager."""
    machine, now, peer = RelayMachine("a", "s", HOST, manager_pb2.Filling(memory_bytes=9)), 0.0, []

    def feed(event: events.TrainerEvent) -> None:
        nonlocal now
        now += 0.01
        for command in machine.handle(event, now):
            match command:
                case events.OpenStream(opened):
                    peer.append(opened)
                case events.Run(key, events.PutBlobs(blobs)):
                    feed(events.Done(key, tuple(manager_pb2.BlobRef(digest=blob) for blob in blobs)))
                case events.Run(key, FillSlot()):
                    feed(events.Done(key, SlotFilled(b"table", b"record", manager_pb2.RelayFilled(bytes=1))))
                case events.Run(key, CountSlot()):
                    feed(events.Done(key))

    def take(data: bytes) -> None:
        body = unpack(manager_pb2.HolderCommand.FromString(data))
        if body is not None:
            feed(events.Message(peer[-1], body))

    feed(events.Start())
    take(manager_pb2.HolderCommand(welcome=COMMANDS[0].welcome).SerializeToString())
    yield take
