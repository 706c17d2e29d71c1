"""Updates of two pools on one manager that go on side by side, over real gRPC, with real weights."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from plain_replica import PlainReplica
from test_going_back import ManagerProcess
from test_pools import a_trainer

from ckpt_engine import CkptEngineError

StartReplica = Callable[..., PlainReplica]


@dataclass
class Held:
    """Keeps a replica in its install until it is let go."""

    begun: threading.Event = field(default_factory=threading.Event)
    go: threading.Event = field(default_factory=threading.Event)

    def wait(self) -> None:
        self.begun.set()
        assert self.go.wait(60)


def test_updates_of_a_pool_begin_and_end_while_a_replica_of_another_one_installs(
    manager: str, replica: StartReplica
) -> None:
    actor, judge, held = replica("a", pool="actor"), replica("j", pool="judge"), Held()
    actor.before_reading = held.wait
    with (
        ThreadPoolExecutor(1) as pool,
        a_trainer(manager, "actor", 1.0) as first,
        a_trainer(manager, "judge", 2.0) as second,
    ):
        first.wait_for_replicas(timeout=60)
        second.wait_for_replicas(timeout=60)
        slow = pool.submit(first.update_weights, 7, timeout=60)
        try:
            assert held.begun.wait(60)
            reports = [second.update_weights(version, timeout=60) for version in (3, 4)]
            assert not slow.done()
            assert actor.identity is None
        finally:
            held.go.set()
        report = slow.result(60)
        assert report.ok
        assert all(each.ok for each in reports)
        assert [each.name for each in report.replicas] == ["a"]
    assert [len(each.installs) for each in (actor, judge)] == [1, 2]
    for each, value, version in ((actor, 1.0, 7), (judge, 2.0, 4)):
        assert torch.equal(each.weights["weight"], torch.full((4,), value))
        assert each.identity is not None
        assert each.identity.version == version


@pytest.mark.slow
def test_a_manager_that_is_killed_in_two_updates_tells_how_both_ended(tmp_path: Path) -> None:
    """Both replicas go on by themselves with what they were told, and both runs go on with the manager's successor."""
    process = ManagerProcess(tmp_path)
    replicas = [PlainReplica(process.address, name, pool) for name, pool in (("a", "actor"), ("j", "judge"))]
    both = [Held(), Held()]
    try:
        with a_trainer(process.address, "actor", 1.0) as actor, a_trainer(process.address, "judge", 2.0) as judge:
            trainers = (actor, judge)
            for each, held, trainer in zip(replicas, both, trainers, strict=True):
                each.before_reading = held.wait
                each.start()
                trainer.wait_for_replicas(timeout=60)
            with ThreadPoolExecutor(2) as pool:
                calls = [pool.submit(trainer.update_weights, 7, timeout=60) for trainer in trainers]
                try:
                    assert all(held.begun.wait(60) for held in both)
                    process.kill()
                    assert all(isinstance(call.exception(60), CkptEngineError) for call in calls)
                    process.start()
                finally:
                    for held in both:
                        held.go.set()
            for trainer, each in zip(trainers, replicas, strict=True):
                trainer.wait_for_replicas(timeout=60)
                with pytest.raises(CkptEngineError, match="the manager ended during update") as caught:
                    trainer.wait(7, timeout=60)
                assert f"lineage {trainer.lineage!r}" in str(caught.value)
                assert trainer.update_weights(7, timeout=60).ok
                assert each.identity is not None
                assert each.identity.lineage == trainer.lineage
    finally:
        for held in both:
            held.go.set()
        for each in replicas:
            each.stop()
        process.kill()
