"""Weights over TCP, from one relay's slot to another's, on loopback: bit for bit, or not at all and with a reason."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.core.sealed_record import ProvenRecord
from ckpt_engine.host.facts import this_host
from ckpt_engine.relay import batches as relay_batches
from ckpt_engine.relay.slots import Slots, SlotVersion
from ckpt_engine.transport.base import ByteRun, Network
from ckpt_engine.transport.fetched import FetchedTransport
from ckpt_engine.transport.shared_memory.memory import SharedMemoryTransport
from ckpt_engine.transport.tcp import connection, sending, server, wire
from ckpt_engine.transport.tcp.fetcher import TcpFetcher, TcpLink
from ckpt_engine.transport.tcp.server import TcpArenaLender
from ckpt_engine.v1.relay_pb2 import TcpLocator
from ckpt_engine.v1.weights_pb2 import Problem, Region, SourceTable
from tests.install.install_models import TensorParallel
from tests.install.install_world import Checkpoint
from tests.network.lanes import lanes
from tests.relay.relay_world import Replica, seal, tables, wish
from tests.relay.test_relay_install import assert_installed

LOOPBACK = Network("127.0.0.1:0", "127.0.0.1", 5.0)
SIZES = (0, 1, 3, 64, 1000, 4096)


def relay(name: str, memory: int = 32 << 20, network: Network | None = LOOPBACK) -> Slots:
    """Reads trainers of this host through shared memory, and other relays over TCP only."""
    transports = {each.name: each for each in (SharedMemoryTransport(), FetchedTransport(TcpFetcher()))}
    return Slots(name, this_host(), memory, transports, 5.0, (), network)


@pytest.fixture
def pair() -> Iterator[tuple[Slots, Slots]]:
    near, far = relay("near"), relay("far")
    yield near, far
    near.close()
    far.close()


def odd() -> dict[str, torch.Tensor]:
    """Many small ones, empty ones, scalars, rows that are no multiple of anything."""
    torch.manual_seed(3)
    found = {f"small.{number}": torch.randn(number % 7 + 1).to(torch.bfloat16) for number in range(60)}
    found |= {"empty": torch.zeros(0, 5), "scalar": torch.tensor(2.5), "bytes": torch.randint(0, 255, (777,)).byte()}
    return found | {"rows": torch.randn(129, 67), "wide": torch.randn(3, 50_001)}


def assert_same(held: SlotVersion, weights: dict[str, torch.Tensor]) -> None:
    found = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    seen = dict.fromkeys(weights, 0)
    for shard, memory in zip(held.table.shards, held.sealed, strict=True):
        name = held.table.tensors[shard.tensor].name
        part = tuple(slice(start, stop) for start, stop in zip(shard.start, shard.stop, strict=True))
        found[name][part] = memory
        seen[name] += memory.numel()
    for name, weight in weights.items():
        assert torch.equal(found[name], weight), name
        assert seen[name] == weight.numel(), name


def filled(
    slots: Slots, slot: int, recorded: ProvenRecord, sources: list[SourceTable], seconds: float = 60.0
) -> SlotVersion:
    return slots.fill(slot, wish(recorded, 1, sources, everything=True), seconds)


def test_a_relay_offers_each_region_near_and_far(pair: tuple[Slots, Slots]) -> None:
    checkpoint = Checkpoint(TensorParallel(0, 1).checkpoint(), 1)
    table = filled(pair[0], 0, seal(checkpoint, []), tables(checkpoint)).table
    assert [[offer.transport for offer in region.offers] for region in table.regions] == [["relay_memory", "tcp"]]
    assert table.host.address == "127.0.0.1"
    again = filled(pair[0], 0, seal(checkpoint, []), tables(checkpoint)).table
    assert again == table, "nobody plans anew for the next version"


@pytest.mark.parametrize("size", [100, 5000, 16 << 20])
def test_every_shape_arrives_bit_for_bit(pair: tuple[Slots, Slots], monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(relay_batches, "LANDING_BYTES", size)
    near, far = pair
    weights = odd()
    checkpoint = Checkpoint(weights, 5)
    recorded = seal(checkpoint, [])
    first = filled(near, 0, recorded, tables(checkpoint))
    checkpoint.close()
    held = filled(far, 1, recorded, [first.table])
    assert (held.filled.missing, held.filled.faults, held.filled.again) == ((), (), 0)
    assert held.filled.bytes_by_source == {"relay near": held.layout.bytes}
    assert_same(held, weights)


def test_what_the_same_readers_need_travels_in_few_long_runs(
    pair: tuple[Slots, Slots], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    read = TcpLink.read
    monkeypatch.setattr(TcpLink, "read", lambda self, runs: asked.append(len(runs)) or read(self, runs))
    near, far = pair
    checkpoint = Checkpoint(odd(), None)
    recorded = seal(checkpoint, [])
    filled(far, 0, recorded, [filled(near, 0, recorded, tables(checkpoint)).table])
    assert asked == [1], "64 tensors with padding in between are one run"


@pytest.mark.parametrize("size", [1, 2])
def test_hosts_with_other_needs_take_their_parts(pair: tuple[Slots, Slots], tmp_path: Path, size: int) -> None:
    """The owner holds all of it for one rank, the reader what each of its ranks needs."""
    checkpoint = Checkpoint(TensorParallel(0, size).checkpoint(), 2)
    replica = Replica(checkpoint, tmp_path, size)
    recorded = seal(checkpoint, [replica])
    table = filled(pair[0], 0, recorded, tables(checkpoint)).table
    checkpoint.close()
    held = pair[1].fill(0, wish(recorded, 1, [table], [replica]), 60.0)
    assert (held.filled.missing, held.filled.faults) == ((), ())
    assert_installed(replica, replica.install(held.table, recorded, 1), recorded, checkpoint)


def test_a_damaged_byte_is_read_from_another_holder_or_left_out(pair: tuple[Slots, Slots]) -> None:
    near, far = pair
    checkpoint = Checkpoint(TensorParallel(0, 1).checkpoint(), 1)
    recorded = seal(checkpoint, [])
    first = filled(near, 0, recorded, tables(checkpoint))
    name = first.table.tensors[first.table.shards[0].tensor].name
    first.sealed[0].reshape(-1).view(torch.uint8)[0] ^= 1
    held = filled(far, 0, recorded, [first.table])
    (missing,) = held.filled.missing
    assert (missing.problem.code, list(missing.problem.tensors)) == (Problem.DATA_LOSS, [name])
    assert "at relay near has other bytes than were sealed" in missing.problem.message
    with contextlib.closing(relay("other")) as other:
        second = filled(other, 0, recorded, tables(checkpoint)).table
        held = filled(far, 0, recorded, [first.table, second])
    assert (held.filled.missing, held.filled.again) == ((), 1)
    assert set(held.filled.bytes_by_source) == {"relay near", "relay other"}
    assert_same(held, checkpoint.weights)


# ------------------------------------------------------------------------------------------------- owners that are gone


def test_an_owner_that_dies_in_the_middle_is_replaced_by_another(
    pair: tuple[Slots, Slots], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connections end after the first frames; everything else comes from the other, in one more pass."""
    monkeypatch.setattr(relay_batches, "LANDING_BYTES", 1000)
    near, far = pair
    checkpoint = Checkpoint(odd(), 4)
    recorded = seal(checkpoint, [])
    first = filled(near, 0, recorded, tables(checkpoint)).table
    with contextlib.closing(relay("other")) as other:
        second = filled(other, 0, recorded, tables(checkpoint)).table
        checkpoint.close()
        read, calls = TcpLink.read, [0]

        def reads(self: TcpLink, runs: list[ByteRun]) -> object:
            calls[0] += 1
            if calls[0] == 3:
                near.close()
            return read(self, runs)

        monkeypatch.setattr(TcpLink, "read", reads)
        held = filled(far, 0, recorded, [first, second])
    assert held.filled.missing == ()
    assert held.filled.again
    assert any("relay near" in fault.message for fault in held.filled.faults)
    assert_same(held, checkpoint.weights)


