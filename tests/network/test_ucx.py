"""Chunks that UCX carries, on loopback: bit for bit, and nothing else; what could still write is killed first."""

from __future__ import annotations

import fcntl
import mmap
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from ckpt_engine.core.problems import CkptEngineError, aborted
from ckpt_engine.relay.arena import Arena
from ckpt_engine.transport.base import ChunkAsk
from ckpt_engine.transport.tcp import wire
from ckpt_engine.transport.ucx import link as link_module
from ckpt_engine.transport.ucx.helpers import Helper
from ckpt_engine.transport.ucx.lanes import UcxLanes
from ckpt_engine.transport.ucx.link import UcxLink
from ckpt_engine.v1.ucx_pb2 import UcxLocator
from ckpt_engine.v1.weights_pb2 import OfferedRegion, Problem
from tests.network.chunk_owner import CHUNKS, KEY, LOOPBACK, RANDOM, SLOT_BYTES, Asking, Owner
from tests.network.ucx_world import NEEDS_NIXL, Other, alive, until

pytestmark = [NEEDS_NIXL, pytest.mark.slow]

MARK = 0xAB


@pytest.fixture(scope="module", autouse=True)
def environment() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UCX_TLS", "tcp")
        yield


@pytest.fixture
def other() -> Iterator[Other]:
    with Other() as found:
        yield found


@pytest.fixture(scope="module")
def far(environment: None) -> Iterator[Owner]:
    with Owner(devices=("lo",)) as found:
        yield found


@pytest.fixture
def asking(other: Other, far: Owner) -> Iterator[Asking]:
    """Asks the other process; chunks land in slot 1."""
    far.slot(1).fill_(MARK)
    with Asking(other.lent(), landing=far.slot(1)) as found:
        yield found


