"""Relays that are filled at the same time pass on to each other what they have verified, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from ckpt_engine.core import relay_chunks
from ckpt_engine.core.fan_out_orders import fan_out_orders
from ckpt_engine.core.sealed_record import Recorded
from ckpt_engine.relay.slots import Held, Slots, Wish
from ckpt_engine.v1.manager_pb2 import FanOut
from ckpt_engine.v1.weights_pb2 import SourceTable
from tests.install.install_world import Checkpoint
from tests.network.test_tcp import assert_same, relay
from tests.relay.relay_world import seal, tables, wish

NAMES = ("a", "b", "c")


class World:
    """A checkpoint in many small chunks; `near` holds it, and relays that are to be filled read it over TCP."""

    def __init__(self, names: Sequence[str] = NAMES) -> None:
        torch.manual_seed(7)
        self.weights = {f"layer.{number}": torch.randn(37, 1 + number % 5) for number in range(60)}
        self.weights |= {"empty": torch.zeros(0, 3)}
        checkpoint = Checkpoint(self.weights, 2)
        self.recorded: Recorded = seal(checkpoint, [])
        self.near = relay("near")
        self.table: SourceTable = self.near.fill(0, self._wish(1, tables(checkpoint)), 60.0).table
        checkpoint.close()
        self.relays = {name: relay(name) for name in names}
        self._threads = ThreadPoolExecutor(len(names))

    def close(self) -> None:
        for each in (self.near, *self.relays.values()):
            each.close()
        self._threads.shutdown()

    def orders(self, about: bytes = b"1", **without: Slots) -> dict[str, FanOut]:
        """By relay. without: relays of which others know only where they were."""
        regions = {}
        for name, each in {**self.relays, **without}.items():
            assert each.passes_on is not None
            regions[f"relay {name}"] = each.passes_on
        return {name.removeprefix("relay "): told for name, told in fan_out_orders(regions, about).items()}

    def _wish(self, version: int, sources: Sequence[SourceTable]) -> Wish:
        return wish(self.recorded, version, sources, everything=True)

    def fill(self, name: str, told: FanOut, slot: int = 0, seconds: float = 60.0) -> Future[Held]:
        wanted = replace(self._wish(1, [self.table]), fan_out=told)
        return self._threads.submit(self.relays[name].fill, slot, wanted, seconds)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(relay_chunks, "chunk_bytes", lambda model: 1 << 10)
    made = World()
    yield made
    made.close()


def test_each_byte_leaves_its_holder_once(world: World) -> None:
    for slot in (0, 1, 0):
        orders = world.orders(b"%d" % slot)
        held = {name: world.fill(name, orders[name], slot) for name in NAMES}
        found = {name: future.result(60) for name, future in held.items()}
        total = found["a"].layout.bytes
        for each in found.values():
            assert (each.filled.missing, each.filled.faults, each.filled.again) == ((), (), 0)
            assert sum(each.filled.brought.values()) == total
            assert_same(each, world.weights)
        assert sum(each.filled.brought["relay near"] for each in found.values()) == total
        assert all(len(each.filled.brought) == 3 for each in found.values()), "everybody passes on"