def test_who_is_gone_before_it_is_left_out_and_said_so(pair: tuple[Slots, Slots]) -> None:
    near, far = pair
    checkpoint = Checkpoint(odd(), None)
    recorded = seal(checkpoint, [])
    table = filled(near, 0, recorded, tables(checkpoint)).table
    near.close()
    with pytest.raises(CkptEngineError, match=r"relay near .*the relay at 127.0.0.1:\d+ cannot be reached") as caught:
        filled(far, 0, recorded, [table])
    assert caught.value.problem.code == Problem.NOT_FOUND


def test_an_owner_that_comes_back_is_read_again_at_the_next_filling(pair: tuple[Slots, Slots]) -> None:
    """Every connection is cut while nothing is asked; the next filling connects anew and nobody hears of it."""
    near, far = pair
    checkpoint = Checkpoint(odd(), None)
    recorded = seal(checkpoint, [])
    table = filled(near, 0, recorded, tables(checkpoint)).table
    filled(far, 0, recorded, [table])
    (lender,) = near._ways._lenders
    assert isinstance(lender, TcpArenaLender)
    for each in list(lender._connections):
        server.shut(each)
    held = filled(far, 0, recorded, [table])
    assert (held.filled.missing, held.filled.faults) == ((), ())
    assert_same(held, checkpoint.weights)


