"""Two relays on two hosts: what arrives, and what a dead peer, a stopped one and a cut cable come to."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest
from safetensors.torch import save_file

from ckpt_engine.core.sealed_record import ProvenRecord
from ckpt_engine.host.facts import this_host
from ckpt_engine.host.relay_directory import DIRECTORY
from ckpt_engine.relay.slots import FillWish
from ckpt_engine.source.directory import directory_source
from ckpt_engine.v1.weights_pb2 import SourceTable
from tests.install.install_world import Checkpoint
from tests.network.hosts import NetworkHost, hosts, process_inside
from tests.network.test_tcp import odd
from tests.relay.relay_process import RelayProcess
from tests.relay.relay_world import seal, wish

pytestmark = pytest.mark.slow


class World(NamedTuple):
    """A checkpoint that the first host reads as a file, and relays on two others that read each other."""

    recorded: ProvenRecord
    directory: SourceTable
    near: RelayProcess
    far: RelayProcess
    cable: NetworkHost  # of the near one

    def wish(self, *sources: SourceTable) -> FillWish:
        return wish(self.recorded, 1, sources, everything=True)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    checkpoint = Checkpoint(odd(), None)
    recorded = seal(checkpoint, [])
    path = tmp_path / "model.safetensors"
    save_file(checkpoint.weights, path)
    source = directory_source(path, host=this_host())
    with ExitStack() as stack:
        stack.callback(source.close)
        relays = []
        found = stack.enter_context(hosts(2))
        for host in found:
            folder = tmp_path / host.namespace
            relay = RelayProcess(
                host.namespace,
                grace=1.0,
                before=host.inside,
                address=host.address,
                **{DIRECTORY: str(folder), "STALL_SECONDS": "1.5"},
            )
            relays.append(stack.enter_context(relay))
        yield World(recorded, source.table(), *relays, found[0])


def test_weights_cross_a_network_as_they_were_sealed_and_a_dead_owner_is_told_at_once(world: World) -> None:
    first = world.near.fill(0, world.wish(world.directory))
    assert first["missing"] == []
    before = world.cable.sent()
    there = world.far.fill(0, world.wish(first["table"]))
    assert (there["missing"], there["faults"]) == ([], [])
    assert there["brought"] == {f"relay {world.cable.namespace}": there["bytes"]}
    assert there["bytes"] == sum(weight.nbytes for weight in odd().values())
    assert world.cable.sent() - before < 1.05 * there["bytes"] + 30_000, "each byte once, and little else"
    os.kill(process_inside(world.near.process.pid), signal.SIGKILL)
    world.near.process.wait(timeout=60)
    dead = world.far.fill(0, world.wish(first["table"]))
    assert len(dead["missing"]) == len([each for each in world.recorded.boxes if each and each[0].volume])
    assert world.cable.address in dead["missing"][0]
    assert "refused" in dead["missing"][0], "nothing is waited for"
    assert not dead["table"].shards


def test_a_stopped_owner_is_a_timeout_and_goes_on_when_it_does(world: World) -> None:
    table = world.near.fill(0, world.wish(world.directory))["table"]
    assert world.far.fill(0, world.wish(table))["missing"] == []
    owner = process_inside(world.near.process.pid)
    os.kill(owner, signal.SIGSTOP)
    stopped = world.far.fill(1, world.wish(table))
    assert all(f"the relay at {world.cable.address}:" in each for each in stopped["missing"])
    assert "1.5 s" in stopped["missing"][0]  # no answer to the question, or nothing of what was asked for
    both = world.far.fill(0, world.wish(table, world.directory))
    assert both["missing"] == [], "the file is nearer, and there"
    os.kill(owner, signal.SIGCONT)
    assert world.far.fill(0, world.wish(table))["missing"] == []


def test_a_cut_cable_is_a_timeout_and_mended_it_carries_again(world: World) -> None:
    table = world.near.fill(0, world.wish(world.directory))["table"]
    flat = []
    for _ in range(3):
        assert world.far.fill(0, world.wish(table))["missing"] == []
        world.cable.cut()
        cut = world.far.fill(0, world.wish(table))
        assert cut["missing"]
        assert f"the relay at {world.cable.address}:" in cut["missing"][0]
        world.cable.mend()
        flat.append(world.far.ask(flat=True))
    assert flat[1] == flat[2]
    again = world.far.fill(0, world.wish(table))
    assert (again["missing"], again["faults"]) == ([], [])
