"""Relays that are filled at the same time ask each other for chunks, over real connections: each byte leaves its origin
about once, nothing is passed on that was not compared with the record, and what a relay does wrong costs a question."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from ckpt_engine.core import chunks as core_chunks
from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.core.rates import Rate
from ckpt_engine.core.sealed_record import ProvenRecord
from ckpt_engine.host.facts import this_host
from ckpt_engine.relay import asking, chunk_search
from ckpt_engine.relay.slots import FillWish, Slots, SlotVersion, Want
from ckpt_engine.transport.base import LentChunks, Network
from ckpt_engine.transport.registry import all_transports
from ckpt_engine.transport.tcp import lending
from ckpt_engine.v1.manager_pb2 import WantTable
from ckpt_engine.v1.weights_pb2 import Problem, SourceTable
from tests.install.install_world import Checkpoint
from tests.relay.relay_world import Replica, seal, tables, wish

NAMES = ("a", "b", "c")

LOOPBACK = Network("127.0.0.1:0", "127.0.0.1", 5.0)


def relay(name: str) -> Slots:
    return Slots(name, this_host(), 32 << 20, all_transports(), 5.0, network=LOOPBACK)


class World:
    """A checkpoint in many small chunks. Relay "near" reads it; relays that are to be filled ask it and each other."""

    def __init__(self, names: Sequence[str] = NAMES) -> None:
        torch.manual_seed(7)
        self.weights = {f"layer.{number}": torch.randn(37, 1 + number % 5) for number in range(60)}
        self.weights |= {"empty": torch.zeros(0, 3)}
        self.checkpoint = Checkpoint(self.weights, 2)
        self.recorded: ProvenRecord = seal(self.checkpoint, [])
        self.relays = {name: relay(name) for name in ("near", *names)}
        self.threads: dict[str, int] = {}
        self._pool = ThreadPoolExecutor(1 + len(names))

    def close(self) -> None:
        for each in self.relays.values():
            each.close()
        self._pool.shutdown()
        self.checkpoint.close()

    @property
    def nbytes(self) -> int:
        return sum(weight.nbytes for weight in self.weights.values())

    def wanted(self, leaves: Sequence[str] = (), without: Sequence[str] = ()) -> WantTable:
        table = WantTable(wants=[WantTable.Wants(everything=True)])
        for name, each in self.relays.items():
            if name not in without:
                table.relays.add(relay=f"relay {name}", chunks=each.chunks, origin=name == "near", leaf=name in leaves)
        return table

    def wish(self, sources: Sequence[SourceTable] = (), wanted: WantTable | None = None) -> FillWish:
        found = wish(self.recorded, 1, sources, everything=True)
        return replace(found, table=wanted or self.wanted(), sets=[Want(everything=True)])

    def near(self, slot: int = 0) -> SlotVersion:
        return self.relays["near"].fill(slot, self.wish(tables(self.checkpoint)), 60.0)

    def fill(
        self,
        name: str,
        wanted: WantTable | None = None,
        slot: int = 0,
        seconds: float = 60.0,
        passed: Callable[[Rate], None] = lambda rate: None,
    ) -> Future[SlotVersion]:
        asked = replace(self.wish(wanted=wanted), passed=passed)

        def fill() -> SlotVersion:
            self.threads[name] = threading.get_ident()
            return self.relays[name].fill(slot, asked, seconds)

        return self._pool.submit(fill)

    def assert_same(self, held: SlotVersion) -> None:
        found = {name: torch.full_like(weight, torch.nan) for name, weight in self.weights.items()}
        for shard, memory in zip(held.table.shards, held.sealed, strict=True):
            part = tuple(slice(start, stop) for start, stop in zip(shard.start, shard.stop, strict=True))
            found[held.table.tensors[shard.tensor].name][part] = memory
        assert all(torch.equal(found[name], weight) for name, weight in self.weights.items())


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(core_chunks, "chunk_bytes", lambda model: 1 << 10)
    monkeypatch.setattr(chunk_search, "SURE_SECONDS", 3600.0)  # on a busy machine any of them may be slow
    made = World()
    yield made
    made.close()


def test_each_byte_leaves_its_origin_once(world: World) -> None:
    for slot in (0, 1, 0):
        world.near(slot)
        held = {name: world.fill(name, slot=slot) for name in NAMES}
        found = {name: future.result(60) for name, future in held.items()}
        for each in found.values():
            assert (each.filled.missing, each.filled.faults, each.filled.again) == ((), (), 0)
            assert sum(each.filled.bytes_by_source.values()) == world.nbytes
            world.assert_same(each)
        assert sum(each.filled.bytes_by_source["relay near"] for each in found.values()) == world.nbytes
        assert all(len(each.filled.bytes_by_source) == 3 for each in found.values()), "each passes on"


def test_an_origin_that_is_still_being_filled_is_waited_for(world: World) -> None:
    held = {name: world.fill(name) for name in NAMES}
    time.sleep(0.3)
    assert not any(future.done() for future in held.values())
    world.near()
    for future in held.values():
        world.assert_same(future.result(60))


def test_a_relay_that_comes_later_asks_those_that_hold_it(world: World) -> None:
    world.near()
    world.fill("a", world.wanted(without=["b", "c"])).result(60)
    held = world.fill("b", world.wanted(without=["c"])).result(60)
    world.assert_same(held)
    assert set(held.filled.bytes_by_source) == {"relay a"}, "the origin has sent each chunk once, and says to which"


def test_a_leaf_is_asked_by_no_relay(world: World) -> None:
    world.near()
    held = {name: world.fill(name, world.wanted(leaves=["b"])) for name in NAMES}
    found = {name: future.result(60) for name, future in held.items()}
    for each in found.values():
        world.assert_same(each)
        assert "relay b" not in each.filled.bytes_by_source
    origin = sum(each.filled.bytes_by_source.get("relay near", 0) for each in found.values())
    assert origin == world.nbytes


def test_a_relay_that_no_other_reaches_is_not_asked_either_when_no_other_is_left(world: World) -> None:
    world.near()
    world.relays["near"].close()
    table = world.wanted(leaves=["b"], without=["c"])
    (deaf,) = [each for each in table.relays if each.relay == "relay b"]
    deaf.ClearField("chunks")
    held = world.fill("a", table, seconds=20.0).result(60)
    assert held.filled.missing
    assert {fault.message.split()[1] for fault in held.filled.faults} == {"near"}


def test_damaged_bytes_go_no_further(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk that `a` has verified is damaged in its memory before another relay reads it."""
    world.near()
    verified = lending.TcpLending.verified
    damaged: list[int] = []

    def spoil(self: lending.TcpLending, chunk: int) -> None:
        if not damaged and threading.current_thread().name == "ckpt-engine asks relay near" and self.owner_is_a:
            damaged.append(chunk)
            ((offset, _), *_) = self.lent.runs(chunk)
            world.relays["a"]._arena.tensor(0, offset, (1,), torch.uint8).add_(1)
        verified(self, chunk)

    monkeypatch.setattr(lending.TcpLending, "owner_is_a", False, raising=False)
    monkeypatch.setattr(lending.TcpLending, "verified", spoil)
    lend = world.relays["a"]._ways.lend_chunks

    def mark(lent: LentChunks) -> object:
        found = lend(lent)
        found.owner_is_a = True  # type: ignore[union-attr]
        return found

    monkeypatch.setattr(world.relays["a"]._ways, "lend_chunks", mark)
    held = {name: world.fill(name) for name in NAMES}
    found = {name: future.result(60) for name, future in held.items()}
    assert damaged
    for name in ("b", "c"):
        world.assert_same(found[name])
        faults = [fault for fault in found[name].filled.faults if fault.code == Problem.CODE_DATA_LOSS]
        assert [fault.message for fault in faults] == [
            f"relay a sent {faults[0].tensors[0]} with other bytes than were sealed"
        ]
        assert not found[name].filled.missing


