"""The parts of sleeping that run inside vLLM's workers, without vLLM: what they do is torch and plain classes."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest
import torch
from torch import nn

from ckpt_engine.engine.attributes import LARGEST_BYTES, Attributes
from ckpt_engine.host import gpus
from ckpt_engine_adapters.vllm import driver
from ckpt_engine_adapters.vllm.sleeping import guard_sleep


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(2))
        self.weight = nn.Parameter(torch.ones(2))
        self.range = torch.tensor(200.0)
        self.kv_cache = torch.ones(3)
        self.large = torch.ones(LARGEST_BYTES // 4 + 1)


def test_small_attributes_come_back_and_nothing_else_is_touched() -> None:
    layer = Layer()
    attributes = Attributes(layer, "cpu")
    layer.later = torch.tensor(7.0)
    attributes.keep()
    for tensor in (layer.range, layer.scale, layer.weight.data, layer.kv_cache, layer.large, layer.later):
        tensor.zero_()
    attributes.keep()  # again, after the memory is gone: the first copies count
    attributes.put_back()
    assert layer.range == 200.0
    for tensor in (layer.scale, layer.weight.data, layer.kv_cache, layer.large, layer.later):
        assert not tensor.any()
    layer.range.fill_(5.0)
    attributes.put_back()
    assert layer.range == 5.0, "put back once"


def test_an_attribute_that_was_replaced_is_left_alone() -> None:
    layer = Layer()
    attributes = Attributes(layer, "cpu")
    attributes.keep()
    layer.range = torch.tensor(3.0)
    attributes.put_back()
    assert layer.range == 3.0


def test_a_worker_says_that_it_holds_nothing_before_it_discards_and_gives_our_memory_back_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A stand-in for vLLM's worker class; tests/engines/test_vllm_two_workers.py has the real one."""
    told: list[object] = []

    class Worker:
        def sleep(self, level: int = 1) -> str:
            told.append(level)
            return "slept"

    module = types.ModuleType("vllm.v1.worker.gpu_worker")
    module.Worker = Worker  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for _ in range(2):  # more than once is once
        guard_sleep(lambda worker: told.append(worker), lambda _: told.append("given back"))
    worker = Worker()
    assert [worker.sleep(), worker.sleep(level=1), worker.sleep(2), worker.sleep(level=2)] == ["slept"] * 4
    assert told == ["given back", 1, "given back", 1, worker, 2, worker, 2]


def test_a_server_that_is_to_sleep_gets_the_option_for_it_where_there_is_a_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(gpus, "NVIDIA_DRIVER", tmp_path / "none")
    assert driver.launch_plan(["--max-model-len", "8"], 1, "model").sleep_argument == ""
    monkeypatch.setattr(gpus, "NVIDIA_DRIVER", tmp_path)
    assert driver.launch_plan(["--max-model-len", "8"], 1, "model").sleep_argument == "--enable-sleep-mode"
