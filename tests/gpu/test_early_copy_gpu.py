"""Stage memory on a GPU: what lies there is what is installed, bit for bit, while the GPU computes."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.engine.target import ModuleTarget
from ckpt_engine.install.stage_memory import StageMemory
from ckpt_engine.v1 import manager_pb2, weights_pb2

sys.path.insert(0, str(Path(__file__).parents[1] / "install"))

from tests.gpu.test_gpu_install import models, on_host
from tests.install.install_models import assert_same, state
from tests.install.install_world import Checkpoint, OneWorker

pytestmark = pytest.mark.timeout(120)

GPU = torch.device("cuda", 0)


@contextmanager
def computing() -> Iterator[None]:
    """Work of an engine on its own stream, from another thread, whose results must stay right."""
    over = threading.Event()
    wrong: list[object] = []

    def compute() -> None:
        one = torch.randn(1024, 1024, device=GPU)
        first = one @ one
        while not over.is_set():
            if not torch.equal(one @ one, first):
                wrong.append("a product differs")

    thread = threading.Thread(target=compute)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    assert not wrong


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("rank", "size"), [(0, 1), (1, 2)])
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_it_is_what_the_loader_gives(tmp_path: Path, rank: int, size: int, tied: bool, share: float) -> None:
    model, like = models(rank, size, tied)
    checkpoint = Checkpoint(model.checkpoint(), seed=rank)
    whole = sum(tensor.nbytes for tensor in model.parameters())
    memory = "auto" if share == 1.0 else f"{int(share * whole)}B"
    worker = OneWorker(ModuleTarget(model), tmp_path, memory, "cuda:0")
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    with computing():
        for _ in range(3):
            checkpoint.weights = {name: torch.randn_like(weight) for name, weight in checkpoint.weights.items()}
            checkpoint.seal()
            worker.prepare(checkpoint)
            order = worker.order(checkpoint)
            before = [parameter.clone() for parameter in model.parameters()]
            news = worker.brought(order)
            assert news.verified, news.problem.message
            for parameter, value in zip(model.parameters(), before, strict=True):
                assert torch.equal(parameter.nan_to_num(), value.nan_to_num()), "no weight is touched before DIRTY"
            if share == 1.0:
                for arena in checkpoint.arenas:
                    arena.tensor(0, (arena.size,), torch.uint8).fill_(0xA5)
            installed = worker.installer.install(order)
            report = installed.report
            assert not report.HasField("problem"), report.problem.message
            assert report.verified == len(worker.recording(checkpoint).needs)
            assert report.early_bytes == report.bytes if share == 1.0 and not tied else report.early_bytes
            assert report.early_bytes <= report.bytes
    assert [parameter.data_ptr() for parameter in model.parameters()] == addresses
    like.load_weights(checkpoint.weights.items())
    assert_same(on_host(model), state(like))
    checkpoint.close()


def test_a_model_of_float32_is_filled_from_bfloat16_in_stage_memory(tmp_path: Path) -> None:
    """Widened as it is copied on the device."""
    model, like = (model.float() for model in models())
    checkpoint = Checkpoint({name: weight.bfloat16() for name, weight in model.checkpoint().items()}, seed=4)
    worker = OneWorker(ModuleTarget(model), tmp_path, "auto", "cuda:0")
    worker.prepare(checkpoint)
    order = worker.order(checkpoint)
    assert worker.brought(order).verified
    report = worker.installer.install(order).report
    assert not report.HasField("problem"), report.problem.message
    assert report.early_bytes
    like.load_weights((name, weight.float()) for name, weight in checkpoint.weights.items())
    assert_same(on_host(model), state(like))
    checkpoint.close()


def test_one_bit_is_noticed_in_stage_memory(tmp_path: Path) -> None:
    model, _ = models()
    checkpoint = Checkpoint(model.checkpoint(), seed=5)
    worker = OneWorker(ModuleTarget(model), tmp_path, "auto", "cuda:0")
    assert not worker.update(checkpoint).report.HasField("problem")
    worker.prepare(checkpoint)
    order = worker.order(checkpoint)
    checkpoint.flip("layers.1.o_proj", (7, 3))
    news = worker.brought(order)
    assert news.problem.code == weights_pb2.Problem.CODE_DATA_LOSS
    assert "layers.1.o_proj" in news.problem.message
    assert worker.page.read()[0].state == manager_pb2.WORKER_STATE_CLEAN
    checkpoint.close()


def test_a_given_size_is_taken_and_given_back_to_the_driver() -> None:
    torch.empty(1, device=GPU)
    free = torch.cuda.mem_get_info(GPU)[0]
    stage = StageMemory("1GiB", GPU)
    assert free - torch.cuda.mem_get_info(GPU)[0] >= 1 << 30
    assert torch.cuda.memory_allocated(GPU) < 1 << 30, "it is not torch's, and no allocator of an engine's sees it"
    stage.give_back()
    assert torch.cuda.mem_get_info(GPU)[0] >= free - (64 << 20)
    with pytest.raises(CkptEngineError, match=r"asks for 9\.095 TiB on cuda:0, where .* are free"):
        StageMemory("10TB", GPU)