def test_a_relay_that_dies_costs_its_chunks_another_question(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_chunks, "chunk_bytes", lambda model: 256)
    world.near()
    came = threading.Event()
    receive = asking.ChunkQuestions._receive

    def close_a(self: asking.ChunkQuestions, name: str, *arguments: object) -> None:
        receive(self, name, *arguments)  # type: ignore[arg-type]
        if name == "relay a":
            came.set()

    monkeypatch.setattr(asking.ChunkQuestions, "_receive", close_a)
    held = {name: world.fill(name) for name in NAMES}
    assert came.wait(30)
    world.relays["a"].close()
    with pytest.raises(CkptEngineError):
        held["a"].result(60)
    for name in ("b", "c"):
        found = held[name].result(60)
        assert not found.filled.missing
        world.assert_same(found)


def test_a_relay_that_sends_slowly_is_left_for_others(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_search, "SURE_SECONDS", 0.0)
    monkeypatch.setattr(chunk_search, "ENOUGH", 0)
    world.near()
    lend = world.relays["a"]._ways.lend_chunks

    def slowly(lent: LentChunks) -> object:
        return lend(replace(lent, runs=lambda chunk: (time.sleep(1.0), lent.runs(chunk))[1]))

    monkeypatch.setattr(world.relays["a"]._ways, "lend_chunks", slowly)
    held = {name: world.fill(name) for name in NAMES}
    found = {name: future.result(60) for name, future in held.items()}
    for each in found.values():
        world.assert_same(each)
        assert not each.filled.missing
    for name, other in (("b", "c"), ("c", "b")):
        messages = [fault.message for fault in found[name].filled.faults]
        assert [message for message in messages if message.startswith("relay a is far behind the other relays")]
        brought = found[name].filled.bytes_by_source
        assert brought.get("relay a", 0) < brought[f"relay {other}"]


