"""What no update brings must survive a sleep that discards memory; nothing is installed beside what did not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.engine.target import ModuleTarget
from ckpt_engine.install.constants import Constants
from ckpt_engine.v1 import manager_pb2, weights_pb2
from tests.install.install_models import TensorParallel
from tests.install.install_world import Checkpoint, OneWorker


class Rotary(TensorParallel):
    """With a table that no checkpoint holds, of two dtypes that engines use for them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cos_sin", torch.arange(64, dtype=torch.float32).view(8, 8), persistent=False)
        self.register_buffer("scale", torch.tensor(1.0), persistent=False)
        self.register_buffer("order", torch.arange(5), persistent=False)


def installed(worker: OneWorker, checkpoint: Checkpoint) -> weights_pb2.Problem | None:
    report = worker.update(checkpoint).report
    return report.problem if report.HasField("problem") else None


@pytest.mark.parametrize("name", ["cos_sin", "scale", "order"])
def test_a_table_that_was_lost_is_named_until_the_engine_restarts(tmp_path: Path, name: str) -> None:
    model = Rotary()
    checkpoint = Checkpoint(model.checkpoint())
    worker = OneWorker(ModuleTarget(model), tmp_path)
    assert installed(worker, checkpoint) is None
    worker.slot.none()
    worker.installer.discarding()
    lost = dict(model.named_buffers())[name]
    kept = lost.clone()
    lost.zero_()
    before = {name: tensor.clone() for name, tensor in model.named_parameters()}
    for _ in range(2):
        worker.installer.discarding()  # again, as an engine may: what is lost already must not count as right
        problem = installed(worker, checkpoint)
        assert problem is not None
        assert problem.code == weights_pb2.Problem.CODE_DATA_LOSS
        assert list(problem.tensors) == [name]
        assert "restart the engine" in problem.message
        assert worker.page.read()[0].state == manager_pb2.WORKER_STATE_NONE
    assert all(torch.equal(before[name], tensor) for name, tensor in model.named_parameters())
    lost.copy_(kept)
    assert installed(worker, checkpoint) is None
    lost.zero_()
    assert installed(worker, checkpoint) is None, "compared once for each time that memory was discarded"
    checkpoint.close()


def test_tables_of_any_dtype_and_layout_are_compared() -> None:
    dtypes = (torch.bool, torch.uint8, torch.int32, torch.int64, torch.float64, torch.complex64, torch.complex128)
    model = nn.Module()
    for dtype in (*dtypes, torch.float8_e4m3fn, torch.uint16):
        model.register_buffer(f"of {dtype}".replace(".", " "), torch.ones(4, 3).to(dtype), persistent=False)
    model.register_buffer("empty", torch.empty(0, 3), persistent=False)
    model.register_buffer("expanded", torch.ones(1, 3).expand(5, 3), persistent=False)
    model.register_buffer("strided", torch.ones(6, 4)[::2].t(), persistent=False)
    for name, table in model.named_buffers():
        constants = Constants(ModuleTarget(model, load_weights=lambda weights: None))
        constants.note()
        constants.check()
        if table.numel():
            constants.note()
            table.untyped_storage()[table.storage_offset() * table.itemsize + table.itemsize - 1] ^= 1
            with pytest.raises(CkptEngineError, match=name):
                constants.check()


def test_without_a_note_nothing_is_compared(tmp_path: Path) -> None:
    model = Rotary()
    checkpoint = Checkpoint(model.checkpoint())
    worker = OneWorker(ModuleTarget(model), tmp_path)
    assert installed(worker, checkpoint) is None
    model.cos_sin.zero_()
    assert installed(worker, checkpoint) is None
    checkpoint.close()


def test_what_could_not_be_noted_is_not_trusted() -> None:
    """The fault is made: a target that fails once, as one whose memory is gone would."""

    class Failing(ModuleTarget):
        fails = True

        def constant(self) -> dict[str, str]:
            if self.fails:
                raise RuntimeError("an illegal memory access was encountered")
            return {}

    target = Failing(nn.Linear(2, 2), load_weights=lambda weights: None)
    constants = Constants(target)
    constants.note()
    target.fails = False
    with pytest.raises(Exception, match=r"cannot be checked.*illegal memory access"):
        constants.check()
