"""Mapped memory and GPUs: where no driver is, pinning says so and copies go on as before."""

from __future__ import annotations

import pytest
import torch

from ckpt_engine.cuda.driver import library_problem
from ckpt_engine.transport.shared_memory.memory import SharedArena, SharedMemoryTransport


@pytest.mark.skipif(not library_problem(), reason="this host has an NVIDIA driver")
def test_memory_that_cannot_be_pinned_says_why() -> None:
    arena = SharedArena(4096)
    arena.tensor(0, (4,), torch.float32).fill_(3)
    region = arena.region(1)
    opened = SharedMemoryTransport().open([region])
    (mapping,) = opened._mappings.values()
    assert "no NVIDIA driver can be used" in mapping.pin()
    assert mapping.pin() == mapping.pin()
    assert opened.view(region, 0, (4,), (1,), "float32").tolist() == [3.0] * 4
    arena.close()