@pytest.fixture
def carried(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The slots of owners from which chunks were carried."""
    found: list[int] = []
    read = UcxLink.read

    def noted(self: UcxLink, slot: int, *arguments: object) -> object:
        reading = read(self, slot, *arguments)  # type: ignore[arg-type]
        found.append(slot)
        return reading

    monkeypatch.setattr(UcxLink, "read", noted)
    return found


def lanes_of(owner: Owner) -> UcxLanes:
    (lanes,) = owner.arena.carriers
    assert isinstance(lanes, UcxLanes)
    return lanes


def readers(owner: Owner) -> list[int]:
    """The helpers with which it reads."""
    lanes = lanes_of(owner)
    return [pid for pid in lanes.helpers if pid not in [each.pid for each in lanes._lenders]]


def lender(other: Other) -> int:
    """The helper of the other process that lends."""
    (pid,) = other("facts")["helpers"]
    return int(pid)


def only(chunks: list[int]) -> torch.Tensor:
    """A slot in which only these chunks have landed."""
    found = torch.full((SLOT_BYTES,), MARK, dtype=torch.uint8)
    for chunk in chunks:
        for at, size in CHUNKS[chunk]:
            found[at : at + size] = RANDOM[at : at + size]
    return found


def test_what_is_carried_is_what_lies_there_and_nothing_else_is_written(
    other: Other, asking: Asking, far: Owner, carried: list[int]
) -> None:
    for chunk in (3, 1, 2):
        asking.asker.ask(chunk)
    for chunk in (3, 1, 2):
        assert asking.receive(chunk) == ""
    assert torch.equal(asking.landing, only([1, 2, 3]))
    assert len(carried) == 3
    until(lambda: other("facts")["held"] == 0)
    assert len(readers(far)) == 1
    assert sum(flow.bytes for flow in asking.asker.flows) == sum(size for each in (1, 2, 3) for _, size in CHUNKS[each])
    assert asking.asker.end()
    asking.asker.begin(KEY, 0, far.slot(0).numpy().data)
    before = readers(far)
    runs = [(7, 5), (100, (1 << 20) - 5)]
    assert asking.get(0, runs=runs) == "", "another slot, another layout, the same helper"
    assert torch.equal(torch.cat([far.slot(0)[at : at + size] for at, size in runs]), RANDOM[: 1 << 20])
    assert readers(far) == before
    with pytest.raises(CkptEngineError) as caught:
        asking.get(9, runs=[(0, 1)])
    assert caught.value.problem.code == Problem.CODE_NOT_FOUND
    assert len(carried) == 4


def test_fifty_chunks_leave_no_descriptor_and_no_helper(asking: Asking, far: Owner) -> None:
    def counted() -> list[int]:
        return [len(os.listdir(f"/proc/{pid}/fd")) for pid in (os.getpid(), *readers(far))]

    asking.get(2)
    before = counted()
    for _ in range(50):
        asking.get(2)
    # What an earlier test of this process left to the garbage collector may be closed meanwhile: fewer is no leak.
    assert all(now <= earlier for now, earlier in zip(counted(), before, strict=True)), (counted(), before)
    asking.asker.close()
    assert not readers(far)


def test_without_a_carrier_on_either_side_chunks_come_over_tcp(other: Other, far: Owner, carried: list[int]) -> None:
    offered = other.lent()
    with Asking(offered) as elsewhere:
        assert elsewhere.get(2) == ""
    with Owner(LOOPBACK) as plain:
        plain.lend()
        with Asking(plain.offered, landing=far.slot(1)) as of_plain:
            assert of_plain.get(2) == ""
    assert not carried


@pytest.mark.parametrize("stopped", ["owner", "reader"])
def test_a_helper_that_hangs_costs_its_chunk_and_is_killed(
    other: Other, asking: Asking, far: Owner, monkeypatch: pytest.MonkeyPatch, stopped: str
) -> None:
    """What was asked for after it comes over TCP as well, in its order, and the slot is given back."""
    assert asking.get(1) == ""
    (helper,) = readers(far)
    monkeypatch.setattr(link_module, "STALL_SECONDS", 0.3)
    os.kill(helper if stopped == "reader" else lender(other), signal.SIGSTOP)
    for chunk, how in ((3, ChunkAsk.GRANT), (9, ChunkAsk.WAIT), (2, ChunkAsk.WAIT), (0, ChunkAsk.GRANT)):
        asking.asker.ask(chunk, how)
    assert asking.receive(3) == ""
    assert not alive(helper), "before its memory is written otherwise"
    with pytest.raises(CkptEngineError, match="chunk 9 is not among those"):
        asking.receive(9, [(0, 1)])
    assert asking.receive(2) == ""
    assert asking.receive(0) == ""
    assert torch.equal(asking.landing, only([0, 1, 2, 3]))
    until(lambda: other("facts")["held"] == 0)
    assert asking.asker.end()
    monkeypatch.setattr(link_module, "STALL_SECONDS", 60.0)
    if stopped == "reader":
        asking.asker.begin(KEY, 1, far.slot(1).numpy().data)
        assert asking.get(3) == ""
        assert len(readers(far)) == 1, "the next filling tries a helper again"


def interrupted(asking: Asking, monkeypatch: pytest.MonkeyPatch, other: Other) -> None:
    """A filling ends while a chunk is on its way and the owner is stopped."""
    assert asking.get(1) == ""
    os.kill(lender(other), signal.SIGSTOP)
    monkeypatch.setattr(link_module, "STALL_SECONDS", 0.3)
    poll = link_module.UcxChunk.poll

    def polled(self: link_module.UcxChunk) -> int:
        poll(self)
        raise AssertionError("the filling ends here")

    with monkeypatch.context() as patch:
        patch.setattr(link_module.UcxChunk, "poll", polled)
        with pytest.raises(AssertionError):
            asking.get(3)
    asking.asker.close()


def is_written(asking: Asking, other: Other, seconds: float) -> bool:
    asking.landing.fill_(MARK)
    os.kill(lender(other), signal.SIGCONT)
    try:
        until(lambda: not bool((asking.landing == MARK).all()), seconds)
    except AssertionError:
        return False
    return True


def test_nothing_lands_once_an_asker_is_closed(
    other: Other, asking: Asking, far: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted(asking, monkeypatch, other)
    assert not readers(far)
    assert not is_written(asking, other, 0.5)


def test_it_would_land_if_its_helper_were_not_killed(
    other: Other, asking: Asking, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test before this one can fail: what was asked for does land when the helper lives on."""
    with monkeypatch.context() as patch:
        patch.setattr(Helper, "kill", lambda helper, why="": None)
        interrupted(asking, monkeypatch, other)
        assert is_written(asking, other, 60.0)


def test_a_filling_that_is_replaced_ends_at_once(asking: Asking, far: Owner) -> None:
    def moved() -> None:
        raise aborted("a newer command")

    asking.asker.ask(3)
    with pytest.raises(CkptEngineError, match="a newer command"):
        asking.asker.receive(3, CHUNKS[3], moved)
    assert not asking.asker.end()
    asking.asker.close()
    assert not readers(far)


def test_an_owner_that_was_killed_leaves_no_helper_and_ends_the_connection(
    other: Other, asking: Asking, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert asking.get(1) == ""
    facts = other("facts")
    pids = [facts["fork_server"], *facts["helpers"]]
    os.kill(facts["helpers"][0], signal.SIGSTOP)  # even one that hangs goes with its relay
    poll = link_module.UcxChunk.poll

    def polled(self: link_module.UcxChunk) -> int:
        other.kill()
        return poll(self)

    monkeypatch.setattr(link_module.UcxChunk, "poll", polled)

    def ask_until_it_ends() -> None:
        # One may have landed by the time at which its owner is killed.
        for _ in range(20):
            asking.get(3)

    with pytest.raises(CkptEngineError) as caught:
        ask_until_it_ends()
    assert caught.value.problem.code == Problem.CODE_UNAVAILABLE
    until(lambda: not any(alive(pid) for pid in pids))


def test_without_the_process_that_makes_helpers_chunks_come_over_tcp(other: Other, carried: list[int]) -> None:
    with Owner(devices=("lo",)) as far:
        lanes = lanes_of(far)
        os.kill(lanes.fork_server, signal.SIGKILL)
        lanes._server._process.wait()
        with Asking(other.lent(), landing=far.slot(1)) as asking:
            assert asking.get(3) == ""
            assert torch.equal(asking.landing[3 << 20 : 12 << 20], RANDOM[3 << 20 : 12 << 20])
    assert not carried


@pytest.mark.parametrize(
    "spoil",
    [
        lambda locator: locator.lanes[0].__setattr__("metadata", b"no metadata"),
        lambda locator: locator.lanes[0].__setattr__("metadata", locator.lanes[0].metadata[:60]),
        lambda locator: locator.__setattr__("slot_bytes", 0),
        lambda locator: locator.__setattr__("slot_bytes", 1 << 40),
        lambda locator: locator.ClearField("lanes"),
        lambda locator: locator.lanes[0].__setattr__("memory", 1 << 20),
        lambda locator: locator.lanes[0].__setattr__("memory", (1 << 64) - 1),
        lambda locator: locator.lanes[0].__setattr__("metadata", bytes(1 << 20)),
    ],
    ids=["metadata", "half", "slots", "wide", "lanes", "address", "beyond", "large"],
)
def test_a_locator_that_is_wrong_costs_nothing_but_ucx(
    other: Other, far: Owner, spoil: Callable[[UcxLocator], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_module, "STALL_SECONDS", 2.0)
    offered = OfferedRegion.FromString(other.lent().SerializeToString())
    (offer,) = [each for each in offered.offers if each.transport == "ucx"]
    locator = UcxLocator.FromString(offer.locator)
    spoil(locator)
    offer.locator = locator.SerializeToString()
    far.slot(1).fill_(MARK)
    with Asking(offered, landing=far.slot(1)) as asking:
        assert asking.get(3) == ""
        assert torch.equal(asking.landing, only([3]))


def test_an_owner_that_names_memory_which_it_does_not_have(
    other: Other, asking: Asking, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in (
        wire.PlacedRuns(7, [(0, 9 << 20)]),
        wire.PlacedRuns(0, [(0, 1)]),
        wire.PlacedRuns(0, [(0, 10 << 20)]),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(wire, "read_place", lambda data, place=place: place)
            assert asking.get(3) == "", "over TCP"
        assert asking.asker.end()
        asking.asker.begin(KEY, 1, asking.landing.numpy().data)


def test_no_peer_could_write_to_what_is_lent(other: Other) -> None:
    other.lent()
    lines = Path(f"/proc/{lender(other)}/maps").read_text().splitlines()
    assert [line.split()[1] for line in lines if "memfd:ckpt-engine" in line] == ["r--s"]


def test_helpers_leave_the_arena_sealed_and_the_offer_stays_the_same(far: Owner) -> None:
    descriptor = far.arena.descriptor
    assert fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & 0x10
    with pytest.raises(PermissionError):
        mmap.mmap(descriptor, SLOT_BYTES, flags=mmap.MAP_SHARED)
    assert far.offered == far.offered


def test_a_lender_that_ended_is_replaced_by_another(other: Other, far: Owner, carried: list[int]) -> None:
    first = other.lent()
    os.kill(lender(other), signal.SIGKILL)
    with Asking(first, landing=far.slot(1)) as asking:
        assert asking.get(3) == "", "over TCP"
    assert not carried
    again = other.lent()
    assert again != first
    with Asking(again, landing=far.slot(1)) as asking:
        assert asking.get(3) == ""
    assert carried == [0]


def test_devices_that_do_not_exist_are_found_at_the_start(environment: None) -> None:
    with pytest.raises(CkptEngineError, match="UCX cannot be used"):
        Owner(devices=("nowhere7",))


def test_an_arena_whose_cards_register_it_takes_all_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where there is InfiniBand: the kernel pins what is registered."""
    from functools import partial

    from ckpt_engine.transport.ucx import lanes

    monkeypatch.setattr(lanes, "has_rdma", lambda: True)
    arena = Arena(2 * SLOT_BYTES, carriers=[partial(lanes.lanes_on, devices=("lo",))])
    assert arena.reserved == arena.size
    arena.close()
    plain = Arena(2 * SLOT_BYTES)
    assert (plain.carriers, plain.reserved) == ((), 0)
    plain.close()


def test_nothing_is_left_when_a_relay_closes(other: Other) -> None:
    far = Owner(devices=("lo",))
    asking = Asking(other.lent(), landing=far.slot(1))
    assert asking.get(1) == ""
    lanes = lanes_of(far)
    pids = [lanes.fork_server, *lanes.helpers]
    assert len(pids) == 3
    for _ in range(2):
        far.lender.close()
        far.arena.close()
    until(lambda: not [pid for pid in pids if alive(pid)])
    asking.asker.close()