def test_an_owner_that_sends_nothing_is_a_timeout_with_its_name_and_address(
    pair: tuple[Slots, Slots], monkeypatch: pytest.MonkeyPatch
) -> None:
    near, far = pair
    checkpoint = Checkpoint(odd(), None)
    recorded = seal(checkpoint, [])
    table = filled(near, 0, recorded, tables(checkpoint)).table
    monkeypatch.setattr(connection, "STALL_SECONDS", 0.2)
    stopped = threading.Event()
    monkeypatch.setattr(sending.Sender, "send", lambda self, slot, runs: stopped.wait(60) and None)
    held = filled(far, 0, recorded, [table])
    stopped.set()
    assert len(held.filled.missing) == len([value for value in recorded.boxes if value])
    message = held.filled.missing[0].problem.message
    assert "relay near" in message
    assert "127.0.0.1:" in message
    assert not held.table.shards, "nothing of it is lent"


def test_a_filling_that_is_overtaken_leaves_nothing_that_could_still_land(
    pair: tuple[Slots, Slots], monkeypatch: pytest.MonkeyPatch
) -> None:
    near, far = pair
    checkpoint = Checkpoint(odd(), None)
    recorded = seal(checkpoint, [])
    table = filled(near, 0, recorded, tables(checkpoint)).table
    asked, silent = threading.Event(), threading.Event()
    monkeypatch.setattr(sending.Sender, "send", lambda self, slot, runs: asked.set() or (silent.wait(60) and None))
    over: list[CkptEngineError] = []

    def fill() -> None:
        try:
            filled(far, 0, recorded, [table])
        except CkptEngineError as error:
            over.append(error)

    filling = threading.Thread(target=fill)
    filling.start()
    assert asked.wait(60)
    far.stop()
    filling.join(60)
    alive = [lane for lane in lanes() if lane._thread.is_alive()]
    silent.set()
    assert not alive
    assert [error.problem.code for error in over] == [Problem.ABORTED]


def waiting(owner: Slots) -> int:
    """Readers that hold slot 0."""
    (lender,) = owner._ways._lenders
    assert isinstance(lender, TcpArenaLender)
    return len(lender._lendings._slots[0].held)


def eventually(is_so: Callable[[], bool]) -> None:
    stop_at = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < stop_at
        time.sleep(0.002)


# --------------------------------------------------------------------------------------------------- leases and tokens


def region_of(table: SourceTable) -> Region:
    (offer,) = [offer for offer in table.regions[0].offers if offer.transport == "tcp"]
    return Region(id=0, size=table.regions[0].size, transport="tcp", locator=offer.locator, source="relay near")


@pytest.fixture
def lent(pair: tuple[Slots, Slots]) -> tuple[Slots, Region]:
    checkpoint = Checkpoint(odd(), None)
    return pair[0], region_of(filled(pair[0], 0, seal(checkpoint, []), tables(checkpoint)).table)


def link_to(region: Region) -> tuple[TcpLink, torch.Tensor]:
    landing = torch.zeros(region.size, dtype=torch.uint8)
    return TcpFetcher().connect(region, landing, 10.0), landing


def test_a_slot_is_filled_again_once_its_readers_are_done(lent: tuple[Slots, Region]) -> None:
    owner, region = lent
    link, _ = link_to(region)
    link.hold(10.0)
    assert waiting(owner) == 1
    gone = threading.Thread(target=owner._ways.retire, args=(0,))
    gone.start()
    other, _ = link_to(region)
    with pytest.raises(CkptEngineError, match="another version is brought into it"):
        eventually(lambda: other.hold(10.0) or False)  # type: ignore[func-returns-value]
    assert gone.is_alive()
    link.rest()
    gone.join(60)
    assert not gone.is_alive()
    link.sever()
    other.sever()


