"""UCX when processes die, stop and come back: a read ends, and what could still write is killed before it counts."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator

import pytest

from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.transport.base import ByteRun
from ckpt_engine.transport.ucx.helpers import Helper
from ckpt_engine.transport.ucx.reader import UcxFetcher, UcxLink, UcxTicket
from ckpt_engine.v1.weights_pb2 import Problem
from tests.network.ucx_relay import Relay, fetched, pattern
from tests.network.ucx_world import NEEDS_NIXL, SLOT, Other, alive, until

pytestmark = [NEEDS_NIXL, pytest.mark.slow]

MARK = 0xAB
WHOLE = [ByteRun(0, 0, SLOT)]


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")


@pytest.fixture
def owner(environment: None) -> Iterator[Other]:
    with Other() as other:
        other("fill", slot=0, seed=1)
        yield other


@pytest.fixture
def reader(environment: None) -> Iterator[Relay]:
    relay = Relay(SLOT, ("lo",), stall=60.0)
    yield relay
    relay.close()


def reading(relay: Relay) -> list[int]:
    """The helpers with which it reads."""
    return [peer.helper.pid for peer in relay.lanes._peers.values()]


def failed(ticket: UcxTicket) -> CkptEngineError:
    """What a read fails with."""
    end = time.monotonic() + 60.0
    while time.monotonic() < end:
        try:
            ticket.poll()
        except CkptEngineError as error:
            return error
        time.sleep(0.01)
    raise AssertionError("the read neither failed nor stalled")


def hasty(owner: Other, reader: Relay) -> UcxLink:
    """A link that waits for nothing long. On a busy machine the owner is not always in time to connect."""
    reader.fetcher, patient = UcxFetcher(0.3), reader.fetcher
    try:
        for _ in range(20):
            with contextlib.suppress(CkptEngineError):
                return reader.linked(owner.offered())
        return reader.linked(owner.offered())
    finally:
        reader.fetcher = patient


def stalled(owner: Other, reader: Relay) -> tuple[UcxLink, UcxTicket, int]:
    """A read whose owner was stopped before it could answer; its owner's helper."""
    link = hasty(owner, reader)
    (lender,) = owner("facts")["helpers"]
    os.kill(lender, signal.SIGSTOP)
    ticket = link.read(WHOLE)
    assert failed(ticket).problem.code == Problem.DEADLINE_EXCEEDED
    return link, ticket, lender


def is_written_when_the_owner_goes_on(reader: Relay, link: UcxLink, lender: int, seconds: float) -> bool:
    link.sever()
    here = reader.slot(0)
    here.fill_(MARK)
    os.kill(lender, signal.SIGCONT)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if not bool((here == MARK).all()):
            return True
        time.sleep(0.02)
    return False


def test_a_read_that_was_severed_never_lands(owner: Other, reader: Relay) -> None:
    link, ticket, lender = stalled(owner, reader)
    (helper,) = reading(reader)
    assert not is_written_when_the_owner_goes_on(reader, link, lender, 0.5)
    assert not alive(helper)
    with pytest.raises(CkptEngineError, match="severed"):
        ticket.poll()


def test_it_would_land_if_its_helper_were_not_killed(
    owner: Other, reader: Relay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test before this one can fail: what was asked for does land when the helper lives on."""
    link, _, lender = stalled(owner, reader)
    with monkeypatch.context() as patch:
        patch.setattr(Helper, "kill", lambda helper, why="": None)
        assert is_written_when_the_owner_goes_on(reader, link, lender, 60.0)


def test_an_owner_that_was_stopped_for_a_moment_goes_on(owner: Other, environment: None) -> None:
    patient = Relay(SLOT, ("lo",))
    try:
        link = patient.linked(owner.offered())
        (lender,) = owner("facts")["helpers"]
        os.kill(lender, signal.SIGSTOP)
        ticket = link.read(WHOLE)
        for _ in range(20):
            assert ticket.poll() < SLOT
            time.sleep(0.01)
        os.kill(lender, signal.SIGCONT)
        until(lambda: ticket.poll() == SLOT)
        assert bool((patient.slot(0) == pattern(SLOT, 1)).all())
    finally:
        patient.close()


def test_a_helper_that_hangs_is_killed_and_the_next_has_another_name(owner: Other, reader: Relay) -> None:
    link, region = hasty(owner, reader), owner.offered()
    (first,) = reading(reader)
    (name,) = [peer.helper.name for peer in reader.lanes._peers.values()]
    os.kill(first, signal.SIGSTOP)
    ticket = link.read(WHOLE)
    assert failed(ticket).problem.code == Problem.DEADLINE_EXCEEDED
    link.sever()
    until(lambda: not alive(first))
    fetched(reader.linked(region), WHOLE)
    assert bool((reader.slot(0) == pattern(SLOT, 1)).all())
    assert name not in [peer.helper.name for peer in reader.lanes._peers.values()]


def test_an_owner_that_was_killed_leaves_no_helper_and_fails_the_read(owner: Other, reader: Relay) -> None:
    link, region = hasty(owner, reader), owner.offered()
    facts = owner("facts")
    pids = [facts["fork_server"], *facts["helpers"]]
    assert len(pids) == 2
    os.kill(facts["helpers"][0], signal.SIGSTOP)  # even one that hangs goes with its relay
    ticket = link.read(WHOLE)
    owner.kill()
    until(lambda: not any(alive(pid) for pid in pids))
    assert failed(ticket).problem.code in (Problem.UNAVAILABLE, Problem.DEADLINE_EXCEEDED)
    link.sever()
    with pytest.raises(CkptEngineError):
        reader.linked(region, seconds=5.0)
    assert not [each for each in reader.lanes._peers.values() if each.links]


def test_one_owner_that_hangs_costs_nothing_of_another(owner: Other, reader: Relay) -> None:
    with Other() as second:
        second("fill", slot=0, seed=2)
        well = reader.linked(second.offered(), slot=1)
        link, _, lender = stalled(owner, reader)
        ticket = well.read(WHOLE)
        link.sever()
        until(lambda: ticket.poll() == SLOT)
        assert bool((reader.slot(1) == pattern(SLOT, 2)).all())
        os.kill(lender, signal.SIGCONT)


def test_an_owners_helper_that_ended_comes_back_as_another(owner: Other, reader: Relay) -> None:
    region = owner.offered()
    link = reader.linked(region)
    (lender,) = owner("facts")["helpers"]
    os.kill(lender, signal.SIGKILL)
    until(lambda: not alive(lender))
    with pytest.raises(CkptEngineError):
        link.hold(10.0)
    link.sever()
    again = owner.offered()
    assert again.locator != region.locator
    fetched(reader.linked(again), WHOLE)
    assert bool((reader.slot(0) == pattern(SLOT, 1)).all())


def test_without_the_process_that_makes_helpers_there_is_no_ucx_and_a_reason(owner: Other, reader: Relay) -> None:
    region = owner.offered()
    reader.linked(region)
    pids = [reader.lanes.fork_server, *reader.lanes.helpers]
    os.kill(reader.lanes.fork_server, signal.SIGKILL)
    reader.lanes._server._process.wait()
    until(lambda: not any(alive(pid) for pid in pids[1:]))
    with pytest.raises(CkptEngineError, match="helper") as refused:
        reader.linked(region)
    assert refused.value.problem.code == Problem.UNAVAILABLE