def test_a_relay_that_does_not_reach_the_origin_gets_it_from_others(world: World) -> None:
    world.near()
    wanted = world.wanted()
    unreached = WantTable()
    unreached.CopyFrom(wanted)
    for each in unreached.relays:
        if each.origin:
            each.chunks.CopyFrom(wanted.relays[0].chunks)
            each.chunks.offers[0].locator = b""
    held = {name: world.fill(name, unreached if name == "b" else wanted) for name in NAMES}
    for name, future in held.items():
        found = future.result(60)
        assert not found.filled.missing, (name, found.filled.missing[0].problem.message)
        world.assert_same(found)
    assert "relay near" not in held["b"].result().filled.bytes_by_source


def test_what_no_relay_brings_is_missing_with_what_they_said(world: World) -> None:
    world.near()
    world.relays["near"].close()
    held = world.fill("a", world.wanted(without=["b", "c"]), seconds=20.0).result(60)
    assert not held.table.shards
    assert "relay near" in held.filled.missing[0].problem.message
    again = world.relays["a"]
    other = world.relays["b"].fill(0, world.wish(tables(world.checkpoint)), 60.0)
    world.assert_same(other)
    table = WantTable(wants=[WantTable.Wants(everything=True)])
    table.relays.add(relay="relay b", chunks=world.relays["b"].chunks, origin=True)
    table.relays.add(relay="relay a", chunks=again.chunks)
    world.assert_same(again.fill(0, world.wish(wanted=table), 60.0, more=True))


def test_a_filling_that_is_stopped_or_late_ends_at_once(world: World) -> None:
    alone = world.wanted(without=["b", "c"])
    late = world.fill("a", alone, seconds=0.5)
    with pytest.raises(CkptEngineError) as caught:
        late.result(30)
    assert caught.value.problem.code == Problem.CODE_DEADLINE_EXCEEDED
    stopped = world.fill("a", alone)
    time.sleep(0.3)
    world.relays["a"].stop()
    with pytest.raises(CkptEngineError) as caught:
        stopped.result(30)
    assert caught.value.problem.code == Problem.CODE_ABORTED
    world.near()
    world.assert_same(world.fill("a", alone).result(60))


