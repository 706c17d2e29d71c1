"""Relays that are filled at the same time pass on to each other what they have verified, and nothing else."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch

from ckpt_engine.core import relay_chunks
from ckpt_engine.core.fan_out_orders import fan_out_orders
from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.core.rates import Rate
from ckpt_engine.core.sealed_record import ProvenRecord
from ckpt_engine.relay import batches as relay_batches
from ckpt_engine.relay import fan_in, work
from ckpt_engine.relay.slots import FillWish, SlotVersion
from ckpt_engine.transport.tcp import asking, connection, passer, passing, sending, sockets, wire
from ckpt_engine.transport.tcp.lendings import Lendings
from ckpt_engine.transport.tcp.server import TcpArenaLender
from ckpt_engine.v1 import manager_pb2
from ckpt_engine.v1.manager_pb2 import FanOut
from ckpt_engine.v1.relay_pb2 import TcpLocator
from ckpt_engine.v1.weights_pb2 import Region, SourceTable
from tests.cluster import eventually
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
        self.recorded: ProvenRecord = seal(checkpoint, [])
        self.near = relay("near")
        self.table: SourceTable = self.near.fill(0, self._wish(1, tables(checkpoint)), 60.0).table
        checkpoint.close()
        self.relays = {name: relay(name) for name in names}
        self.threads: dict[str, int] = {}  # those that fill
        self._pool = ThreadPoolExecutor(len(names))

    def close(self) -> None:
        for each in (self.near, *self.relays.values()):
            each.close()
        self._pool.shutdown()

    def orders(self, about: bytes = b"1") -> dict[str, FanOut]:
        """By relay."""
        regions = {}
        for name, each in self.relays.items():
            assert each.passes_on is not None
            regions[f"relay {name}"] = each.passes_on
        return {name.removeprefix("relay "): told for name, told in fan_out_orders(regions, about).items()}

    def _wish(self, version: int, sources: Sequence[SourceTable]) -> FillWish:
        return wish(self.recorded, version, sources, everything=True)

    def fill(
        self,
        name: str,
        told: FanOut,
        slot: int = 0,
        seconds: float = 60.0,
        passed: Callable[[Rate], None] = lambda rate: None,
    ) -> Future[SlotVersion]:
        wanted = replace(self._wish(1, [self.table]), fan_out=told, passed=passed)

        def fill() -> SlotVersion:
            self.threads[name] = threading.get_ident()
            return self.relays[name].fill(slot, wanted, seconds)

        return self._pool.submit(fill)


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
            assert sum(each.filled.bytes_by_source.values()) == total
            assert_same(each, world.weights)
        assert sum(each.filled.bytes_by_source["relay near"] for each in found.values()) == total
        assert all(len(each.filled.bytes_by_source) == 3 for each in found.values()), "everybody passes on"


def test_what_a_relay_has_of_a_damaged_chunk_is_named_and_goes_no_further(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first chunk that `a` has verified is damaged in its memory before anybody reads it."""
    orders = world.orders()
    first = relay_chunks.deal_chunks(_chunks(world), [tree.share for tree in orders["a"].trees])
    (own,) = [number for number, tree in enumerate(orders["a"].trees) if not tree.ask]
    damaged = first[own][0]
    verified = passing.TcpPassing.verified

    def spoilt(self: passing.TcpPassing, chunk: int) -> None:
        if chunk == damaged and threading.get_ident() == world.threads.get("a"):
            offset, _ = self.chunks[chunk][0]
            world.relays["a"]._arena.tensor(0, offset, (1,), torch.uint8).add_(1)
        verified(self, chunk)

    monkeypatch.setattr(passing.TcpPassing, "verified", spoilt)
    held = {name: world.fill(name, orders[name]) for name in NAMES}
    found = {name: future.result(60) for name, future in held.items()}
    for name in ("b", "c"):
        assert found[name].filled.missing == ()
        assert_same(found[name], world.weights)
    said = [fault.message for name in ("b", "c") for fault in found[name].filled.faults]
    assert said
    assert all("relay a passed on" in each for each in said), said


def _chunks(world: World) -> tuple[relay_chunks.SlotChunk, ...]:
    held = world.near.held(0)
    assert held is not None
    return relay_chunks.chunks_of(held.layout)


def others_find_all(world: World, orders: dict[str, FanOut]) -> list[SlotVersion]:
    """What `b` and `c` hold, which are filled without `a`: everything."""
    held = [world.fill(name, orders[name]) for name in ("b", "c")]
    found = [future.result(60) for future in held]
    for each in found:
        assert each.filled.missing == ()
        assert_same(each, world.weights)
    return found


