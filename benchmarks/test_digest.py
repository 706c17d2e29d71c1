"""How fast a CPU digests: one large matrix, a model's mix of tensors, and norms, which are small and many."""

from __future__ import annotations

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from ckpt_engine.core.digest import digest_boxes

LAYER = [(1024,), (1024,), (128,), (128,), (2048, 1024), (1024, 1024), (1024, 1024), (1024, 2048)]
LAYER += [(3072, 1024), (3072, 1024), (1024, 3072)]
MODELS = {
    "4096x4096 bfloat16": [(4096, 4096)],
    "400 mixed tensors": [*(LAYER * 36), (50_000, 1024), (1024,), (7, 5), ()],
    "5000 norms of 4096": [(4096,)] * 5000,
    "transposed 4096x4096": [(4096, 4096)],
}


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("model", MODELS)
def test_digest(benchmark: BenchmarkFixture, model: str, threads: int) -> None:
    boxes = [(torch.randn(shape).bfloat16(), (0,) * len(shape)) for shape in MODELS[model]]
    if model.startswith("transposed"):
        boxes = [(tensor.t(), start) for tensor, start in boxes]
    size = sum(tensor.nbytes for tensor, _ in boxes)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        benchmark.pedantic(digest_boxes, args=(boxes,), rounds=7, warmup_rounds=1)
    finally:
        torch.set_num_threads(before)
    benchmark.extra_info["gigabytes_per_second"] = round(size / benchmark.stats.stats.min / 1e9, 2)
    benchmark.extra_info["microseconds_per_tensor"] = round(benchmark.stats.stats.min / len(boxes) * 1e6, 1)