def test_a_newer_command_goes_on_with_what_has_come_and_others_go_on_waiting(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`a` is told another origin in the middle of a filling; `b` asks it for what has not come yet."""
    monkeypatch.setattr(core_chunks, "chunk_bytes", lambda model: 256)
    world.near()
    receive = asking.ChunkQuestions._receive
    few = threading.Event()

    def stop_a(self: asking.ChunkQuestions, name: str, *arguments: object) -> None:
        receive(self, name, *arguments)  # type: ignore[arg-type]
        if self._search._name == "relay a" and name == "relay near":
            if len(self.taken) >= 5 and not few.is_set():
                few.set()
                world.relays["a"].stop(keep=True)
            time.sleep(0.002)

    monkeypatch.setattr(asking.ChunkQuestions, "_receive", stop_a)
    alone = world.wanted(without=["b", "c"])
    began = world.fill("a", alone)
    asker = world.fill("b", world.wanted(without=["c"]))
    part = began.result(60)
    assert few.is_set()
    assert 0 < sum(part.filled.bytes_by_source.values()) < world.nbytes
    assert {each.problem.message for each in part.filled.missing} == {"a newer command is to bring the rest"}
    assert part.table.shards, "what has come is lent"
    world.assert_same(world.relays["c"].fill(0, world.wish(tables(world.checkpoint)), 60.0))
    other = WantTable(wants=[WantTable.Wants(everything=True)])
    other.relays.add(relay="relay c", chunks=world.relays["c"].chunks, origin=True)
    other.relays.add(relay="relay a", chunks=world.relays["a"].chunks)
    whole = world.relays["a"].fill(0, world.wish(wanted=other), 60.0, more=True)
    world.assert_same(whole)
    assert (whole.filled.missing, whole.filled.faults) == ((), ())
    assert whole.filled.bytes_by_source["relay near"] == part.filled.bytes_by_source["relay near"]
    assert sum(whole.filled.bytes_by_source.values()) == world.nbytes, "each byte once"
    found = asker.result(60)
    world.assert_same(found)
    assert not found.filled.faults
    assert found.filled.bytes_by_source.get("relay a", 0) > 0


def test_a_filling_that_is_stopped_before_anything_has_come_keeps_nothing(world: World) -> None:
    held = world.fill("a")
    time.sleep(0.1)
    world.relays["a"].stop(keep=True)
    with pytest.raises(CkptEngineError) as caught:
        held.result(30)
    assert caught.value.problem.code == Problem.CODE_ABORTED
    assert world.relays["a"].held(0) is None


def test_relays_with_different_needs_share_what_they_share(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tensor-parallel halves on two hosts: each byte leaves the origin once, also what both need."""
    monkeypatch.setattr(core_chunks, "chunk_bytes", lambda model: 1 << 10)
    from tests.install.install_models import TensorParallel

    checkpoint = Checkpoint(TensorParallel(0, 1).checkpoint(), 3)
    replica = Replica(checkpoint, tmp_path)  # type: ignore[arg-type]
    recorded = seal(checkpoint, [replica])
    origin, *others = [relay(name) for name in ("near", "a", "b")]
    halves = [Want([needs]) for needs in replica.needs]
    table = WantTable(wants=[WantTable.Wants(everything=True), WantTable.Wants(), WantTable.Wants(everything=False)])
    table.relays.add(relay="relay near", chunks=origin.chunks, origin=True, wants=0)
    for number, each in enumerate(others):
        table.relays.add(relay=f"relay {'ab'[number]}", chunks=each.chunks, wants=1 + number)
    sets = [Want(replica.needs), *halves]
    base = wish(recorded, 1, tables(checkpoint), [replica])
    held = origin.fill(0, replace(base, table=table, sets=sets), 60.0)
    with ThreadPoolExecutor(2) as pool:
        asked = [replace(base, tables=[], want=half, table=table, sets=sets) for half in halves]
        found = [
            future.result(60)
            for future in [pool.submit(each.fill, 0, ask, 60.0) for each, ask in zip(others, asked, strict=True)]
        ]
    for each in found:
        assert (each.filled.missing, each.filled.faults) == ((), ())
    left = sum(each.filled.bytes_by_source.get("relay near", 0) for each in found)
    both = sum(each.layout.bytes for each in found)
    assert left == held.layout.bytes < both
    for each in (origin, *others):
        each.close()


def test_relays_whose_origin_is_lost_exchange_what_they_have_and_wait_for_nothing_more(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None will get what none has: they say so at once, though ten minutes are left, and a new table may help."""
    monkeypatch.setattr(core_chunks, "chunk_bytes", lambda model: 256)
    world.near()
    came = threading.Event()
    receive = asking.ChunkQuestions._receive

    def lose_origin(self: asking.ChunkQuestions, name: str, *arguments: object) -> None:
        receive(self, name, *arguments)  # type: ignore[arg-type]
        if name == "relay near" and not came.is_set():
            came.set()
            world.relays["near"].close()

    monkeypatch.setattr(asking.ChunkQuestions, "_receive", lose_origin)
    held = {name: world.fill(name, seconds=600.0) for name in NAMES}
    found = {name: future.result(60) for name, future in held.items()}
    assert all(each.filled.missing for each in found.values())
    assert all(each.table.shards for each in found.values()), "what one of them had by then all of them have"
    assert len({len(each.filled.missing) for each in found.values()}) == 1