def test_who_is_gone_is_done_without(world: World) -> None:
    """One relay of the plan is not there any more."""
    orders = world.orders()
    world.relays["a"].close()
    for found in others_find_all(world, orders):
        assert "relay a" not in found.filled.bytes_by_source
        assert any("relay a cannot be reached" in each.message for each in found.filled.faults)


def test_who_never_begins_is_waited_for_and_not_for_ever(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "STUCK_SECONDS", 0.5)
    monkeypatch.setattr(passer, "PULSE_SECONDS", 0.02)
    monkeypatch.setattr(fan_in, "rate_of", lambda flows: Rate(2.0, float(len(flows))))
    for found in others_find_all(world, world.orders()):
        assert any("relay a has not got chunk" in each.message for each in found.filled.faults)
        assert found.filled.received is None, "one other has sent something, and nobody can tell who of two is slow"


def test_what_a_relay_cannot_bring_is_not_waited_for(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each relay's own share one chunk is damaged where it is read, so all wait for each other."""
    monkeypatch.setattr(asking, "STUCK_SECONDS", 3600.0)
    orders = world.orders()
    chunks = _chunks(world)
    for told in orders.values():
        shares = relay_chunks.deal_chunks(chunks, [tree.share for tree in told.trees])
        (own,) = [number for number, tree in enumerate(told.trees) if not tree.ask]
        world.near._arena.tensor(0, chunks[shares[own][0]].runs[0][0], (1,), torch.uint8).add_(1)
    held = {name: world.fill(name, orders[name], seconds=3600.0) for name in NAMES}
    for future in held.values():
        found = future.result(60)
        assert len(found.filled.missing) >= len(NAMES)
        assert any("no source has it as it was sealed" in each.message for each in found.filled.faults)


def test_who_says_nothing_at_all_is_given_up(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one is whose process was stopped, or whose cable was cut."""
    monkeypatch.setattr(asking, "SILENCE_SECONDS", 1.0)
    monkeypatch.setattr(passer, "PULSE_SECONDS", 20.0)
    for found in others_find_all(world, world.orders()):
        assert any("relay a said nothing for 1 s while chunk" in each.message for each in found.filled.faults)


def test_a_parent_that_would_take_twice_as_long_as_all_others_is_left(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `a` passes on begins, and does not get on."""
    monkeypatch.setattr(fan_in, "SLOW_SECONDS", 0.0)
    monkeypatch.setattr(asking, "SILENCE_SECONDS", 3600.0)
    go_on = threading.Event()
    sends, slow = sending.Sender.send, world.relays["a"]._arena.lendable().descriptor

    def stalling(self: sending.Sender, slot: int, runs: Sequence[tuple[int, int]]) -> None:
        if self._descriptor == slow:
            sockets.send(self._connection, wire.frame(wire.DATA, sum(length for _, length in runs)))
            go_on.wait(60)
        sends(self, slot, runs)

    monkeypatch.setattr(sending.Sender, "send", stalling)
    try:
        orders = world.orders()
        held = {name: world.fill(name, orders[name], seconds=3600.0) for name in NAMES}
        found = {name: future.result(60) for name, future in held.items()}
    finally:
        go_on.set()
    for each in found.values():
        assert each.filled.missing == ()
        assert_same(each, world.weights)
    for name in ("b", "c"):
        left = [fault.message for fault in found[name].filled.faults if "it is left for another" in fault.message]
        assert len(left) == 1, found[name].filled.faults
        assert left[0].startswith("relay a sends ")


def test_who_cannot_be_dialled_costs_one_filling_its_patience(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """As behind a firewall that drops: nothing is refused, nothing is heard. Patience is short for that one alone."""
    original = connection.connect
    dialled: list[set[str]] = []  # in vain, by filling

    def connect(locator: TcpLocator, owner: str, stop_at: float) -> socket.socket:
        if list(locator.addresses) != [dropped]:
            return original(locator, owner, stop_at)
        dialled[-1].add(owner)
        return original(locator, owner, time.monotonic() + 0.2)

    monkeypatch.setattr(connection, "connect", connect)
    with contextlib.ExitStack() as stack:
        hole = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        dropped = f"127.0.0.1:{hole.getsockname()[1]}"
        for _ in range(4):  # nobody accepts them, and then nobody is let in
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(hole.getsockname())
        for attempt in range(2):
            dialled.append(set())
            orders = world.orders(b"%d" % attempt)
            for order in orders.values():
                for peer in order.peers:
                    locator = TcpLocator.FromString(peer.region.locator)
                    locator.addresses[:] = [dropped]
                    peer.region.locator = locator.SerializeToString(deterministic=True)
            found = world.fill("b", orders["b"]).result(60)
            assert found.filled.missing == ()
            assert_same(found, world.weights)
            told = " ".join(each.message for each in found.filled.faults)
    assert dialled == [{"relay a", "relay c"}, set()]
    assert told.count("is not asked again before 300 s are over") == 2


def test_a_plan_that_nobody_can_follow_is_refused(world: World) -> None:
    for told, words in (
        (FanOut(plan=b"p"), "there has to be a tree"),
        (FanOut(plan=b"p", trees=[FanOut.Tree(share=0)]), "with shares"),
        (FanOut(plan=b"p", trees=[FanOut.Tree(share=1, ask=[0])]), "names peer 0, and has 0"),
    ):
        with pytest.raises(CkptEngineError, match=words):
            world.fill("a", told).result(60)
        assert world.relays["a"].held(0) is None


def test_whoever_is_stopped_tells_those_who_wait(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """`a` is told to stop once it has passed something on: the others do without."""
    verified = passing.TcpPassing.verified
    seen: list[int] = []

    def stopping(self: passing.TcpPassing, chunk: int) -> None:
        verified(self, chunk)
        if threading.get_ident() == world.threads.get("a") and len(seen) < 3:
            seen.append(chunk)
            if len(seen) == 3:
                world.relays["a"].stop()

    monkeypatch.setattr(passing.TcpPassing, "verified", stopping)
    monkeypatch.setattr(relay_batches, "LANDING_BYTES", 1 << 10)
    orders = world.orders()
    held = {name: world.fill(name, orders[name]) for name in NAMES}
    with pytest.raises(CkptEngineError, match="a newer command replaced"):
        held["a"].result(60)
    for name in ("b", "c"):
        found = held[name].result(60)
        assert found.filled.missing == ()
        assert_same(found, world.weights)
    assert world.relays["a"].held(0) is None


def test_nothing_lands_any_more_when_a_filling_has_ended(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """`b` is told to stop while `a` passes on to it: the next version may be written to that memory at once."""
    landing: list[asking.ChunkReader] = []
    receive = asking.ChunkReader.receive

    def noted(self: asking.ChunkReader, *wishes: Any) -> None:
        landing.append(self)
        world.relays["b"].stop()
        try:
            receive(self, *wishes)
        finally:
            time.sleep(0.1)  # as if what has come were still being written
            landing.remove(self)

    monkeypatch.setattr(asking.ChunkReader, "receive", noted)
    with pytest.raises(CkptEngineError, match="a newer command replaced"):
        world.fill("b", world.orders()["b"]).result(60)
    assert not landing


def test_nothing_is_sent_before_it_is_verified(world: World) -> None:
    slots = world.relays["a"]
    region = slots.passes_on
    assert region is not None
    key = b"k" * 16
    slots._arena.reserve(0, 4096, "a test")
    memory = slots._arena.tensor(0, 0, (4096,), torch.uint8)
    connection = asking.ChunkReader(region, "relay a", key, time.monotonic() + 30)
    found = bytearray(1000)
    heard: list[int] = []

    def read() -> bytes:
        connection.ask(1)
        connection.receive(1, [memoryview(found)[:600], memoryview(found)[600:]], lambda: heard.append(1))
        return bytes(found)

    with ThreadPoolExecutor(1) as threads:
        reading = threads.submit(read)
        filling = slots._ways.pass_on(0, key, [[(0, 1000)], [(1000, 300), (2000, 700)]])
        assert filling is not None
        filling.verified(0)
        lender = slots._ways._lenders[0]
        assert isinstance(lender, TcpArenaLender)
        asked = lender._lendings.chunk(key, 1, object(), 0.05)
        assert isinstance(asked, int), "it has to wait"
        assert not heard
        memory.fill_(7)
        filling.verified(1)
        assert reading.result(30) == b"\7" * 1000
        connection.ask(0)
        connection.ask(5)
        connection.receive(0, [memoryview(bytearray(1000))], lambda: None)
        with pytest.raises(CkptEngineError, match="there is no chunk 5"):
            connection.receive(5, [memoryview(bytearray(1))], lambda: None)
        connection.ask(0)
        connection.receive(0, [memoryview(bytearray(1000))], lambda: None)
        assert slots._ways.retire(0) == 0
        connection.ask(0)
        reading = threads.submit(lambda: connection.receive(0, [memoryview(bytearray(1000))], lambda: None))
        filling = slots._ways.pass_on(0, key, [[(0, 1000)]])
        assert filling is not None
        filling.end("it does not hold the version: a test")
        with pytest.raises(CkptEngineError, match="relay a: it does not hold the version: a test"):
            reading.result(30)
    connection.close()


def test_who_reads_a_chunk_is_waited_for_and_overruled() -> None:
    lendings = Lendings(b"a" * 16, 2, 0.05)
    filling = lendings.pass_on(0, b"k" * 16, [[(0, 10)]])
    filling.verified(0)
    reader = object()
    found = lendings.chunk(b"k" * 16, 0, reader, 0.0)
    assert isinstance(found, tuple)
    assert found[:2] == (0, [(0, 10)])
    assert lendings.passes(0, b"k" * 16)
    assert lendings.retire(0) == 1
    assert not lendings.passes(0, b"k" * 16)
    assert lendings.chunk(b"k" * 16, 0, reader, 0.0) == 0, "nobody passes that on"


def test_what_is_sent_and_received_counts_from_when_it_was_there(world: World) -> None:
    slots = world.relays["a"]
    region = slots.passes_on
    assert region is not None
    key, size = b"k" * 16, 12 << 20
    slots._arena.reserve(0, size, "a test")
    told: list[Rate] = []
    left = threading.Event()

    def passed(rate: Rate) -> None:
        told.append(rate)
        left.set()

    filling = slots._ways.pass_on(0, key, [[(0, size)], [(0, 1)]], passed)
    assert filling is not None
    assert filling.sent is None
    connection = asking.ChunkReader(region, "relay a", key, time.monotonic() + 60)
    found = memoryview(bytearray(size))
    with ThreadPoolExecutor(1) as threads:
        connection.ask(0)
        reading = threads.submit(lambda: connection.receive(0, [found], lambda: None))
        time.sleep(0.05)
        began = time.monotonic()
        filling.verified(0)
        reading.result(60)
    connection.close()
    assert left.wait(60), "whoever passes on is told that nobody asks for more"
    (flow,) = connection.flows
    assert began <= flow.start < flow.stop
    assert 0 < flow.bytes <= size
    assert isinstance(filling, passing.TcpPassing)
    ((flow,),) = filling._flows.values()
    assert began <= flow.start < flow.stop
    assert told == [Rate(flow.bytes / (flow.stop - flow.start), flow.stop - flow.start)]
    assert told == [filling.sent]


def test_a_relay_says_how_fast_it_passed_on_and_got_what_others_passed_on(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rates of so few bytes say nothing, so those are taken that each connection would have measured."""
    monkeypatch.setattr(passing, "rate_of", lambda flows: Rate(1.0, float(len(flows))))
    monkeypatch.setattr(fan_in, "rate_of", lambda flows: Rate(2.0, float(len(flows))))
    told: dict[str, list[Rate]] = {name: [] for name in NAMES}
    orders = world.orders()
    held = {name: world.fill(name, orders[name], passed=told[name].append) for name in NAMES}
    for future in held.values():
        said = work.filled_report(future.result(60))
        assert said.received == manager_pb2.Rate(bytes_per_second=2.0, seconds=2.0), "from two others"
        assert said.HasField("sent")
    eventually("all readers have left", 60.0, lambda: all(Rate(1.0, 2.0) in rates for rates in told.values()))


def test_only_who_shows_the_token_asks_and_for_nothing_else(world: World) -> None:
    region = world.relays["a"].passes_on
    assert region is not None
    locator = TcpLocator.FromString(region.locator)
    forged = TcpLocator()
    forged.CopyFrom(locator)
    forged.token = b"x" * 32
    other = Region(transport="tcp", size=region.size, locator=forged.SerializeToString())
    stop_at = time.monotonic() + 30
    with pytest.raises(CkptEngineError, match="a reader of what is being filled has to show the token"):
        asking.ChunkReader(other, "relay a", b"k" * 16, stop_at)
    socket = connection.connect(locator, "relay a", stop_at)
    socket.sendall(wire.question(wire.HOLD))
    kind, size = wire.read_frame(socket.recv(wire.FRAME.size))
    assert kind == wire.NO
    assert b"cannot read a slot" in socket.recv(size)
    socket.close()
    slot = TcpLocator.FromString(next(way for way in world.table.regions[0].offers if way.transport == "tcp").locator)
    socket = connection.connect(slot, "relay near", stop_at)
    socket.sendall(wire.chunk_question(b"k" * 16, 0))
    kind, _ = wire.read_frame(socket.recv(wire.FRAME.size))
    assert kind == wire.NO
    socket.close()
