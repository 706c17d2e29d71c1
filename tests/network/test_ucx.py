"""Reading a relay of another process over UCX on loopback: bit for bit, and nothing else."""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.relay.arena import Arena
from ckpt_engine.transport.base import ByteRun
from ckpt_engine.v1.ucx_pb2 import UcxLocator
from ckpt_engine.v1.weights_pb2 import Problem, Region
from tests.network.ucx_relay import Relay, fetched, pattern
from tests.network.ucx_world import NEEDS_NIXL, SLOT, Other, alive, until

pytestmark = [NEEDS_NIXL, pytest.mark.slow]


@pytest.fixture(scope="module")
def environment() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UCX_TLS", "tcp")
        yield


@pytest.fixture(scope="module")
def owner(environment: None) -> Iterator[Other]:
    with Other() as other:
        other("fill", slot=0, seed=1)
        yield other


@pytest.fixture(scope="module")
def reader(environment: None) -> Iterator[Relay]:
    relay = Relay(SLOT, ("lo",))
    yield relay
    relay.close()


def test_what_is_read_is_what_lies_there_and_nothing_else_is_written(owner: Other, reader: Relay) -> None:
    there, here = pattern(SLOT, 1), reader.slot(0)
    here.fill_(0xAB)
    link = reader.linked(owner.offered())
    runs = [
        ByteRun(0, 64, 1),
        ByteRun(1, 65, 4095),
        ByteRun(8192, 4161, 64 << 10),
        ByteRun(3 << 20, 1 << 20, (5 << 20) - 3),
    ]
    fetched(link, runs)
    expected = torch.full_like(here, 0xAB)
    for remote, local, length in runs:
        expected[local : local + length] = there[remote : remote + length]
    assert torch.equal(here, expected)
    link.sever()


def test_a_region_begins_where_its_owner_says(owner: Other, environment: None) -> None:
    with_two = Relay(SLOT, ("lo",))
    try:
        with_two.slot(1).copy_(pattern(SLOT, 5))
        region = with_two.lent(1, 4096, 1 << 20)
        link = with_two.linked(region, 0)
        fetched(link, [ByteRun(100, 0, 1000)])
        assert torch.equal(with_two.slot(0)[:1000], pattern(SLOT, 5)[4196:5196])
        with pytest.raises(CkptEngineError, match="are not in a region"):
            link.read([ByteRun(1 << 20, 0, 1)])
        with pytest.raises(CkptEngineError, match="are not in a landing"):
            link.read([ByteRun(0, SLOT, 1)])
    finally:
        with_two.close()


def test_the_same_offer_is_made_from_version_to_version(owner: Other) -> None:
    assert owner.offered() == owner.offered()


def test_all_regions_of_a_slot_are_one_registration(reader: Relay) -> None:
    offers = [reader.lender.offer(number, 1, number << 20, 4096) for number in range(3)]
    lanes = [UcxLocator.FromString(offer.locator).lanes for offer in offers]
    assert lanes[0] == lanes[1] == lanes[2]
    assert [UcxLocator.FromString(offer.locator).offset - SLOT for offer in offers] == [0, 1 << 20, 2 << 20]


def test_a_slot_that_is_not_lent_is_not_read(owner: Other, reader: Relay) -> None:
    link = reader.linked(owner.offered())
    owner("refuse", slot=0)
    with pytest.raises(CkptEngineError, match="does not lend that memory now") as refused:
        link.hold(30.0)
    assert refused.value.problem.code == Problem.UNAVAILABLE
    owner.offered()
    link.hold(30.0)
    fetched(link, [ByteRun(0, 0, 64)])
    link.sever()


def test_no_peer_could_write_to_what_is_lent(owner: Other, reader: Relay) -> None:
    owner.offered()
    (helper,) = owner("facts")["helpers"]
    lines = Path(f"/proc/{helper}/maps").read_text().splitlines()
    assert [line.split()[1] for line in lines if "memfd:ckpt-engine" in line] == ["r--s", "r--s"]


def test_helpers_leave_the_arena_sealed(reader: Relay) -> None:
    descriptor = reader.arena.descriptor
    assert fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & 0x10
    with pytest.raises(PermissionError):
        mmap.mmap(descriptor, SLOT, flags=mmap.MAP_SHARED)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda locator: locator.lanes[0].__setattr__("metadata", b"no metadata"), "UCX"),
        (lambda locator: locator.lanes[0].__setattr__("metadata", locator.lanes[0].metadata[:60]), "UCX|helper"),
        (lambda locator: locator.__setattr__("token", b"short"), "names no memory"),
        (lambda locator: locator.ClearField("lanes"), "names no memory"),
        (lambda locator: locator.lanes[0].__setattr__("board", 1 << 20), "UCX|helper"),
        (lambda locator: locator.lanes[0].__setattr__("memory", (1 << 64) - 1), "names no memory"),
        (lambda locator: locator.lanes[0].__setattr__("metadata", bytes(1 << 20)), "names no memory"),
    ],
    ids=["metadata", "half", "token", "lanes", "address", "beyond", "large"],
)
def test_a_locator_that_is_wrong_costs_a_link_and_nothing_else(
    owner: Other, reader: Relay, spoil: object, said: str
) -> None:
    region = owner.offered()
    locator = UcxLocator.FromString(region.locator)
    assert callable(spoil)
    spoil(locator)
    wrong = Region(id=1, transport="ucx", size=region.size, locator=locator.SerializeToString())
    with pytest.raises(CkptEngineError, match=said):
        reader.linked(wrong)
    fetched(reader.linked(region), [ByteRun(0, 0, 64)])


def test_descriptors_and_helpers_stay_as_many_over_fifty_reads(owner: Other, reader: Relay) -> None:
    region = owner.offered()

    def counted() -> tuple[int, ...]:
        pids = [os.getpid(), *reader.lanes.helpers, *owner("facts")["helpers"]]
        return tuple(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids)

    def once() -> None:
        link = reader.linked(region)
        fetched(link, [ByteRun(0, 0, 3 << 20), ByteRun(4 << 20, 4 << 20, 1000)])
        link.sever()

    once()
    before = counted()
    for _ in range(50):
        once()
    assert counted() == before


def test_landing_memory_that_is_no_arenas_is_refused(owner: Other, reader: Relay) -> None:
    with pytest.raises(CkptEngineError, match="into a relay's memory only"):
        reader.fetcher.connect(owner.offered(), torch.zeros(SLOT, dtype=torch.uint8), 5.0)


def test_devices_that_do_not_exist_are_found_at_the_start(environment: None) -> None:
    with pytest.raises(CkptEngineError, match="UCX cannot be used"):
        Relay(1 << 22, ("nowhere7",))


def test_an_arena_without_ucx_starts_no_process() -> None:
    arena = Arena(1 << 22)
    assert not arena.writers
    arena.close()


def test_nothing_is_left_when_a_relay_closes(environment: None, owner: Other) -> None:
    relay = Relay(SLOT, ("lo",))
    relay.linked(owner.offered())
    relay.lent(1)
    pids = [relay.lanes.fork_server, *relay.lanes.helpers]
    assert len(pids) == 3
    relay.close()
    relay.close()
    until(lambda: not [pid for pid in pids if alive(pid)])
