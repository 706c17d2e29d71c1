"""What a worker has open of its sources is closed as soon as no plan needs it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ckpt_engine.engine.target import ModuleTarget
from ckpt_engine.install.installer import Installer
from ckpt_engine.transport.base import OpenedRegions
from ckpt_engine.transport.mapped import MappedRegions
from ckpt_engine.transport.shared_memory.memory import SharedMemoryTransport
from ckpt_engine.v1 import weights_pb2
from tests.install.install_models import TensorParallel
from tests.install.install_world import Checkpoint, OneWorker


class Watched(SharedMemoryTransport):
    """The transport itself, which also notes what it opened and whether that was closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open_now: list[OpenedRegions] = []

    def open(self, regions: Sequence[weights_pb2.Region], seconds: float = 60.0) -> MappedRegions:
        opened = super().open(regions, seconds)
        self.open_now.append(opened)
        close = opened.close

        def closed() -> None:
            close()
            self.open_now.remove(opened)

        opened.close = closed  # type: ignore[method-assign]
        return opened


def test_regions_are_closed_and_not_only_forgotten(tmp_path: Path) -> None:
    """An owner's memory is free once its readers close it; nobody may wait for a garbage collection."""
    model = TensorParallel()
    checkpoint = Checkpoint(model.checkpoint())
    worker = OneWorker(ModuleTarget(model), tmp_path)
    watched = Watched()
    worker.installer = Installer(worker.target, worker.slot, {"shared_memory": watched})
    for let_go in (worker.installer.release, worker.installer.discarding):
        assert not worker.update(checkpoint).report.HasField("problem")
        assert len(watched.open_now) == 1
        let_go()
        assert watched.open_now == []
    worker.update(checkpoint)
    checkpoint.seal()
    other = Checkpoint(model.checkpoint(2))
    worker.update(other)
    assert len(watched.open_now) == 2, "the plan before is kept ready"
    worker.update(other)
    assert len(watched.open_now) == 1, "it is closed, since it is neither served nor comes"
    worker.prepare(other)
    order = worker.order(other)
    plan = weights_pb2.WorkerPlan.FromString(order.plan)
    plan.sources[1].transport = "unheard of"
    plan.pieces[0].source = 1
    order.plan = plan.SerializeToString(deterministic=True)
    before = list(watched.open_now)
    assert "unheard of" in worker.installer.install(order).report.problem.message
    assert watched.open_now == before, "what was opened of a plan that is refused is closed"
    checkpoint.close()
    other.close()