def test_a_reader_that_was_overruled_is_told_so_and_reads_nothing_more() -> None:
    with contextlib.closing(relay("near", network=Network("127.0.0.1:0", "127.0.0.1", 0.0))) as owner:
        checkpoint = Checkpoint(odd(), None)
        region = region_of(filled(owner, 0, seal(checkpoint, []), tables(checkpoint)).table)
        link, landing = link_to(region)
        link.hold(10.0)
        assert owner._ways.retire(0) == 1
        ticket = link.read([ByteRun(0, 0, 4096)])
        with pytest.raises(CkptEngineError, match="has been given up: another one is brought") as caught:
            eventually(lambda: ticket.poll() == 4096)
        assert caught.value.problem.code == Problem.UNAVAILABLE
        assert not landing.any()
        link.rest()
        with pytest.raises(CkptEngineError, match="another version is brought into it"):
            link.hold(10.0)
        link.sever()


def test_what_is_overwritten_while_it_is_read_is_never_taken_for_what_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The owner waits for nobody and brings the next version after the first frames: the reader holds some of the old
    version, as it was sealed, and says of the rest that it is not there."""
    monkeypatch.setattr(relay_batches, "LANDING_BYTES", 1000)
    impatient = Network("127.0.0.1:0", "127.0.0.1", 0.0)
    with contextlib.closing(relay("near", network=impatient)) as near, contextlib.closing(relay("far")) as far:
        checkpoint = Checkpoint(odd(), None)
        old, before = seal(checkpoint, []), dict(checkpoint.weights)
        table = filled(near, 0, old, tables(checkpoint)).table
        checkpoint.weights = {name: (weight + 1).to(weight.dtype) for name, weight in before.items()}
        new = seal(checkpoint, [])
        read, calls = TcpLink.read, [0]

        def reads(self: TcpLink, runs: list[ByteRun]) -> object:
            calls[0] += 1
            if calls[0] == 8:
                filled(near, 0, new, tables(checkpoint))
            return read(self, runs)

        monkeypatch.setattr(TcpLink, "read", reads)
        held = filled(far, 0, old, [table])
        assert held.filled.missing
        codes = {each.problem.code for each in held.filled.missing}
        assert codes <= {Problem.DATA_LOSS, Problem.UNAVAILABLE}
        for shard, memory in zip(held.table.shards, held.sealed, strict=True):
            assert torch.equal(memory, before[held.table.tensors[shard.tensor].name])


def test_a_reader_that_dies_holds_nothing(lent: tuple[Slots, Region]) -> None:
    owner, region = lent
    link, _ = link_to(region)
    link.hold(10.0)
    link.sever()
    eventually(lambda: not waiting(owner))


@pytest.mark.parametrize("field", ["token", "arena", "slot"])
def test_who_did_not_get_the_table_reads_nothing(lent: tuple[Slots, Region], field: str) -> None:
    locator = TcpLocator.FromString(lent[1].locator)
    wrong = {"token": bytes(32), "arena": bytes(16), "slot": 1}
    setattr(locator, field, wrong[field])
    lent[1].locator = locator.SerializeToString()
    words = "has other memory by now" if field == "arena" else "has to show the token"
    with pytest.raises(CkptEngineError, match=f"the relay at 127.0.0.1:.* does not let us read: .*{words}"):
        link_to(lent[1])


def test_garbage_and_silence_cost_nobody_but_themselves(lent: tuple[Slots, Region]) -> None:
    owner, region = lent
    locator = TcpLocator.FromString(region.locator)
    host, port = locator.addresses[0].split(":")
    greeting = wire.hello(locator.slot, locator.arena, locator.token)
    said = [b"GET / HTTP/1.1\r\n" * 10, os.urandom(4096), greeting + os.urandom(24 * 40), greeting[:7]]
    said += [greeting + wire.question(wire.READ, bytes(16), [(0, 1 << 60)]), b""]
    strangers = []
    for each in said:
        strangers.append(socket.create_connection((host, int(port))))
        with contextlib.suppress(OSError):
            strangers[-1].sendall(each)
    link, landing = link_to(region)
    link.hold(10.0)
    ticket = link.read([ByteRun(0, 0, 4096)])
    eventually(lambda: ticket.poll() == 4096)
    assert landing.any()
    link.sever()
    for each in strangers:
        each.close()
    eventually(lambda: owner.readers == 0)


def test_a_reader_that_takes_nothing_holds_up_nobody(lent: tuple[Slots, Region]) -> None:
    owner, region = lent
    slow = [link_to(region)[0] for _ in range(2)]
    locator = TcpLocator.FromString(region.locator)
    deaf = connection.connect(locator, "near", time.monotonic() + 10)
    deaf.sendall(wire.question(wire.HOLD))
    _, size = wire.read_frame(connection.receive(deaf, wire.FRAME.size))
    lending = connection.receive(deaf, size)
    for _ in range(8):  # more than all buffers on the way take
        deaf.sendall(wire.question(wire.READ, lending, [(0, region.size)] * 8))
    link, _ = link_to(region)
    link.hold(10.0)
    ticket = link.read([ByteRun(0, 0, region.size)])
    eventually(lambda: ticket.poll() == region.size)
    for each in [link, *slow]:
        each.sever()
    deaf.close()
    eventually(lambda: owner.readers == 0)


def test_nothing_of_what_is_not_lent_is_asked_for_or_landed(lent: tuple[Slots, Region]) -> None:
    link, _ = link_to(lent[1])
    with pytest.raises(CkptEngineError, match="does not lend its slot"):
        link.read([ByteRun(0, 0, 1)])
    link.hold(10.0)
    for run in (
        ByteRun(-1, 0, 1),
        ByteRun(0, -1, 1),
        ByteRun(lent[1].size, 0, 1),
        ByteRun(0, lent[1].size, 1),
        ByteRun(0, 0, 0),
    ):
        with pytest.raises(CkptEngineError) as caught:
            link.read([run])
        assert caught.value.problem.code == Problem.INVALID_ARGUMENT
    link.sever()
    link.sever()
    with pytest.raises(CkptEngineError, match="was severed"):
        link.read([ByteRun(0, 0, 1)])


def test_a_severed_link_has_returned_only_when_nothing_can_land(
    lent: tuple[Slots, Region], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that receives is about to write: whoever severs waits for it."""
    link, landing = link_to(lent[1])
    link.hold(10.0)
    about, go = threading.Event(), threading.Event()
    receive = connection.receive_some

    def slow(found: socket.socket, into: memoryview) -> int:
        about.set()
        assert go.wait(60)
        return receive(found, into)

    monkeypatch.setattr(connection, "receive_some", slow)
    link.read([ByteRun(0, 0, lent[1].size)])
    assert about.wait(60)
    severing = threading.Thread(target=link.sever)
    severing.start()
    severing.join(0.1)
    assert severing.is_alive()
    go.set()
    severing.join(60)
    assert not severing.is_alive()
    as_it_was = landing.clone()
    assert not [lane for lane in lanes() if lane._thread.is_alive()]
    assert torch.equal(landing, as_it_was)


