"""When a replica's end is judged: not while what the promises say of it may still come."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from ckpt_engine.v1 import manager_pb2
from tests.faults.cells import QUARANTINED, VICTIM, Cell
from tests.faults.conductor import end_of
from tests.faults.world import World


@pytest.mark.parametrize("connected", [False, True])
def test_a_replica_that_joins_is_not_judged_while_the_relay_that_it_needs_lives(connected: bool) -> None:
    """As a fake, since it is a moment: an attempt to bring it up has failed, and the relay is still on its way back."""
    status = manager_pb2.GetStatusResponse(phase="idle")
    status.replicas.add(name=VICTIM, connected=True, closed_reason="worker 0 holds no weights yet")
    holder = status.holders.add(name="relay", kind="relay", connected=connected)
    holder.held.add(version=1)
    relay = SimpleNamespace(alive=True)
    world: Any = SimpleNamespace(status=lambda: status, relay=relay, version=1)
    cell = Cell("relay", "partition", "join")
    assert end_of(cast(World, world), cell, VICTIM, 0) == ""
    relay.alive = False
    assert end_of(cast(World, world), cell, VICTIM, 0) == QUARANTINED
