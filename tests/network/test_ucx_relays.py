"""Relays that fill themselves from each other, and UCX carries the chunks, on loopback."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ckpt_engine.host.facts import this_host
from ckpt_engine.relay.slots import Slots, SlotVersion, Want
from ckpt_engine.transport.registry import all_transports
from ckpt_engine.transport.ucx import packages
from ckpt_engine.transport.ucx.lanes import UcxLanes
from ckpt_engine.transport.ucx.settings import DEVICES
from ckpt_engine.v1.manager_pb2 import WantTable
from ckpt_engine.v1.weights_pb2 import OfferedRegion
from tests.install.install_world import Checkpoint
from tests.install.published import tables
from tests.network.chunk_owner import LOOPBACK
from tests.network.ucx_world import NEEDS_NIXL, alive, until
from tests.relay.relay_world import seal, wish

pytestmark = [NEEDS_NIXL, pytest.mark.slow]


class World:
    """A checkpoint, a relay that reads it, and one that asks that relay."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.weights = {f"layer.{number}": torch.randn(257, 1001 + number) for number in range(20)}
        self.checkpoint = Checkpoint(self.weights, 2)
        self.recorded = seal(self.checkpoint, [])
        self.near, self.far = (
            Slots(name, this_host(), 64 << 20, all_transports(), 5.0, network=LOOPBACK) for name in ("near", "far")
        )

    def close(self) -> None:
        self.near.close()
        self.far.close()
        self.checkpoint.close()

    def fill(self, slot: int) -> SlotVersion:
        """Fills both; what the far one has then."""
        table = WantTable(wants=[WantTable.Wants(everything=True)])
        for name, each in (("near", self.near), ("far", self.far)):
            table.relays.add(relay=f"relay {name}", chunks=each.chunks, origin=name == "near")
        asked = replace(
            wish(self.recorded, 1, tables(self.checkpoint), everything=True),
            table=table,
            sets=[Want(everything=True)],
        )
        self.near.fill(slot, asked, 60.0)
        found = self.far.fill(slot, replace(asked, tables=[]), 60.0)
        assert (found.filled.missing, found.filled.again) == ((), 0)
        assert found.filled.bytes_by_source == {"relay near": sum(each.nbytes for each in self.weights.values())}
        held = {name: torch.full_like(weight, torch.nan) for name, weight in self.weights.items()}
        for shard, memory in zip(found.table.shards, found.sealed, strict=True):
            part = tuple(slice(start, stop) for start, stop in zip(shard.start, shard.stop, strict=True))
            held[found.table.tensors[shard.tensor].name][part] = memory
        assert all(torch.equal(held[name], weight) for name, weight in self.weights.items())
        return found


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setenv("UCX_TLS", "tcp")
    monkeypatch.setenv(DEVICES, "lo")
    with contextlib.closing(World()) as made:
        yield made


def ways(region: OfferedRegion | None) -> list[str]:
    assert region is not None
    return [offer.transport for offer in region.offers]


def lanes_in(slots: Slots) -> UcxLanes:
    """What a relay has for UCX."""
    (lanes,) = slots._arena.carriers
    assert isinstance(lanes, UcxLanes)
    return lanes


def test_a_relay_fills_itself_over_ucx_bit_for_bit(world: World) -> None:
    assert ways(world.near.chunks) == ["tcp", "ucx"]
    read = lanes_in(world.far)
    assert len(read.helpers) == 1  # its own lender
    for slot in (0, 1, 0):
        world.fill(slot)
    assert len(read.helpers) == 2  # one reads for both slots


def test_without_ucx_chunks_come_over_tcp(world: World) -> None:
    (lender,) = lanes_in(world.far).helpers
    os.kill(lanes_in(world.far).fork_server, signal.SIGKILL)
    until(lambda: not alive(lender))
    world.fill(0)


def test_a_relay_uses_ucx_only_if_it_was_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(DEVICES, raising=False)
    assert not packages.availability().ok
    with contextlib.closing(Slots("a", this_host(), 16 << 20, all_transports(), network=LOOPBACK)) as plain:
        assert ways(plain.chunks) == ["tcp"]
    monkeypatch.setenv(DEVICES, "all")
    assert packages.availability().ok


def test_a_relay_with_a_device_that_is_none_does_not_start_and_says_so(tmp_path: Path) -> None:
    told = subprocess.run(
        [
            *(sys.executable, "-m", "ckpt_engine", "relay", "--manager", "127.0.0.1:1", "--memory", "64MiB"),
            *("--directory", str(tmp_path / "here"), "--ucx-devices", "nowhere7"),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert told.returncode == 1, told.stderr
    assert "UCX cannot be used" in told.stderr
    assert "nowhere7" in told.stderr
    assert not list((tmp_path / "here").iterdir())
