"""A lease ends at both ends, whoever lets go and however they die; owners in processes of their own."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.transport.cuda_ipc.lease import Lease, LeaseOffice, fetch_descriptors
from ckpt_engine.v1.weights_pb2 import Problem
from tests.transport.lease_owner import Owner

WAIT_SECONDS = 60.0


def until(condition: Callable[[], object]) -> None:
    stop_at = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < stop_at
        time.sleep(0.01)


def test_a_reader_that_closes_or_is_killed_is_no_reader_any_more() -> None:
    with Owner() as owner:
        name = owner.ask(open=0)
        ended = threading.Event()
        leases = [Lease(name, ended.set) for _ in range(3)]
        until(lambda: owner.ask(readers=True) == 3)
        leases[0].close()
        until(lambda: owner.ask(readers=True) == 2)
        assert not ended.is_set()
        assert owner.ask(withdraw=WAIT_SECONDS) == ""
        assert ended.wait(WAIT_SECONDS)
        with pytest.raises(CkptEngineError, match="ended or withdrawn it"):
            Lease(name, ended.set)


def test_nobody_comes_in_once_it_is_withdrawn() -> None:
    """Also before the office's thread has heard of it."""
    for _ in range(20):
        office = LeaseOffice()
        office.withdraw(WAIT_SECONDS)
        with pytest.raises(CkptEngineError, match="ended or withdrawn it"):
            Lease(office.name, lambda: None)


def test_withdrawing_waits_until_readers_have_let_go() -> None:
    with Owner() as owner:
        name = owner.ask(open=0)
        asked, may_go = threading.Event(), threading.Event()

        def let_go() -> None:
            asked.set()
            may_go.wait(WAIT_SECONDS)

        Lease(name, let_go)
        until(lambda: owner.ask(readers=True) == 1)
        assert "1 readers still map" in owner.ask(withdraw=0.05)
        owner.send(withdraw=WAIT_SECONDS)
        assert asked.wait(WAIT_SECONDS)
        may_go.set()
        assert owner.answer() == ""


@pytest.mark.parametrize("forked", [False, True], ids=["alone", "with a forked child that lives on"])
def test_an_owner_that_is_killed_is_noticed(forked: bool) -> None:
    with Owner() as owner:
        name = owner.ask(open=0)
        ended = threading.Event()
        lease = Lease(name, ended.set)
        until(lambda: owner.ask(readers=True) == 1)
        child = owner.ask(fork=True) if forked else 0
        try:
            os.kill(owner.process.pid, signal.SIGKILL)
            assert ended.wait(WAIT_SECONDS)
        finally:
            if child:
                os.kill(child, signal.SIGKILL)
        lease.close()


def test_a_lease_that_was_closed_calls_nobody() -> None:
    with Owner() as owner:
        ended = threading.Event()
        lease = Lease(owner.ask(open=0), ended.set)
        until(lambda: owner.ask(readers=True) == 1)
        lease.close()
        until(lambda: owner.ask(readers=True) == 0)
        owner.kill()
        assert not ended.is_set()


def test_descriptors_come_in_order_and_none_is_left_open() -> None:
    with Owner() as owner:
        name = owner.ask(open=150)
        gc.collect()  # what earlier tests have dropped must not be counted, and go, in between
        before = descriptors()
        found = []
        for descriptor in fetch_descriptors(name, 5, 150):
            found.append(os.pread(descriptor, 20, 0).decode())
            os.close(descriptor)
        assert found == [f"5.{part}" for part in range(150)]
        stopped = fetch_descriptors(name, 5, 150)
        os.close(next(stopped))
        stopped.close()
        gc.collect()
        assert descriptors() == before
        until(lambda: owner.ask(readers=True) == 0)


def test_what_cannot_be_handed_out_says_why() -> None:
    with Owner() as owner:
        name = owner.ask(open=3)
        with pytest.raises(CkptEngineError, match="another number") as caught:
            [os.close(descriptor) for descriptor in fetch_descriptors(name, 0, 4)]
        assert caught.value.problem.code == Problem.CODE_DATA_LOSS
        with pytest.raises(CkptEngineError, match="no descriptors") as caught:
            next(fetch_descriptors(owner.ask(open=0), 0, 1))
        assert caught.value.problem.code == Problem.CODE_UNAVAILABLE


def descriptors() -> int:
    gc.collect()  # what earlier tests of this process left is closed before we count
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
@pytest.mark.parametrize(("user", "answered"), [(0, True), (65534, False)], ids=["owner's user", "stranger"])
def test_another_user_gets_nothing(user: int, answered: bool) -> None:
    """Neither memory, nor a place among the readers for which withdrawing waits."""
    with Owner() as owner:
        name = owner.ask(open=1)
        child = os.fork()
        if child == 0:
            status = 2
            try:
                os.setuid(user)
                with contextlib.closing(fetch_descriptors(name, 5, 1)) as found:
                    status = 0 if os.pread(next(found), 20, 0) == b"5.0" else 3
            except CkptEngineError:
                status = 1
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == (0 if answered else 1)
        until(lambda: owner.ask(readers=True) == 0)
