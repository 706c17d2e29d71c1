"""Room for what a collective brings of tensors that have no memory in the model before an install."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from ckpt_engine.core.boxes import Box
from ckpt_engine.install.plans import ReadyPlan


def test_room_that_ran_out_of_memory_is_made_again_and_not_taken_for_whole() -> None:
    def read(number: int, size: int) -> Any:
        return SimpleNamespace(transport="nccl", tensor=number, box=Box((0,), (size,)), dtype="bfloat16")

    reads = [read(0, 4), read(1, 1 << 58)]
    resolved = SimpleNamespace(work={}, handed={"a": SimpleNamespace(reads=reads)})
    plan = ReadyPlan(b"", cast(Any, resolved), {}, frozenset())
    for _ in range(2):
        with pytest.raises(RuntimeError, match="memory"):
            plan.make_room(torch.device("cpu"))
        assert plan.buffers == 0
    reads[1] = read(1, 4)
    plan.make_room(torch.device("cpu"))
    assert plan.buffers == 16
