"""Two relays on two hosts: what arrives, and what a dead owner, a stopped one and a cut cable come to."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from tests.network.chunk_owner import SLOT_BYTES
from tests.network.hosts import NetworkHost, hosts, process_inside
from tests.network.ucx_world import Other

pytestmark = pytest.mark.slow


class World(NamedTuple):
    """A relay that lends chunks, and one on another host that asks for them."""

    near: Other
    far: Other
    cable: NetworkHost  # of the near one

    def connect(self) -> None:
        self.far("connect", offered=self.near("lend_whole"))

    def read(self) -> None:
        self.far("read_whole")
        assert self.far("digest", slot=1) == self.near("digest", slot=0)


@pytest.fixture
def world() -> Iterator[World]:
    with hosts(2) as found:
        near, far = (Other("none", host.address, tuple(host.inside)) for host in found)
        with near, far:
            yield World(near, far, found[0])


def test_chunks_cross_a_network_once_and_a_dead_owner_is_noticed_at_once(world: World) -> None:
    world.connect()
    before = world.cable.sent()
    world.read()
    assert world.cable.sent() - before < 1.05 * SLOT_BYTES + 30_000, "each byte once, and little else"
    offered = world.near("lend_whole")
    os.kill(process_inside(world.near.process.pid), signal.SIGKILL)
    with pytest.raises(RuntimeError, match=r"UNAVAILABLE: relay near is gone, while chunk"):
        world.far("read_whole")
    with pytest.raises(RuntimeError, match=rf"relay near \({world.cable.address}:.*(refused|reset)"):
        world.far("connect", offered=offered)


def test_a_stopped_owner_is_a_timeout_and_goes_on_when_it_does(world: World) -> None:
    world.connect()
    world.read()
    owner = process_inside(world.near.process.pid)
    os.kill(owner, signal.SIGSTOP)
    with pytest.raises(RuntimeError, match=r"DEADLINE_EXCEEDED: relay near said nothing for 6 s"):
        world.far("read_whole")
    os.kill(owner, signal.SIGCONT)
    world.connect()
    world.read()


def test_a_cut_cable_is_a_timeout_and_mended_it_carries_again(world: World) -> None:
    world.connect()
    world.read()
    world.cable.cut()
    with pytest.raises(RuntimeError, match=r"DEADLINE_EXCEEDED: relay near said nothing for 6 s"):
        world.far("read_whole")
    world.cable.mend()
    world.connect()
    world.read()
