"""The manager that leads is killed or stopped in the middle of an update: the next one ends it, as the same version."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from plain_replica import PlainReplica
from trainer_world import DEADLINES

from ckpt_engine import Trainer
from ckpt_engine.client import Client
from tests.postgresql import Server
from tests.shared_ledger import Manager, roles, two_managers
from tests.waiting import PATIENCE, eventually

KILL, STOP = signal.SIGKILL, signal.SIGSTOP
FAULTS = [
    pytest.param("preparing", KILL, marks=pytest.mark.slow, id="killed while preparing"),
    pytest.param("sealing", KILL, marks=pytest.mark.slow, id="killed while sealing"),
    pytest.param("reading", KILL, id="killed while reading"),  # after the commit
    pytest.param(
        "reported", KILL, marks=pytest.mark.slow, id="killed while reported"
    ),  # the replica serves it, and its outcome is not told
    pytest.param("sealing", STOP, marks=pytest.mark.slow, id="stopped while sealing"),
    pytest.param("reading", STOP, marks=pytest.mark.slow, id="stopped while reading"),
]


@pytest.fixture
def pair(postgresql: Server, tmp_path: Path) -> Iterator[list[Manager]]:
    with two_managers(postgresql.new_database(), tmp_path) as made:
        roles(made)
        yield made


class Once:
    """Does something the first time that it is called after `arm`."""

    def __init__(self, do: Callable[[], object]) -> None:
        self._do, self._armed, self.done_at = do, False, 0.0

    def arm(self) -> None:
        self._armed = True

    def __call__(self) -> None:
        if self._armed:
            self._armed = False
            self._do()
            self.done_at = time.monotonic()


@pytest.mark.parametrize(("stage", "fault"), FAULTS)
def test_an_update_ends_although_its_manager_is_lost(pair: list[Manager], stage: str, fault: signal.Signals) -> None:
    address = ",".join(each.address for each in pair)
    lost: list[Manager] = []

    def lose() -> None:
        lost.append(roles(pair)[0])
        lost[0].send(fault)

    kill = Once(lose)
    weights = {"weight": torch.zeros(64, 64)}
    seals = 0

    def published() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal seals
        seals += 1
        if stage == "sealing":
            kill()
        yield from weights.items()

    replica = PlainReplica(address)
    if stage == "preparing":
        replica.before_preparing = kill
    elif stage == "reading":
        replica.before_reading = kill
    elif stage == "reported":
        read = replica._read

        def then_kill(order: object) -> object:
            outcome = read(order)  # type: ignore[arg-type]
            kill()
            return outcome

        replica._read = then_kill  # type: ignore[method-assign,assignment]
    replica.start()
    try:
        with Trainer(address, rank=0, world_size=1, lineage="run", deadlines=DEADLINES) as trainer:
            trainer.publish(published)
            trainer.wait_for_replicas(1, timeout=120)
            if stage != "preparing":  # which only the first update does
                assert trainer.update_weights(timeout=120).ok
            before = -1 if stage == "preparing" else 0
            weights["weight"] += 1
            seals = 0
            kill.arm()
            report = trainer.update_weights(timeout=300)
            print(f"{fault.name} while {stage}: the update ended {time.monotonic() - kill.done_at:.1f} s later")
            assert lost, "the leader was lost"
            assert report.ok, report
            assert report.version == before + 1, "it is the same version, not one more"
            if stage in ("reading", "reported"):
                assert seals == 1, "what was committed is not sealed again"
            assert torch.equal(replica.weights["weight"], weights["weight"].to(replica.weights["weight"].dtype))
            if fault == STOP:
                lost[0].send(signal.SIGCONT)
                eventually("a former leader that wakes stands by", PATIENCE, lost[0].stands_by)
            weights["weight"] += 1
            assert trainer.update_weights(timeout=120).version == before + 2
        with Client(address) as client:
            newest = client.updates()[0]
        assert (newest.identity.version, newest.report.ok) == (before + 2, True)
    finally:
        replica.stop()