def test_fifty_fillings_leave_no_descriptor_and_no_thread(pair: tuple[Slots, Slots]) -> None:
    near, far = pair
    checkpoint = Checkpoint(odd(), None)
    recorded = seal(checkpoint, [])

    def fill(number: int) -> tuple[int, int]:
        table = filled(near, number % 2, recorded, tables(checkpoint)).table
        filled(far, number % 2, recorded, [table])
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    fill(0)
    descriptors, threads = fill(1)
    for number in range(50):
        last = fill(number)
    assert last[0] < descriptors + 10, "fifty would be left if each filling left one"
    assert last[1] < threads + 10


@pytest.mark.parametrize(
    ("listen", "words"),
    [("0.0.0.0:0", "what they are sent is not encrypted"), ("127.0.0.1", "--listen '127.0.0.1' is not an address")],
)
def test_where_a_relay_does_not_listen(listen: str, words: str) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(CkptEngineError, match=words):
        relay("near", network=Network(listen, "10.0.0.1", 5.0))
    assert len(os.listdir("/proc/self/fd")) <= before
    with contextlib.closing(relay("near", network=Network("0.0.0.0:0", "127.0.0.1", 5.0, insecure=True))) as open_one:
        (lender,) = open_one._ways._lenders
        assert isinstance(lender, TcpArenaLender)
        taken = Network(lender.address, "127.0.0.1", 5.0)
        with pytest.raises(CkptEngineError, match="cannot listen there") as caught:
            relay("second", network=taken)
    assert caught.value.problem.code == Problem.UNAVAILABLE
