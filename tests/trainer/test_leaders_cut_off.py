"""A network parts the manager that leads from the database, from its members, or from both, and heals again.

Real processes: that manager is on a host of its own (network namespaces), and what it sends is lost without a word. The
other manager, a real PostgreSQL, a rank and a replica are on this host.
"""

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
from tests import postgresql
from tests.faults.far_host import FarHost, far_host
from tests.ports import free_port
from tests.shared_ledger import Manager
from tests.waiting import PATIENCE, eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SECONDS = 2 * PATIENCE


class Parted:
    """The far manager leads, and the near one stands by. Members reach the far host by the address ``host.manager`` of
    this one, the far manager the database by ``host.relays``."""

    def __init__(self, host: FarHost, server: postgresql.Server, folder: Path) -> None:
        self.host = host
        address = server.new_database()
        there = address.replace("@127.0.0.1:", f"@{host.relays}:")
        self.far = Manager(there, folder / "far.log", f"{host.address}:{free_port()}", host.inside)
        eventually("the far manager leads", SECONDS, self.far.leads)
        self.near = Manager(address, folder / "near.log")

    @property
    def addresses(self) -> str:
        return f"{self.far.address},{self.near.address}"

    def end(self) -> None:
        self.near.end()
        self.far.end()

    def have_far_lead(self) -> None:
        """An orderly end gives the term back."""
        self.near.send(signal.SIGTERM)
        self.near.process.wait(SECONDS)
        eventually("the far manager leads", SECONDS, self.far.leads)
        self.near.start()
        eventually("the near manager stands by", SECONDS, self.near.stands_by)

    def parts(self) -> dict[str, tuple[Callable[[], object], Callable[[], object]]]:
        """What begins each fault, and what ends it."""
        host = self.host
        return {
            "from the database": (lambda: host.lose(host.relays), lambda: host.find(host.relays)),
            "from its members": (lambda: host.lose(host.manager), lambda: host.find(host.manager)),
            "from both": (host.cut, host.mend),
        }


@pytest.fixture
def parted(tmp_path: Path) -> Iterator[Parted]:
    with far_host() as host, postgresql.running(network="198.18.0.0/15") as server:
        made = Parted(host, server, tmp_path)
        try:
            yield made
        finally:
            made.end()


def test_an_update_ends_although_its_manager_is_cut_off(parted: Parted) -> None:
    """All of it with two processes, since each takes seconds to start."""
    weights = {"weight": torch.zeros(64, 64)}
    replica = PlainReplica(parted.addresses).start()
    cut_at: list[float] = []
    try:
        with Trainer(parted.addresses, rank=0, world_size=1, lineage="run", deadlines=DEADLINES) as trainer:
            trainer.publish(lambda: iter(weights.items()))
            trainer.wait_for_replicas(1, timeout=SECONDS)
            version = trainer.update_weights(timeout=SECONDS).version
            for fault, (begin, end) in parted.parts().items():
                parted.have_far_lead()
                weights["weight"] += 1

                def cut(fault: str = fault, begin: Callable[[], object] = begin) -> None:
                    replica.before_reading = lambda: None
                    begin()
                    cut_at.append(time.monotonic())
                    eventually("the near manager leads", SECONDS, parted.near.leads)
                    print(f"cut off {fault}: another manager led {time.monotonic() - cut_at[-1]:.1f} s later")

                replica.before_reading = cut
                report = trainer.update_weights(timeout=3 * SECONDS)
                print(f"cut off {fault}: the update ended {time.monotonic() - cut_at[-1]:.1f} s after it")
                assert report.ok, report
                assert report.version == version + 1, "it is the same version, not one more"
                end()
                eventually("the former leader stands by", SECONDS, parted.far.stands_by)
                assert parted.near.leads()
                weights["weight"] += 1
                version = trainer.update_weights(timeout=SECONDS).version
                assert version == report.version + 1
                assert torch.equal(replica.weights["weight"], weights["weight"].to(replica.weights["weight"].dtype))
    finally:
        replica.stop()
    assert len(cut_at) == len(parted.parts())
    assert "no member was heard for" in parted.far.log
    assert "the term has ended: it was not renewed" in parted.far.log
    assert "Traceback" not in parted.far.log + parted.near.log
