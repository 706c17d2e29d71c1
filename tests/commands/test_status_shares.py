"""`status` says how much of each version a relay holds, by what relays told the manager."""

from __future__ import annotations

from ckpt_engine.commands import status as status_command
from ckpt_engine.core.manifest import DIGEST_FORMAT
from ckpt_engine.machines.events import Message, Peer, PeerLost
from ckpt_engine.machines.manager.machine import ManagerMachine
from ckpt_engine.v1 import manager_pb2, weights_pb2
from tests.commands.test_status_gpus import host


def identity(number: int) -> weights_pb2.Identity:
    return weights_pb2.Identity(lineage="run", version=number, root=bytes([number]) * 32)


def held(number: int, size: int, wanted: int) -> manager_pb2.Held:
    table = manager_pb2.BlobRef(digest=bytes([number]) * 32, size=1)
    return manager_pb2.Held(identity=identity(number), table=table, bytes=size, wanted_bytes=wanted)


def test_a_relay_holds_all_of_one_version_a_part_of_another_and_brings_a_third() -> None:
    machine = ManagerMachine("cluster", 0)
    hello = manager_pb2.HolderHello(
        digest_format=DIGEST_FORMAT, kind="relay", name="a", session_id="s", host=host(), filling=manager_pb2.Filling()
    )
    hello.held.extend([held(1, 10, 10), held(2, 9, 10), held(3, 10, 0)])
    machine.handle(Message(Peer("1"), hello), 0.0)
    (relay,) = machine.status().holders
    assert [status_command._share(each, False) for each in relay.shares] == ["1 of run", "2 of run (90 %)", "3 of run"]
    progress = manager_pb2.RelayProgress(identity=identity(4), bytes_done=1, bytes_total=3)
    machine.handle(Message(Peer("1"), progress), 0.0)
    (relay,) = machine.status().holders
    assert [each.coming for each in relay.shares] == [False, False, False, True]
    assert status_command._share(relay.shares[-1], False) == "4 of run (33 %, coming)"
    machine.handle(
        Message(Peer("1"), manager_pb2.RelayProgress(identity=identity(2), bytes_done=9, bytes_total=10)), 0.0
    )
    (relay,) = machine.status().holders
    assert [(each.identity.version, each.coming) for each in relay.shares] == [(1, False), (3, False), (2, True)]
    machine.handle(PeerLost(Peer("1"), "reset"), 0.0)
    (relay,) = machine.status().holders
    assert not any(each.coming for each in relay.shares), "what an absent relay brings is unknown"
