"""Relays hold versions before anybody decides to install them: the ledger lacks those, and nothing is wrong."""

from __future__ import annotations

import pytest

from ckpt_engine.core.deadlines import Deadlines
from ckpt_engine.core.manifest import DIGEST_FORMAT
from ckpt_engine.machines.events import Message, Peer
from ckpt_engine.machines.manager.machine import ManagerMachine
from ckpt_engine.v1 import manager_pb2, weights_pb2

EPOCH = 7


@pytest.mark.parametrize(("epoch", "warned"), [(EPOCH, False), (EPOCH + 1, True)])
def test_only_an_epoch_that_the_ledger_lacks_says_that_it_was_rolled_back(epoch: int, warned: bool) -> None:
    machine = ManagerMachine("cluster", EPOCH, Deadlines())
    held = manager_pb2.Held(
        identity=weights_pb2.Identity(lineage="run", version=3, root=b"root"),
        table=manager_pb2.BlobRef(digest=b"table", size=5),
        record=manager_pb2.BlobRef(digest=b"record", size=6),
    )
    hello = manager_pb2.HolderHello(
        digest_format=DIGEST_FORMAT,
        cluster="cluster",
        kind="relay",
        name="a",
        session_id="s",
        epoch=epoch,
        held=[held],
        filling=manager_pb2.Filling(memory_bytes=1),
    )
    machine.handle(Message(Peer("holder-1"), hello), 0.0)
    assert any("rolled back" in warning for warning in machine.status().warnings) is warned
    assert machine._state.versions.next_number("run") == (4 if warned else 0), "a whole ledger knows what was installed"
